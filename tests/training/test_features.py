"""Features of a frozen network: computed once, kept, and trained on as if the photos had gone through the network."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxygml import backbones
from proxygml.backbones import load_pretrained
from proxygml.data import ImageList
from proxygml.data.images import FeatureCrops
from proxygml.model import Model
from proxygml.paper.running import summary
from proxygml.training import build, features
from proxygml.training.checkpoints import load_checkpoint
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from proxygml.training.start import resume, train
from tests.training.conftest import tiny_photos


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for every test."""
    monkeypatch.setenv("PROXYGML_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A head on a small network with random weights, for 8 classes of 4 photos."""
    return tiny_photos(tmp_path, classes=8).changed(
        {"feature_crops": 3, "ratio": 0.5, "epochs": 3, "learning_rate": 0.01}
    )


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("features/*.npy"))


def nobody(done: int, total: int) -> None:
    pass


def featured(recipe: Recipe, crops: int = 3) -> ImageList:
    """The training images of a recipe with their features."""
    images, _ = build.load_images(recipe)
    model = build.build_model(recipe)
    load_pretrained(model.trunk, recipe.weights)
    return features.with_features(images, recipe, model, crops, nobody, nobody)


@pytest.mark.slow
def test_features_are_computed_once_for_all_seeds_and_losses(
    recipe: Recipe, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe, tmp_path / "first")
    training, test = kept(cache)  # one file for each list of images
    monkeypatch.setattr(features, "_features", None)  # computing anything fails
    train(recipe.changed({"seed": 1, "loss": "ms", "images_per_class": 2}), tmp_path / "second")
    assert kept(cache) == [training, test]


