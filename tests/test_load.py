"""load(path) -> Model: what it encodes, evaluates and indexes, also for a network and images of one's own."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import proxygml
from proxygml.retrieval import Index
from proxygml.server.opening import open_space
from proxygml.training.presets import GLYPHS
from proxygml.training.run import Run
from tests.test_model import failure
from tests.training.test_objects import CenterLoss, Images, Network, build_network

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 40, 50, 3), np.uint8)
MISSING = (
    r"needs network=tests\.training\.test_objects:Network, which is not stored in it: "
    r"pass network=\.\.\. in Python$"
)


@pytest.fixture(scope="module")
def splits() -> dict:
    """Letters for training, and others as queries and gallery."""
    images = Images()
    query = range(84, len(images), 4)
    rows = {"train": range(84), "query": query, "gallery": sorted({*range(84, len(images))} - {*query})}
    return {name: [images[row] for row in rows[name]] for name in rows}


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory, splits: dict) -> Run:
    """A run with a network, images and a loss that are passed as objects."""
    recipe = GLYPHS.changed({"image_size": 16, "embedding_dim": 8, "epochs": 1, "held_out": 0.0, "baselines": False})
    folder = tmp_path_factory.mktemp("own") / "run"
    return proxygml.train(recipe, folder, network=build_network(), data=splits, loss=CenterLoss, progress=False)


def test_own_network_is_passed_again(own_run: Run, splits: dict) -> None:
    with pytest.raises(ValueError, match=MISSING):
        proxygml.load(own_run.folder)
    model = proxygml.load(str(own_run.folder), network=Network())
    queries = {name: splits[name] for name in ("query", "gallery")}
    assert model.evaluate(queries).to_json() == own_run.scores["trained"]
    assert own_run.scores["trained"]["images"] == len(splits["query"])
    with pytest.raises(ValueError, match=r"run: its weights do not fit this Sequential: build it as for training$"):
        proxygml.load(own_run.folder, network=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 12)))


def test_exported_own_network(own_run: Run, tmp_path: Path) -> None:
    model = proxygml.load(own_run.folder, network=Network())
    model.export(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "`network` is a `tests.training.test_objects:Network`" in card
    assert "--run" not in card
    with pytest.raises(ValueError, match=MISSING):
        proxygml.load(tmp_path / "model")
    again = proxygml.load(tmp_path / "model", network=Network())
    np.testing.assert_array_equal(again.encode(PIXELS), model.encode(PIXELS))


def test_network_that_needs_no_instance(trained_run: Run) -> None:
    with pytest.raises(ValueError, match=r"this run was trained with backbone convnet: leave out network=$"):
        proxygml.load(trained_run.folder, network=Network())


@pytest.mark.slow
def test_commands_on_an_own_network_are_one_line(own_run: Run, splits: dict, tmp_path: Path, capsys) -> None:
    run, photo = own_run.folder, tmp_path / "photos" / "photo.png"
    photo.parent.mkdir()
    Image.fromarray(PIXELS[0]).save(photo)
    model = proxygml.load(run, network=Network())
    index = model.index(splits["gallery"], tmp_path / "index")
    for command in (
        ["search", run, "--image", photo],
        ["search", index.location, "--image", photo],
        ["browse", run, "--no-open", "--port", "0"],
        ["evaluate", run],
        ["export", run, tmp_path / "out"],
        ["index", "build", photo.parent, "--out", tmp_path / "new", "--run", run],
        ["index", "build", run, "--out", tmp_path / "new"],
        ["index", "add", index.location, photo.parent],
        ["train", "--resume", run],
    ):
        assert re.search(MISSING, failure(capsys, *command)), command
    assert "needs data=builtins:dict, which is not stored in it" in failure(
        capsys, "embed", run, "--out", tmp_path / "vectors.npz"
    )
    space = open_space(index.location, data=None, progress=lambda *_: None)  # needs no network
    assert (len(space), space.encoder) == (len(index), None)


def test_images_in_any_form(trained_run: Run, tmp_path: Path) -> None:
    model = proxygml.load(trained_run.folder)
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    for path, pixels in zip(paths, PIXELS, strict=True):
        Image.fromarray(pixels).save(path)
    expected = model.encode(PIXELS)
    assert expected.shape == (6, 128)
    tensor = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    opened = (Image.fromarray(pixels) for pixels in PIXELS)
    for images in (paths, list(map(str, paths)), opened, list(PIXELS), tensor, tensor / 255, (paths[0], *PIXELS[1:])):
        np.testing.assert_allclose(model.encode(images, batch_size=4), expected, atol=1e-6)
    assert model.encode([]).shape == (0, 128)
    done = []
    model.encode(PIXELS, batch_size=2, progress=lambda what, count, total, note: done.append((what, count, total)))
    assert done == [("embedding", 2, 6), ("embedding", 4, 6), ("embedding", 6, 6)]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("photo.jpg", "expected several images, got one (str): pass [image]"),
        (Image.new("RGB", (4, 4)), "expected several images, got one (Image): pass [image]"),
        (PIXELS[0], "expected several images, got one (ndarray): pass [image]"),
        (torch.zeros(3, 8, 8), "expected several images, got one (Tensor): pass [image]"),
        (PIXELS * -1.0, "leave out transforms that normalize"),
        (np.zeros((2, 5)), "expected images as (H, W), (H, W, 3) or (3, H, W), got an array (5,)"),
        (["no.jpg"], "no.jpg cannot be read: missing: no such file"),
    ],
)
def test_unsuitable_images_are_one_line(images: object, message: str, trained_run: Run) -> None:
    with pytest.raises((ValueError, OSError), match=re.escape(message)) as caught:
        proxygml.load(trained_run.folder).encode(images)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_index_of_images(trained_run: Run, tmp_path: Path) -> None:
    model = proxygml.load(trained_run.folder)
    images = model.load_images()
    index = model.index(images["test"], tmp_path / "index")
    assert len(index) == len(images["test"])
    assert len(model.index(images["train"], tmp_path / "index")) == len(images["test"]) + len(images["train"])
    found = proxygml.load(tmp_path / "index").encode([images["test"].open(3)])
    assert index.search(found, 1)[0][0].path == images["test"].paths[3]
    assert len(model.index((PIXELS, ["a", "b"] * 3))) == 6
    Index.create(tmp_path / "bare", dim=3)
    with pytest.raises(ValueError, match=r"bare does not contain the network of its vectors: load the run of it$"):
        proxygml.load(tmp_path / "bare")


@pytest.mark.slow
def test_scores_of_other_images(trained_run: Run, tmp_path: Path) -> None:
    model = proxygml.load(trained_run.folder)
    assert model.evaluate().to_json() == trained_run.scores["trained"]
    scores = model.evaluate((PIXELS, ["a", "b"] * 3), recall_at=(1, 5), cluster=False)
    assert (scores.recall[5], scores.images, scores.classes, scores.nmi) == (1, 6, 2, None)
