"""Training on a network, images, a loss and loggers that are passed as objects."""

import csv
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from proxygml import plots
from proxygml.data import load
from proxygml.losses.interface import LibraryLoss
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from proxygml.training.start import resume, train
from tests.training.test_training import PlugPulledError, same_weights, stop_at


class Network(nn.Module):
    """Images (B, 3, H, W) -> features (B, 12), with its own normalization."""

    pixel_mean, pixel_std = (127.5,) * 3, (127.5,) * 3

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        self.features = nn.Linear(32, 12)

    def forward(self, images: Tensor) -> Tensor:
        return self.features(nn.functional.adaptive_avg_pool2d(self.stem(images), 2).flatten(1))


class Images(torch.utils.data.Dataset):
    """A map-style Dataset of (PIL image, name): the letters of 12 classes."""

    def __init__(self) -> None:
        self.images = load("glyphs", size=16, classes=12)[0]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple:
        return self.images.open(row), self.images.class_names[self.images.labels[row]]


class CenterLoss(nn.Module):
    """A loss with parameters and sampler needs, which counts the epochs."""

    batches, images_per_class, unit_length, learning_rate = "balanced", 3, False, 0.1

    def __init__(self, num_classes: int, embedding_dim: int, *, weight: float = 1.0) -> None:
        super().__init__()
        self.centers, self.weight = nn.Parameter(torch.randn(num_classes, embedding_dim)), weight
        self.seen: list[tuple] = []

    def begin_epoch(self, epoch: int, embed) -> None:
        embeddings, labels = embed()
        self.seen.append((epoch, embeddings.shape[1], len(labels.unique())))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        logits = -torch.cdist(embeddings, self.centers).square()
        return self.weight * nn.functional.cross_entropy(logits, labels)


@pytest.fixture(scope="module")
def images() -> Images:
    return Images()


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_plots.py looks at the pictures."""
    for name in ("draw_curves", "draw_retrieval", "draw_before_after", "draw_map"):
        monkeypatch.setattr(plots, name, draw)


def draw(*arguments: object, queries: object = None) -> None:
    (path,) = (each for each in arguments if isinstance(each, Path))
    Image.new("RGB", (8, 8)).save(path)


@pytest.fixture
def small(tiny: Recipe) -> Recipe:
    changes = {"classes": None, "image_size": 16, "embedding_dim": 8, "held_out": 0.0, "epochs": 2, "batch_size": 16}
    return tiny.changed(changes)


def build_network() -> Network:
    torch.manual_seed(5)
    return Network()


def test_own_network_images_and_loss(small: Recipe, images: Images, tmp_path: Path) -> None:
    loss = CenterLoss(6, 8)
    run = train(small, str(tmp_path / "run"), network=build_network(), data=images, loss=loss)
    assert run.recipe.backbone == "tests.training.test_objects:Network"
    assert run.recipe.dataset == "tests.training.test_objects:Images"
    assert run.recipe.unit_length is False
    assert loss.seen == [(0, 8, 6), (1, 8, 6)]
    assert run.log[0]["learning_rate_proxies"] == pytest.approx(0.1 * 0.6545085)  # at 0.8 of 2 epochs of a cosine
    assert run.scores["trained"]["classes"] == 6


@pytest.mark.slow
def test_resumed_run_with_objects_is_bit_exact(small: Recipe, images: Images, tmp_path: Path) -> None:
    def objects() -> dict:
        return {"network": build_network(), "data": images, "loss": CenterLoss}

    whole = train(small, tmp_path / "whole", **objects())
    with pytest.raises(PlugPulledError):
        train(small, tmp_path / "stopped", progress=stop_at(6), **objects())
    assert len(Run.open(tmp_path / "stopped").log) == 1
    missing = r"needs network=tests\S+:Network, which is not stored in it: pass network=\.\.\. in Python$"
    with pytest.raises(ValueError, match=missing):
        resume(tmp_path / "stopped")
    with pytest.raises(ValueError, match=r"data=tests\S+:Images, .* pass data=\.\.\., or --dataset MODULE:NAME$"):
        resume(tmp_path / "stopped", network=build_network(), loss=CenterLoss)
    resume(tmp_path / "stopped", **objects())
    same_weights(tmp_path / "stopped" / "last.pt", whole.folder / "last.pt")
    same_weights(tmp_path / "stopped" / "model.safetensors", whole.folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "fixed", "moved"),
    [
        ({"frozen": ("stem",)}, "trunk.module.stem.0.weight", "trunk.module.features.weight"),
        ({"warmup": (0, 1)}, "trunk.module.features.weight", "head.weight"),
        ({"head_learning_rate": 1e-30}, "head.weight", "trunk.module.features.weight"),
    ],
)
def test_stages_of_own_network(
    changes: dict, fixed: str, moved: str, small: Recipe, images: Images, tmp_path: Path
) -> None:
    kept = {}

    def keep(entry: dict, model: nn.Module) -> None:
        kept[entry["epoch"]] = {name: value.clone() for name, value in model.state_dict().items()}

    train(small.changed(changes), tmp_path / "run", network=build_network(), data=images, callbacks=[keep])
    assert torch.equal(kept[1][fixed], kept[2][fixed])
    assert not torch.equal(kept[1][moved], kept[2][moved])


@pytest.mark.slow
def test_loss_classes_of_another_library(small: Recipe, images: Images, tmp_path: Path) -> None:
    pml = pytest.importorskip("pytorch_metric_learning")
    from pytorch_metric_learning import losses, miners

    def mined(num_classes: int, embedding_dim: int) -> nn.Module:
        return LibraryLoss(num_classes, embedding_dim, losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner())

    assert pml
    for number, loss in enumerate((losses.ProxyAnchorLoss, losses.TripletMarginLoss(), mined)):
        run = train(small.changed({"epochs": 1}), tmp_path / str(number), data=images, loss=loss)
        assert np.isfinite(run.log[0]["loss"])


@pytest.mark.slow
def test_head_on_cached_features_of_own_network(small: Recipe, images: Images, tmp_path: Path) -> None:
    recipe, network = small.changed({"weights": "pretrained", "feature_crops": 2, "epochs": 1}), build_network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    run = train(recipe, tmp_path / "run", network=network, data=images)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    changed = build_network()
    changed.forward = lambda images: 2 - Network.forward(changed, images)  # of the same name and weights
    other = train(recipe, tmp_path / "other", network=changed, data=images)
    assert run.log[0]["loss"] != other.log[0]["loss"]


def test_classes_in_train_and_test_are_not_called_unseen(small: Recipe, images: Images, tmp_path: Path, capsys) -> None:
    halves = {"train": [images[row] for row in range(0, len(images), 2)], "test": [images[row] for row in range(5)]}
    run = train(small.changed({"epochs": 1}), tmp_path / "run", data=halves)
    assert run.scores["shared_classes"] == run.scores["trained"]["classes"]
    shown = capsys.readouterr().out
    assert f"{run.scores['shared_classes']} of them trained on" in shown
    assert "seen" not in shown


def test_callback_ends_training(small: Recipe, images: Images, tmp_path: Path) -> None:
    run = train(small, tmp_path / "run", data=images, callbacks=[lambda entry, model: entry["epoch"] == 1])
    assert (len(run.log), run.scores["best_epoch"]) == (1, 1)


class Returns(nn.Module):
    """A network that returns what a function makes of the images."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make, self.layer = make, nn.Linear(1, 1)

    def forward(self, images: Tensor) -> object:
        return self.make(images)


