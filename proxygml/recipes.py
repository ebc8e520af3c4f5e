"""What to do: a Recipe holds every setting of a run, PRESETS name the ones worth starting from."""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from proxygml.files import parse_json
from proxygml.losses.proxygml.settings import ProxyGMLSettings


@dataclass(frozen=True)
class Recipe(ProxyGMLSettings):
    """Every setting of a run. Defaults are the paper's, where it has one."""

    dataset: str = "glyphs"
    """Which images: see `proxygml datasets`."""
    data: str | None = None
    """Folder of the dataset; glyphs need none."""
    classes: int | None = None
    """Use this many training and as many test classes, instead of all."""
    max_class_size: int | None = None
    """Use only the first so many images of every class, instead of all."""
    test_share: float = 0.5
    """Share of the classes to test on, where the dataset does not say (folder, table)."""
    skip_broken: bool = False
    """Leave out images that cannot be read, and count them, instead of stopping before the first step."""
    cache: str | None = None
    """Folder for training images decoded and shrunk once, worth it for photos of megapixels; None: decode the files."""
    cache_gigabytes: float = 10.0
    """How large that folder may become."""
    held_out: float = 0.1
    """Share of the training classes kept aside to choose the best epoch on; 0: train on all, keep the last epoch."""
    tested_epochs: tuple[int, ...] = ()
    """The paper's way: score the test classes after these epochs and the last; with held_out 0 they choose the best."""
    keep_epoch: Literal["best", "last"] = "best"
    """Which network to keep: of the best epoch, or of the last whatever is scored in between."""
    test: bool = True
    """Score the best network on the test classes at the end; off while settings are being chosen on held-out ones."""

    image_size: int = 224
    """Side of the images that the network sees, in pixels."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the area that a random training crop keeps."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Narrowest and widest shape of a random training crop."""
    flip: bool = True
    """Mirror half of the training images."""
    test_crop: float = 224 / 256
    """Share of the shorter side that the centre crop for testing keeps."""

    backbone: str = "convnet"
    """The network: convnet, bn-inception, googlenet, resnet18 or 50, efficientnet-lite0, 1 or 2, hf:NAME_OR_FOLDER."""
    weights: str | None = None
    """Weights to start from: a .pth or .safetensors file, or "pretrained" for the published ones; None: random."""
    frozen: tuple[str, ...] = ()
    """Stages of the network that stay as they are."""
    feature_crops: int = 0
    """Freeze the network below its head, compute the features of so many random crops of each image once, and train the
    head on them; 0: train the network."""
    embedding_dim: int = 512
    """Length of an embedding."""
    head_start: Literal["uniform", "kaiming"] = "uniform"
    """How the last layer begins: torch's uniform numbers, or Kaiming's normal ones without a bias."""
    pooling: Literal["average", "max", "average+max"] = "average"
    """How the maps of the network become one vector."""

    loss: str = "proxygml"
    """The loss to train with: see `proxygml losses`."""
    loss_settings: tuple[str, ...] = ()
    """Settings of another loss than proxygml, by its own names: alpha=2 beta=40."""
    start_ratio: float | None = None
    """Not in the paper: r in the first epoch, from which it falls geometrically to `ratio` in the last."""
    shard: bool = False
    """Spread the classes of proxygml over the processes: each keeps the proxies of its own."""

    epochs: int = 50
    """How often every training image is seen."""
    batch_size: int = 32
    """Images in a step."""
    images_per_class: int | None = None
    """Of each class in a batch, for losses whose batches are drawn by class; None: as the method has it."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """What takes the steps; sgd has a momentum of 0.9."""
    learning_rate: float = 1e-4
    """Of the network."""
    head_learning_rate: float | None = None
    """Of its last layer, where that is to be another."""
    proxy_learning_rate: float | None = 3e-2
    """Of the proxies, or whatever else the loss learns; None: as the loss has it, for Adam with its usual epsilon."""
    adam_epsilon: float = 1e-2
    """Adam's epsilon; the authors' 0.01 makes small gradients take small steps."""
    weight_decay: float = 1e-4
    """Added to the gradient of network and proxies alike."""
    schedule: Literal["steps", "cosine"] = "steps"
    """Learning rates fall in steps at the epochs in `decay`, or along a cosine to 0 at the end."""
    decay: tuple[int, ...] = (20, 40)
    """Epochs, counted from 0, from which the learning rates are multiplied once more by `decay_factor`."""
    decay_factor: float = 0.1
    """What each step of `decay` multiplies the learning rates by."""
    warmup: tuple[int, ...] = ()
    """Epochs, counted from 0, that train head and proxies only."""
    freeze_batch_norm: bool = False
    """Keep the statistics of batch normalisation as they are."""
    seed: int = 0
    """Decides weights, order and crops; the same seed gives the same run."""

    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    """The n of Recall@n."""
    baselines: bool = True
    """Also score raw pixels and the network before training, without its head, on the test classes."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Number format of the network; the loss always uses float32."""
    workers: int = 0
    """Processes that decode images; 0: none but the training itself."""
    devices: int = 1
    """Processes that share each batch, one for each GPU, or on a CPU so many; torchrun says it instead."""
    nodes: int = 1
    """Machines that share it, each of which is told so: see docs/scaling.md."""
    timeout: float = 1800.0
    """Seconds after which processes give up waiting for each other."""

    def __post_init__(self) -> None:
        for one in fields(self):  # JSON has lists where a recipe has tuples
            if isinstance(getattr(self, one.name), list):
                object.__setattr__(self, one.name, tuple(getattr(self, one.name)))
        for name, kind in get_type_hints(type(self)).items():
            if not _fits(getattr(self, name), kind):
                expected = getattr(kind, "__name__", str(kind).replace("typing.", ""))
                raise ValueError(f"expected {name} as {expected}, got {getattr(self, name)!r}")
        for name, least in [
            ("image_size", 1),
            ("embedding_dim", 1),
            ("epochs", 1),
            ("batch_size", 2),
            ("workers", 0),
            ("feature_crops", 0),
        ]:
            if getattr(self, name) < least:
                raise ValueError(f"expected {name} of at least {least}, got {getattr(self, name)}")
        if self.devices < 1 or self.nodes < 1:
            raise ValueError(f"expected at least one device and one node, got {self.devices} and {self.nodes}")
        for name in ("images_per_class", "max_class_size"):
            if getattr(self, name) is not None and getattr(self, name) < 2:
                raise ValueError(f"expected {name} of at least 2, got {getattr(self, name)}")
        if self.feature_crops and (self.weights is None or self.frozen or self.devices * self.nodes > 1):
            raise ValueError("feature_crops trains a head on a pretrained network, in one process, without frozen")
        if self.start_ratio is not None and (self.loss != "proxygml" or self.links is not None):
            raise ValueError("start_ratio needs loss proxygml, and a ratio instead of links")
        if self.sparse_gradient and (self.optimizer, self.proxy_weight, self.loss) != ("adam", 0, "proxygml"):
            raise ValueError("sparse_gradient needs loss proxygml with proxy_weight 0, and optimizer adam")
        if self.shard and (self.loss != "proxygml" or self.optimizer not in ("adam", "adamw")):
            raise ValueError(f"shard needs loss proxygml and adam or adamw, got {self.loss} and {self.optimizer}")
        parse_settings(self.loss_settings)
        rates = ("learning_rate", "head_learning_rate", "proxy_learning_rate", "adam_epsilon", "decay_factor")
        for name in (*rates, "start_ratio", "cache_gigabytes", "timeout"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} above 0, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"expected weight_decay of at least 0, got {self.weight_decay}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"expected seed from 0 to 2**32 - 1, got {self.seed}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"expected held_out from 0 to below 1, got {self.held_out}")
        for name in ("test_crop", "test_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"expected {name} above 0 and at most 1, got {getattr(self, name)}")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"expected crop_scale as two rising shares in (0, 1], got {self.crop_scale}")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1] < math.inf:
            raise ValueError(f"expected crop_ratio as two rising numbers above 0, got {self.crop_ratio}")
        if not self.recall_at or min(self.recall_at) < 1:
            raise ValueError(f"expected recall_at as numbers of at least 1, got {self.recall_at}")
        for name, first in [("decay", 0), ("warmup", 0), ("tested_epochs", 1)]:
            if min(getattr(self, name), default=first) < first:
                raise ValueError(f"expected {name} as epochs counted from {first}, got {getattr(self, name)}")

    def changed(self, settings: Mapping[str, object]) -> "Recipe":
        """This recipe with other settings; an unknown name is an error that names the nearest known one."""
        known = [one.name for one in fields(self)]
        for name in settings:
            if name not in known:
                longer = [one for one in known if one.startswith(name)]
                nearest = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.4)
                hint = f": did you mean {nearest[0]!r}?" if nearest else ""
                raise ValueError(f"a recipe has no setting {name!r}{hint}")
        return replace(self, **cast(dict[str, Any], settings))  # each value is checked when it is made

    def to_json(self) -> str:
        """As JSON text that `from_json` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """The recipe that `to_json` wrote; settings it does not name have their defaults."""
        settings = parse_json(text)
        if not isinstance(settings, dict):
            raise ValueError(f"expected a recipe as a JSON object, got {type(settings).__name__}")
        return cls().changed(settings)


Setting = float | bool | str | tuple[float, ...]


def parse_settings(settings: tuple[str, ...]) -> dict[str, Setting]:
    """("alpha=2", "ratios=1,0.5") -> values by name: whole numbers, numbers, several numbers, truths, words."""
    parsed: dict[str, Setting] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not (name and equals and text):
            raise ValueError(f"expected loss_settings as name=value, got {setting!r}")
        parsed[name] = _parse(text)
    return parsed


def _parse(text: str) -> Setting:
    for kind in (int, float, lambda several: tuple(map(float, several.split(",")))):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"True": True, "False": False}.get(text, text)


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of a type as the fields of a Recipe name them."""
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return value in inner
    if get_origin(kind) is tuple:
        same = len(inner) == 2 and inner[1] is ...
        kinds = inner[:1] * len(value) if isinstance(value, tuple) and same else inner
        return isinstance(value, tuple) and len(kinds) == len(value) and all(map(_fits, value, kinds))
    if inner:  # int | None
        return any(_fits(value, one) for one in inner)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)  # larger ones are no float
    return isinstance(value, kind)


