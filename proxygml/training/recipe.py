"""Recipe: all settings of a run, validated, to and from JSON."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from proxygml.files import did_you_mean, parse_json, unknown_name
from proxygml.losses.proxygml.settings import ProxyGMLSettings, nested_widths

Device = Literal["auto", "cpu", "cuda", "mps"]
Split = Literal["train", "test", "all"]  # images of a run
Setting = float | bool | str | tuple[float, ...]
MINIMUM = {
    "image_size": 1,
    "embedding_dim": 1,
    "epochs": 0,
    "batch_size": 2,
    "workers": 0,
    "feature_crops": 0,
    "devices": 1,
    "nodes": 1,
    "images_per_class": 2,
    "max_class_size": 2,
    "weight_decay": 0,
}
POSITIVE = (
    *("learning_rate", "head_learning_rate", "proxy_learning_rate", "adam_epsilon", "decay_factor"),
    *("start_ratio", "cache_gigabytes", "timeout", "test_scale"),
)


@dataclass(frozen=True)
class DataSettings:
    """What a run trains and tests on."""

    dataset: str = "glyphs"
    """Name of the dataset: see `proxygml datasets`; or MODULE:NAME of your own, see docs/extend.md."""
    data: str | None = None
    """Folder of the dataset; glyphs need none."""
    classes: int | None = None
    """Use only this many training classes and this many test classes."""
    max_class_size: int | None = None
    """Use at most this many images per class."""
    test_fraction: float = 0.5
    """Fraction of the classes to test on, for datasets without a split of their own (folder, table, tar); 0: none."""
    skip_broken: bool = False
    """Skip and count unreadable images instead of stopping before the first step."""
    cache: str | None = None
    """Folder that caches decoded, downsized training images, useful for large photos; None: no cache."""
    cache_gigabytes: float = 10.0
    """Maximum size of that folder."""
    image_size: int = 224
    """Side of the network's input images in training, in pixels."""
    test_scale: float = 1.0
    """Side of its input images otherwise, as a multiple of `image_size`. Random crops enlarge objects, so that 1.2 to
    1.4 is often better than 1."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Minimum and maximum area of a random training crop, as a fraction of the image."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Minimum and maximum aspect ratio of a random training crop."""
    flip: bool = True
    """Flip half of the training images horizontally."""
    test_crop: float = 224 / 256
    """Side of the center crop for testing, as a fraction of the shorter side."""
    images_per_class: int | None = None
    """Images per class in a batch, for losses that sample by class; None: the method's default."""


@dataclass(frozen=True)
class NetworkSettings:
    """Which network is trained, from which weights."""

    backbone: str = "convnet"
    """Network: convnet, bn-inception, googlenet, resnet18 or 50, efficientnet-lite0, 1 or 2, or hf:NAME_OR_FOLDER."""
    weights: str | None = None
    """Initial weights: a .pth or .safetensors file, or "pretrained" for the published weights; None: random."""
    frozen: tuple[str, ...] = ()
    """Stages of the network that are not trained."""
    feature_crops: int = 0
    """Train only the head, on features of this many random crops per image, computed once; 0: train the network."""
    embedding_dim: int = 512
    """Dimension of the embeddings."""
    head: Literal["linear", "none"] = "linear"
    """Last layer: linear to the embedding dimension, or none: the features are the embeddings."""
    unit_length: bool | None = None
    """Scale embeddings to length 1; None: as the loss needs."""
    head_start: Literal["uniform", "kaiming", "fitted"] = "uniform"
    """Initialization of the last layer: torch's uniform default, Kaiming normal with zero bias, or fitted to the
    features of the training images as `proxygml fit` does. It then keeps all features if there are fewer training
    images than `embedding_dim`."""
    pooling: Literal["average", "max", "average+max"] = "average"
    """Global pooling of the feature maps."""


@dataclass(frozen=True)
class LossSettings(ProxyGMLSettings):
    """The loss; the settings of ProxyGML are its own."""

    loss: str = "proxygml"
    """Name of the loss: see `proxygml losses`; or MODULE:NAME of your own, see docs/extend.md."""
    loss_settings: tuple[str, ...] = ()
    """Settings of a loss other than proxygml, by its own names: alpha=2 beta=40."""
    proxy_start: Literal["random", "samples"] = "random"
    """Not in the paper: samples starts the proxies of proxygml at random training images of their class."""
    start_ratio: float | None = None
    """Not in the paper: r in the first epoch, decreasing geometrically to `ratio` in the last."""
    nested: tuple[int, ...] = ()
    """Not in the paper: numbers of first dimensions, as 64 128 256, that are trained to be embeddings of their own."""
    shard: bool = False
    """Shard the proxies of proxygml by class over the processes."""