def number(loss: object) -> nn.Module:
    """A loss that returns this value."""

    class Number(nn.Module):
        def forward(self, embeddings: Tensor, labels: Tensor) -> object:
            return loss(embeddings) if callable(loss) else loss

    return Number()


class Auxiliary(Network):
    """A network with a second output in training, as GoogLeNet of torchvision."""

    def forward(self, images: Tensor) -> object:
        features = super().forward(images)
        return (features, features) if self.training else features


class Broken(list):
    """A dataset with an item that cannot be read."""

    def __init__(self) -> None:
        super().__init__([(PIXELS[row], TEXTS[row]) for row in range(8)])

    def __getitem__(self, row: int) -> tuple:
        if row == 3:
            raise KeyError("no 3")
        return super().__getitem__(row)


class Failing:
    """A logger that fails in the second epoch."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log_metrics(self, metrics: dict, step: int) -> None:
        if step == 2:
            raise OSError("disk full")
        self.steps.append(step)


PIXELS, TEXTS = np.zeros((8, 4, 4, 3), np.uint8), ["a", "b", "c", "d"] * 2


@pytest.mark.parametrize(
    ("message", "objects"),
    [
        ("returns (2, 3, 4) for two images", {"network": Returns(lambda x: x.new_zeros(2, 3, 4))}),
        ("returns a tuple", {"network": Returns(lambda x: (x, x))}),
        ("Returns raised for (2, 3, 16, 16): too small", {"network": Returns(lambda x: 1 / 0)}),
        ("Returns returns NaN or infinity for black images", {"network": Returns(lambda x: x.mean((2, 3)) / 0)}),
        ("of a float type, but Returns returns torch.int64", {"network": Returns(lambda x: x.mean((2, 3)).long())}),
        ("expected network as a torch.nn.Module, got str", {"network": "resnet50"}),
        ("expected loss as a module loss(embeddings, labels), got int", {"loss": 1}),
        ("expected a scalar from tests", {"loss": number(lambda embeddings: embeddings.sum(dim=1))}),
        ("got float: return the mean", {"loss": number(1.0)}),
        ("has no gradient: compute it from the embeddings", {"loss": number(torch.tensor(1.0))}),
        ("to make a loss from num_classes and embedding_dim, ", {"loss": lambda embeddings, labels: 0}),
        ("to make a torch.nn.Module, got int", {"loss": lambda num_classes: 0}),
        ("expected a loss for 6 training classes, got one for 3", {"loss": CenterLoss(3, 8), "num_classes": 3}),
        ("returns a tuple in training: leave out the others", {"network": Auxiliary()}),
        ("failed for embeddings (16, 8) and labels in 0..5: weight", {"loss": nn.NLLLoss(torch.zeros(3))}),
        ("expected loggers as a list, got one Failing: pass [logger]", {"loggers": Failing()}),
        ("got a path: name it in the recipe, Recipe.preset('photos', data=...)", {"data": "photos"}),
        ("item 3 of Broken cannot be read: KeyError: 'no 3'", {"data": Broken()}),
        ("expected loggers with log_metrics(metrics, step), got str", {"loggers": ["csv"]}),
        ("expected callbacks as functions of (entry, network), got int", {"callbacks": [3]}),
        ("expected an ImageList, a Dataset of (image, label)", {"data": 3}),
        ("expected items (image, label) of a Dataset, got int as item 0", {"data": [1, 2]}),
        ("expected images, got an empty dataset", {"data": []}),
        ("expected labels as whole numbers or as names, got 0.5", {"data": (PIXELS, np.arange(8) / 2 + 0.5)}),
        ("expected labels as whole numbers or as names, got 0 and 'b'", {"data": (PIXELS, [0, "b"] * 4)}),
        ("expected one label for each of 8 images, got 3", {"data": (PIXELS, [1, 2, 3])}),
        ("expected images, got vectors: ProxyGMLEmbedding", {"data": (np.zeros((8, 5)), TEXTS)}),
        ("got float64 in -1..-1: leave out transforms that normalize", {"data": (PIXELS - 1.0, TEXTS)}),
        ("expected data by split (train, test, query, gallery), got 'val'", {"data": {"val": (PIXELS, TEXTS)}}),
        ("expected train with test, or with query and gallery, got test", {"data": {"test": (PIXELS, TEXTS)}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsuitable_object_is_one_line(
    message: str, objects: dict, small: Recipe, images: Images, tmp_path: Path
) -> None:
    if "raised" in message:
        objects["network"].make = torch.no_grad()(lambda x: (_ for _ in ()).throw(RuntimeError("too small")))
    if classes := objects.pop("num_classes", None):
        objects["loss"].num_classes = classes
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        train(small, tmp_path / "run", **({"data": images} | objects))
    assert "\n" not in str(caught.value)


class Pictures:
    """A logger that takes pictures, as Lightning's loggers do."""

    def __init__(self) -> None:
        self.logged: dict[int, dict] = {}
        self.pictures: list[str] = []
        self.ended = ""

    def log_metrics(self, metrics: dict, step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)

    def log_image(self, key: str, images: list, step: int | None = None) -> None:
        self.pictures += [key] if Path(images[0]).is_file() else []

    def finalize(self, status: str) -> None:
        self.ended = status