GLYPHS = Recipe(
    dataset="glyphs",
    image_size=32,
    crop_scale=(0.6, 1.0),
    flip=False,
    test_crop=1.0,
    embedding_dim=128,
    proxies_per_class=4,
    epochs=12,
    learning_rate=2e-3,
    proxy_learning_rate=None,
    adam_epsilon=1e-8,
    schedule="cosine",
)

PHOTOS = Recipe(  # docs/paper.md says which of these were compared on held-out classes of CUB-200-2011
    dataset="folder",
    image_size=128,
    crop_scale=(0.16, 1.0),
    backbone="efficientnet-lite0",
    weights="pretrained",
    pooling="average+max",
    ratio=1.0,
    epochs=6,
    learning_rate=2e-4,
    head_learning_rate=1e-3,
    schedule="cosine",
    freeze_batch_norm=True,
)

PAPER = Recipe(  # what its text and, where that is silent, its authors' code say: docs/paper.md
    backbone="bn-inception",
    weights="pretrained",
    decay=(19, 39),
    warmup=(1,),
    freeze_batch_norm=True,
    held_out=0.0,
    tested_epochs=(1, 2, *range(35, 51)),
    workers=4,
)

PRESETS: dict[str, tuple[str, Recipe]] = {
    "glyphs": ("Letters of the world in sixteen typefaces, embedded: minutes on a CPU, nothing to download.", GLYPHS),
    "photos": (
        "Your own photos, a folder for each class, from pretrained weights, on a CPU: --data FOLDER.",
        PHOTOS.changed({"cache": "runs/cache"}),
    ),
    "cub-small": ("CUB-200-2011 in the same way, small: --data ROOT.", PHOTOS.changed({"dataset": "cub"})),
    "paper-cub": ("The paper's run on CUB-200-2011, for a GPU: --data ROOT.", PAPER.changed({"dataset": "cub"})),
    "paper-cars": ("The paper's run on Cars196, for a GPU: --data ROOT.", PAPER.changed({"dataset": "cars"})),
    "paper-sop": (
        "The paper's run on Stanford Online Products, for a GPU: --data ROOT.",
        PAPER.changed(
            {
                "dataset": "sop",
                "proxies_per_class": 1,
                "proxy_weight": 0.0,
                "proxy_learning_rate": 0.3,
                "freeze_batch_norm": False,
                "recall_at": (1, 10, 100, 1000),
            }
        ),
    ),
}