@dataclass(frozen=True)
class OptimizationSettings:
    """How it is minimized."""

    epochs: int = 50
    """Passes over the training images; 0 with a fitted head: train nothing else."""
    batch_size: int = 32
    """Images per step, over all processes."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """Optimizer; sgd has a momentum of 0.9."""
    learning_rate: float = 1e-4
    """Learning rate of the network."""
    head_learning_rate: float | None = None
    """Learning rate of the last layer; None: the same."""
    proxy_learning_rate: float | None = 3e-2
    """Learning rate of the proxies or other parameters of the loss; None: the default of the loss."""
    adam_epsilon: float = 1e-2
    """Epsilon of the optimizer; with the authors' 0.01, small gradients take small steps."""
    weight_decay: float = 1e-4
    """Weight decay of network and proxies."""
    schedule: Literal["steps", "cosine"] = "steps"
    """Learning rates decay in steps at the epochs in `decay`, or along a cosine to 0."""
    decay: tuple[int, ...] = (20, 40)
    """Epochs, counted from 0, at which the learning rates are multiplied by `decay_factor`."""
    decay_factor: float = 0.1
    """Factor of each step in `decay`."""
    warmup: tuple[int, ...] = ()
    """Epochs, counted from 0, that train only head and proxies."""
    freeze_batch_norm: bool = False
    """Do not update the statistics of batch normalization."""
    seed: int = 0
    """Seed of weights, order and crops; on a CPU with as many threads, the same seed gives the same run."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Which epoch is kept, and what is scored."""

    held_out: float = 0.1
    """Fraction of the training classes held out to choose the best epoch; if 0, fewer than ten classes, or without test
    classes: train on all, keep the last epoch."""
    tested_epochs: tuple[int, ...] = ()
    """The paper's protocol: score the test classes after these epochs and the last; with held_out 0, keep the best of
    these by MAP@R."""
    keep_epoch: Literal["best", "last"] = "best"
    """Which network to keep: that of the epoch with the best MAP@R on held-out (or tested) classes; or the last, unless
    the pretrained network before training is better on held-out classes."""
    test: bool = True
    """Score the network on the test classes at the end; turn off while tuning on held-out classes."""
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    """The n of Recall@n."""
    baselines: bool = True
    """Also score raw pixels and the untrained network without its head on the test classes."""


@dataclass(frozen=True)
class HardwareSettings:
    """Where it runs."""

    device: Device = "auto"
    """Accelerator."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Precision of the network; loss and evaluation always use float32 in full."""
    workers: int = 0
    """Worker processes that decode images; 0: the training process decodes."""
    devices: int = 1
    """Processes per machine that share each batch, one per GPU or several on a CPU; torchrun overrides it."""
    nodes: int = 1
    """Machines that share each batch; start the command on each: see docs/scaling.md."""
    timeout: float = 1800.0
    """Seconds that processes wait for each other."""