@pytest.mark.slow
def test_loggers_receive_scores_and_pictures(tiny: Recipe, tmp_path: Path) -> None:
    failing, pictures = Failing(), Pictures()
    with pytest.warns(UserWarning, match=r"Failing.log_metrics failed \(OSError: disk full\): training continues"):
        run = train(tiny, tmp_path / "run", loggers=[failing, pictures])
    assert failing.steps == [1]
    assert pictures.logged.keys() == {1, 2, 3}
    expected = {"loss", "images_per_second", "learning_rate_head", "held_out/recall@1", "held_out/map_at_r"}
    assert expected <= pictures.logged[2].keys()
    assert pictures.logged[3]["trained/recall@1"] == run.scores["trained"]["recall@1"]
    assert (pictures.pictures, pictures.ended) == (["retrieval", "map"], "success")


@pytest.mark.slow
def test_csv_of_a_resumed_run_is_whole(tiny: Recipe, tmp_path: Path) -> None:
    from proxygml.training.loggers import make_logger

    with pytest.raises(PlugPulledError):
        train(tiny, tmp_path / "run", loggers=[make_logger("csv", tmp_path / "run")], progress=stop_at(6))
    run = resume(tmp_path / "run", loggers=[make_logger("csv", tmp_path / "run")])
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [entry["loss"] for entry in run.log]
    assert [float(row["held_out/map_at_r"]) for row in rows] == [entry["held_out"]["map_at_r"] for entry in run.log]
    assert [row["trained/recall@1"] != "" for row in rows] == [False, False, True]


@pytest.mark.slow
def test_tensorboard_has_scores_and_pictures(tiny: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason='pip install "proxygml[tensorboard]"')
    from proxygml.training.loggers import make_logger

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        train(tiny, tmp_path / "run", loggers=[make_logger("tensorboard", tmp_path / "run")])
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        events.Reload()
    assert [event.step for event in events.Scalars("held_out/recall@1")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("trained/recall@1")] == [3]
    assert set(events.Tags()["images"]) == {"retrieval", "map"}


def test_settings_without_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a Recipe or the name of a preset, got dict: Recipe\.preset"):
        train({"epochs": 1}, tmp_path / "run")