def test_features_of_crops(recipe: Recipe) -> None:
    images = featured(recipe)
    assert images.features.shape == (16, 4, 2, 256)
    model = build.build_model(recipe).eval()
    load_pretrained(model.trunk, recipe.weights)
    photos = replace(images, features=None)
    center = build.test_crops(recipe, photos)[5][0]
    random = build.training_crops(recipe.changed({"seed": 0}), photos, epoch=1)[5][0]
    with torch.no_grad():
        for view, pixels in ((0, center), (2, random)):
            mean, highest = model.features(torch.from_numpy(pixels)[None])
            np.testing.assert_allclose(images.features[5, view], torch.cat([mean, highest]), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [{"crop_scale": (0.5, 1.0)}, {"flip": False}, {"test_crop": 1.0}, {"image_size": 48}, {"classes": 3}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.slow
def test_other_crops_and_images_give_another_file(recipe: Recipe, cache: Path, change: dict) -> None:
    featured(recipe)
    featured(recipe.changed(change))
    assert len(kept(cache)) == 2


def test_file_depends_on_settings(recipe: Recipe, tmp_path: Path, cache: Path) -> None:
    images = featured(recipe)
    featured(recipe, crops=4)
    assert len(kept(cache)) == 2
    torch.save(backbones.build_trunk("convnet").state_dict(), tmp_path / "other.pth")
    featured(recipe.changed({"weights": str(tmp_path / "other.pth")}))
    assert len(kept(cache)) == 3
    Image.new("RGB", (40, 40), "red").save(images.file(0))
    featured(recipe)
    assert len(kept(cache)) == 4


def test_photos_that_have_moved_keep_their_features(recipe: Recipe, tmp_path: Path, cache: Path) -> None:
    featured(recipe)
    (tmp_path / "photos").rename(tmp_path / "elsewhere")
    featured(recipe.changed({"data": str(tmp_path / "elsewhere")}))
    assert len(kept(cache)) == 1


@pytest.mark.parametrize("damage", [lambda whole: whole[:-500], lambda whole: b"", lambda whole: b"PK" + whole])
def test_a_damaged_file_is_computed_again(recipe: Recipe, cache: Path, damage) -> None:
    before = np.array(featured(recipe).features)
    (path,) = kept(cache)
    path.write_bytes(damage(path.read_bytes()))
    np.testing.assert_array_equal(featured(recipe).features, before)


@pytest.mark.slow
def test_broken_photo(recipe: Recipe, tmp_path: Path) -> None:
    images, _ = build.load_images(recipe)
    images.file(2).write_bytes(b"no photo")
    skipping = recipe.changed({"skip_broken": True})
    for attempt in ("computed", "kept"):
        with pytest.raises(ValueError, match=r"1 of 16 images cannot be read, first .*2\.png.* --skip-broken"):
            train(recipe, tmp_path / "refused")
        run = train(skipping, tmp_path / attempt)
        assert run.scores["skipped_training_images"] == 1
    usable = featured(skipping)
    assert images.paths[2] not in list(usable.paths)
    assert len(usable) == len(usable.features) == 15
    assert np.isfinite(usable.features).all()


def test_epochs_draw_different_crops() -> None:
    some = np.arange(40 * 4).reshape(40, 4, 1, 1)  # image i has 4 i, then three random crops
    labels = np.zeros(40, np.int64)
    test = FeatureCrops(some, labels)
    assert [int(test[index][0].item()) for index in range(40)] == list(range(0, 160, 4))
    first, again, second = (FeatureCrops(some, labels, seed=0, epoch=epoch).crops for epoch in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()
    assert set(first) == {1, 2, 3}


@pytest.mark.slow
def test_run_embeds_as_its_features(recipe: Recipe, tmp_path: Path) -> None:
    run = train(recipe, tmp_path / "run")
    images = featured(recipe)
    by_features = Model(run).embed(images).vectors
    by_photos = Model(run).embed(replace(images, features=None)).vectors
    np.testing.assert_allclose(by_features, by_photos, atol=1e-3)
    assert np.ptp(by_photos, axis=0).max() > 0.1  # which differ from photo to photo


@pytest.mark.slow
def test_the_frozen_network_is_scored_as_on_photos(recipe: Recipe, tmp_path: Path) -> None:
    by_features = train(recipe.changed({"baselines": True, "epochs": 1}), tmp_path / "features")
    by_photos = train(recipe.changed({"baselines": True, "epochs": 1, "feature_crops": 0}), tmp_path / "photos-run")
    expected = by_photos.scores["untrained"]["map_at_r"]
    assert by_features.scores["untrained"]["map_at_r"] == pytest.approx(expected, abs=0.02)
    assert summary(by_features)["frozen"]["map_at_r"] == by_features.scores["untrained"]["map_at_r"]
    assert by_features.scores["pixels"] == by_photos.scores["pixels"]


@pytest.mark.slow
def test_the_network_below_the_head_stays_as_pretrained(recipe: Recipe, tmp_path: Path) -> None:
    weights = train(recipe, tmp_path / "run").load_best()["model"]
    pretrained = torch.load(tmp_path / "weights.pth", weights_only=True)
    assert all(torch.equal(weights[f"trunk.{name}"], tensor) for name, tensor in pretrained.items())


@pytest.mark.slow
def test_resume_is_bit_exact(recipe: Recipe, tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(what: str, done: int, total: int, note: str) -> None:
        if what == "training" and note.startswith("epoch 3"):
            raise StoppedError

    undisturbed = train(recipe, tmp_path / "undisturbed")
    with pytest.raises(StoppedError):
        train(recipe, tmp_path / "stopped", progress=stop)
    assert len(Run.open(tmp_path / "stopped").log) == 2
    resume(tmp_path / "stopped")
    ours, theirs = (load_checkpoint(tmp_path / name / "last.pt") for name in ("stopped", "undisturbed"))
    for part in ("model", "loss"):
        assert all(torch.equal(ours[part][name], tensor) for name, tensor in theirs[part].items())
    assert Run.open(tmp_path / "stopped").scores["trained"] == undisturbed.scores["trained"]


def test_a_loss_that_taps_early_stages_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hdc taps stages of the network, which feature_crops does not run: set it to"):
        train(recipe.changed({"loss": "hdc", "embedding_dim": 9}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("settings", [{"weights": None}, {"frozen": ("block1",)}, {"devices": 2}])
def test_refused_recipes(settings: dict, recipe: Recipe) -> None:
    with pytest.raises(ValueError, match="feature_crops trains a head on a pretrained network, in one process"):
        recipe.changed(settings)