@dataclass(frozen=True)
class Recipe(HardwareSettings, EvaluationSettings, OptimizationSettings, LossSettings, NetworkSettings, DataSettings):
    """All settings of a run; defaults are the paper's where it has one."""

    def __post_init__(self) -> None:
        for field in fields(self):  # JSON has lists instead of tuples
            if isinstance(getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
        for name, annotation in get_type_hints(type(self)).items():
            if not _has_type(getattr(self, name), annotation):
                expected = str(annotation).replace("typing.", "") if get_args(annotation) else annotation.__name__
                raise ValueError(f"expected {name} as {expected}, got {getattr(self, name)!r}")
        self._check_ranges()
        pretrained = self.pretrained
        if self.feature_crops and (not pretrained or self.frozen or self.devices * self.nodes > 1):
            raise ValueError("feature_crops trains a head on a pretrained network, in one process, without frozen")
        if not self.epochs and self.head_start != "fitted":
            raise ValueError("epochs 0 trains nothing: expected epochs of at least 1, or head_start fitted")
        if self.head_start == "fitted" and (self.head == "none" or not pretrained):
            raise ValueError("head_start fitted needs a pretrained network with head linear: set weights")
        if self.proxy_start == "samples" and self.shard:
            raise ValueError("proxy_start samples needs all proxies in one process: leave out shard")
        if self.start_ratio is not None and (not self.is_proxygml or self.links is not None):
            raise ValueError("start_ratio needs loss proxygml, and a ratio instead of links")
        if self.nested:
            nested_widths(self.nested, self.embedding_dim)
            if self.loss != "proxygml" or self.loss_settings or self.shard or self.sparse_gradient or not self.epochs:
                allowed = "loss proxygml without shard, sparse_gradient and loss_settings"
                raise ValueError(f"nested needs {allowed}, and epochs of at least 1")
        if self.sparse_gradient and (self.optimizer, self.proxy_weight, self.loss) != ("adam", 0, "proxygml"):
            raise ValueError("sparse_gradient needs loss proxygml with proxy_weight 0, and optimizer adam")
        changed = not self.positive_mask or self.literal_mask or not self.mask_softmax or self.proxy_rows is not None
        if self.loss == "proxygml-plus" and changed:
            raise ValueError("positive_mask, literal_mask, mask_softmax and proxy_rows are for loss proxygml alone")
        if self.shard and (self.loss != "proxygml" or self.optimizer not in ("adam", "adamw")):
            raise ValueError(f"shard needs loss proxygml and adam or adamw, got {self.loss} and {self.optimizer}")
        parse_settings(self.loss_settings)

    def _check_ranges(self) -> None:
        for name, minimum in MINIMUM.items():
            value = getattr(self, name)
            if value is not None and not minimum <= value < math.inf:
                raise ValueError(f"expected {name} of at least {minimum}, got {value}")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"expected {name} above 0, got {value}")
        if not 0.5 < self.image_size * self.test_scale < 2**15:
            raise ValueError(f"expected test_scale times image_size from 1 to 2**15 pixels, got {self.test_scale}")
        if not 0 < self.test_crop <= 1:
            raise ValueError(f"expected test_crop above 0 and at most 1, got {self.test_crop}")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"expected crop_scale as (min, max) above 0 and up to 1, got {self.crop_scale}")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1] < math.inf:
            raise ValueError(f"expected crop_ratio as (min, max) above 0, got {self.crop_ratio}")
        for name, first in (("decay", 0), ("warmup", 0), ("tested_epochs", 1), ("recall_at", 1)):
            if min(getattr(self, name), default=first) < first:
                raise ValueError(f"expected {name} as numbers from {first}, got {getattr(self, name)}")
        if not self.recall_at:
            raise ValueError("expected at least one number in recall_at, got none")
        if not 0 <= self.seed < 2**31:  # faiss takes an int
            raise ValueError(f"expected seed from 0 to 2**31 - 1, got {self.seed}")
        for name in ("held_out", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected {name} from 0 to below 1, got {getattr(self, name)}")

    @property
    def is_proxygml(self) -> bool:
        """Whether the settings of ProxyGML apply: its loss, or the one with more ingredients."""
        return self.loss in ("proxygml", "proxygml-plus")

    @property
    def pretrained(self) -> bool:
        """Whether the network starts from weights other than random ones."""
        return self.weights is not None or self.backbone.startswith("hf:") or is_class_name(self.backbone)

    @property
    def test_side(self) -> int:
        """Side of the network's input images outside of training, in pixels."""
        return round(self.image_size * self.test_scale)

    @classmethod
    def preset(cls, name: str, **settings: Any) -> "Recipe":
        """The recipe of a preset, with other settings: Recipe.preset("photos", epochs=3)."""
        from proxygml.training.presets import PRESETS  # imports this module

        if name not in PRESETS:
            raise unknown_name("a preset", name, PRESETS)
        return PRESETS[name][1].changed(settings)

    def changed(self, settings: Mapping[str, object]) -> "Recipe":
        """A copy with other settings; the error for an unknown name suggests the closest one."""
        known = [field.name for field in fields(self)]
        for name in settings:
            if name not in known:
                raise ValueError(f"a recipe has no setting {name!r}{did_you_mean(name, known)}")
        return replace(self, **cast(dict[str, Any], settings))  # __post_init__ checks the types

    def with_absolute_paths(self) -> "Recipe":
        """A copy whose files are found from any folder."""
        paths = {name: getattr(self, name) for name in ("data", "cache", "weights")}
        changes = {name: os.path.abspath(path) for name, path in paths.items() if path not in (None, "pretrained")}
        source, folder = self.backbone[:3], self.backbone[3:]
        if source == "hf:" and os.path.isdir(folder):
            changes["backbone"] = source + os.path.abspath(folder)
        return self.changed(changes)

    def to_json(self) -> str:
        """JSON text for `from_json`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """The recipe from `to_json`; missing settings have their defaults."""
        settings = parse_json(text)
        if not isinstance(settings, dict):
            raise ValueError(f"expected a recipe as a JSON object, got {type(settings).__name__}")
        return cls().changed(settings)


def is_class_name(name: str) -> bool:
    """Whether a backbone, dataset or loss of a recipe is the class of an object."""
    return ":" in name and not name.startswith("hf:")


def parse_settings(settings: tuple[str, ...]) -> dict[str, Setting]:
    """("alpha=2", "ratios=1,0.5") -> values by name: int, float, tuple of floats, bool or str."""
    parsed: dict[str, Setting] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not (name and equals and text):
            raise ValueError(f"expected loss_settings as name=value, got {setting!r}")
        parsed[name] = _parse(text)
    return parsed


def _parse(text: str) -> Setting:
    for convert in (int, float, lambda numbers: tuple(map(float, numbers.split(",")))):
        with suppress(ValueError):
            return convert(text)
    return {"True": True, "False": False}.get(text, text)


def _has_type(value: object, annotation: Any) -> bool:
    """isinstance for the annotations of a Recipe: Literal, tuple, unions; an int is a float, a bool is no int."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return value in inner
    if get_origin(annotation) is tuple:
        if not isinstance(value, tuple):
            return False
        expected = inner[:1] * len(value) if inner[-1] is ... else inner
        return len(expected) == len(value) and all(map(_has_type, value, expected))
    if inner:  # int | None
        return any(_has_type(value, member) for member in inner)
    if isinstance(value, bool):
        return annotation is bool
    if annotation is float and isinstance(value, int):
        return abs(value) < 2**1000  # larger numbers overflow a float
    return isinstance(value, annotation)
