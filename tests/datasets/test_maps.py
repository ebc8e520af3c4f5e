"""Maps of frozen stages: made, saved, loaded, mirrored and learned from."""

from pathlib import Path

import numpy as np
import pytest
import torch

from proxygml import ingredients
from proxygml.backbones import build, build_trunk
from proxygml.datasets import ImageList, load, maps
from proxygml.experiments.frozen import make_maps
from proxygml.images import Mirrored
from proxygml.ingredients import training_crops
from proxygml.recipes import Recipe
from proxygml.training import train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Made-up maps of the third block of the small network: four classes to train on, four to test on."""
    random = np.random.default_rng(0)
    for part in maps.PARTS:
        labels = np.repeat(np.arange(4), 6)
        centres = random.normal(size=(4, 1, 128, 2, 2))
        values = centres[labels] + 0.3 * random.normal(size=(24, 2, 128, 2, 2))
        images = ImageList([f"{i}.jpg" for i in range(24)], labels, ("a", "b", "c", "d"))
        maps.save(tmp_path / f"{part}.npz", images, values.astype(np.float16))
    return tmp_path


def test_what_is_saved_is_loaded(folder: Path) -> None:
    train_images, test_images = load("maps", folder)
    assert train_images.are_maps
    assert train_images.pixels.shape == (24, 2, 128, 2, 2)
    assert test_images.class_names == ("a", "b", "c", "d")
    assert test_images.of_classes([2]).pixels.shape[0] == 6


def test_mirror_images_come_by_chance_and_only_in_training() -> None:
    values = np.arange(40, dtype=np.float16).reshape(20, 2, 1, 1, 1)
    labels = np.zeros(20, dtype=np.int64)
    plain = [Mirrored(values, labels)[i][0].item() for i in range(20)]
    assert plain == list(range(0, 40, 2))
    epochs = [[Mirrored(values, labels, seed=0, epoch=e)[i][0].item() % 2 for i in range(20)] for e in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    assert 0 < sum(epochs[0]) < 20


def test_without_flips_there_are_no_mirror_images(folder: Path) -> None:
    images, _ = load("maps", folder)
    crops = training_crops(Recipe(flip=False), images, epoch=3)
    assert all(np.array_equal(crops[i][0], images.pixels[i, 0].astype(np.float32)) for i in range(24))


@pytest.mark.parametrize("loss", ["proxygml", "proxy-anchor"])
def test_a_network_learns_from_maps(folder: Path, tmp_path: Path, loss: str) -> None:
    recipe = Recipe(
        dataset="maps", data=str(folder), backbone="convnet:block4", embedding_dim=8, loss=loss, ratio=0.5, epochs=3,
        batch_size=8, held_out=0.0, learning_rate=1e-3, adam_epsilon=1e-8,
    )  # fmt: skip
    run = train(recipe, tmp_path / "run")
    assert run.log[-1]["loss"] < run.log[0]["loss"]
    assert run.scores["trained"]["recall@1"] > 0.9
    assert "pixels" not in run.scores
    assert not (tmp_path / "run/retrieval.png").exists()


def test_a_network_that_begins_at_another_stage_is_refused_before_there_is_a_folder(folder: Path) -> None:
    recipe = Recipe(dataset="maps", data=str(folder), backbone="convnet:block3", embedding_dim=8, ratio=0.5)
    with pytest.raises(ValueError, match="ConvNet from stage block3 on takes maps of 64 channels, got 128: name"):
        train(recipe, folder / "run")
    assert not (folder / "run").exists()


@torch.no_grad()
def test_the_later_stages_on_maps_give_what_the_whole_network_gives_on_images(tmp_path: Path, monkeypatch) -> None:
    recipe = Recipe(dataset="glyphs", classes=4, image_size=32, test_crop=1.0, backbone="convnet")
    torch.manual_seed(0)
    whole = build("convnet", embedding_dim=8).eval()
    torch.save(whole.trunk.state_dict(), tmp_path / "convnet.pth")
    monkeypatch.setattr("proxygml.backbones.pretrained_file", lambda trunk: tmp_path / "convnet.pth")
    make_maps(recipe, "block3", tmp_path / "maps", lambda *_: None)
    later = build("convnet:block3", embedding_dim=8).eval()
    later.load_state_dict(whole.state_dict())
    images, _ = load("glyphs", size=32, classes=4)
    kept, _ = load("maps", tmp_path / "maps")
    assert list(kept.paths) == list(images.paths)
    for index in (0, 7):
        photo = torch.from_numpy(ingredients.test_crops(recipe, images)[index][0])[None]
        for mirrored, view in enumerate((photo, photo.flip(-1))):
            found = later(torch.from_numpy(kept.pixels[index, mirrored].astype(np.float32))[None])
            torch.testing.assert_close(found, whole(view), atol=2e-3, rtol=0)  # kept in half precision


def test_stages_that_are_left_out_do_not_learn() -> None:
    trunk = build_trunk("convnet:block3")
    assert trunk.stages == ("block3", "block4")
    learning = {name.split(".")[0] for name, parameter in trunk.named_parameters() if parameter.requires_grad}
    assert learning == {"block3", "block4"}
    with pytest.raises(ValueError, match="no stage 'block9' in ConvNet"):
        build_trunk("convnet:block9")


def test_a_folder_without_maps_and_a_damaged_file_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no train\.npz in .*empty: expected a folder of maps"):
        load("maps", tmp_path / "empty")
    path = folder / "test.npz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"test\.npz does not hold maps"):
        load("maps", folder)
