"""Head and proxies that start from the training images, and the network before training as epoch 0."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from proxygml import ProxyGMLEmbedding
from proxygml.backbones import build_trunk
from proxygml.display import no_progress
from proxygml.model import load
from proxygml.training import build
from proxygml.training.initialization import fit_head, start_at_samples
from proxygml.training.recipe import Recipe
from proxygml.training.start import resume, train
from proxygml.training.trainer import Trainer
from tests.training.conftest import tiny_photos


def test_the_fitted_head_is_that_of_proxygml_embedding() -> None:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(6), 8))
    features = (rng.normal(size=(6, 12))[labels] + rng.normal(size=(48, 12))).astype(np.float32)
    head = nn.Linear(12, 5)
    before = head.weight.square().mean().sqrt().item()
    fit_head(head, features, labels, seed=3, progress=no_progress)
    expected = ProxyGMLEmbedding(5, power=1.0, random_state=3).fit(features, labels).transform(features)
    found = F.normalize(head(torch.from_numpy(features)), dim=1).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert head.weight.square().mean().sqrt().item() == pytest.approx(before, rel=1e-5)


def test_a_head_with_more_dimensions_than_features_has_zeros() -> None:
    features = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    head = nn.Linear(6, 8)
    fit_head(head, features, np.arange(20) % 5, seed=0, progress=no_progress)
    vectors = head(torch.from_numpy(features))
    assert vectors[:, :6].abs().min() > 0
    assert not vectors[:, 6:].any()


def test_proxies_start_at_samples_of_their_class() -> None:
    labels = np.array([1, 0, 1, 0, 1, 2])
    vectors = np.array([[0.0, 1], [3, 0], [1, 0], [0, -3], [0, -1], [0, 5]], np.float32)
    proxies = torch.full((3, 3, 2), 2.0)
    start_at_samples(proxies, vectors, labels, seed=0)
    assert proxies.norm(dim=2).numpy() == pytest.approx(8**0.5, rel=1e-5)
    expected = {0: {(1, 0), (0, -1)}, 1: {(0, 1), (1, 0), (0, -1)}, 2: {(0, 1)}}
    for label, directions in expected.items():
        assert {tuple(row) for row in F.normalize(proxies[label], dim=1).round().tolist()} == directions


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A small pretrained network for 24 classes of 4 photos, 10 of them held out."""
    return tiny_photos(tmp_path, classes=24).changed(
        {"test_fraction": 0.2, "test_scale": 1.25, "head_start": "fitted", "proxy_start": "samples", "ratio": 1.0}
        | {"epochs": 2, "held_out": 0.53, "freeze_batch_norm": True}
    )


def test_without_epochs_only_the_head_is_fitted(recipe: Recipe, tmp_path: Path) -> None:
    run = train(recipe.changed({"epochs": 0, "baselines": True}), tmp_path / "run")
    weights = torch.load(recipe.weights, weights_only=True)
    best = run.load_best()["model"]
    assert all(torch.equal(best[f"trunk.{name}"], weight) for name, weight in weights.items())
    assert (run.scores["best_epoch"], run.log) == (0, [])
    assert run.scores["held_out"] == run.scores["start"]["held_out"]
    difference, low, high = run.scores["gain"]
    assert low <= difference <= high
    expected = run.scores["trained"]["recall@1"] - run.scores["untrained"]["recall@1"]
    assert difference == pytest.approx(expected)
    assert load(run.folder).encode([Image.new("RGB", (50, 60), "red")]).shape == (1, 8)


def test_few_images_keep_all_features(recipe: Recipe, tmp_path: Path) -> None:
    channels = build_trunk("convnet").channels
    told: list[str] = []
    settings = {"epochs": 0, "embedding_dim": channels - 1, "baselines": True}  # more dimensions than images
    run = train(recipe.changed(settings), tmp_path / "run", progress=lambda what, done, total, note: told.append(note))
    (line,) = (note for note in told if "matter" in note)
    assert re.fullmatch(rf"{channels}, those of the features: \d+ training images cannot tell which .*", line)
    assert run.recipe.embedding_dim == channels
    assert load(run.folder).encode([Image.new("RGB", (50, 60), "red")]).shape == (1, channels)


def test_epochs_that_make_the_held_out_classes_worse_are_not_kept(recipe: Recipe, tmp_path: Path) -> None:
    ruinous = {"learning_rate": 1.0, "head_learning_rate": 1.0, "schedule": "steps", "decay": ()}
    run = train(recipe.changed(ruinous), tmp_path / "run")
    assert run.scores["best_epoch"] == 0
    assert run.scores["held_out"] == run.scores["start"]["held_out"]
    assert {"trained", "last_epoch"} <= run.scores.keys()


@pytest.mark.parametrize(("keep_epoch", "kept"), [("best", 1), ("last", 2)])
def test_the_last_epoch_is_kept_if_it_is_better_than_the_start(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_epoch: str, kept: int
) -> None:
    held_out = iter([0.5, 0.7, 0.6, 0.4])  # before training, then after each epoch
    score = Trainer._score_held_out
    monkeypatch.setattr(Trainer, "_score_held_out", lambda self: score(self) | {"map_at_r": next(held_out)})
    run = train(recipe.changed({"epochs": 3, "keep_epoch": keep_epoch}), tmp_path / "run")
    assert (run.scores["best_epoch"], run.load_best()["epoch"]) == (kept, kept)


def test_a_run_killed_in_its_first_epoch_keeps_its_start(recipe: Recipe, tmp_path: Path) -> None:
    recipe = recipe.changed({"epochs": 1, "baselines": True})
    whole = train(recipe, tmp_path / "whole")

    def kill(what: str, done: int, total: int, note: str) -> None:
        if what == "training":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(recipe, tmp_path / "killed", progress=kill)
    (tmp_path / "killed" / "model.safetensors").unlink()  # is written again from the checkpoint
    seen: list[str] = []
    resumed = resume(tmp_path / "killed", progress=lambda what, *_: seen.append(what))
    assert "training" in seen
    assert "early stopping" not in seen
    left, right = (run.load_best()["model"] for run in (whole, resumed))
    assert all(torch.equal(left[name], right[name]) for name in left)
    left, right = (Image.open(run.folder / "before_after.png") for run in (whole, resumed))
    assert left == right  # neighbors before training come from the checkpoint


def test_test_images_have_the_test_size(recipe: Recipe) -> None:
    train_images, test_images = build.load_images(recipe)
    assert build.test_crops(recipe, test_images)[0][0].shape == (3, 40, 40)
    assert build.training_crops(recipe, train_images, 0)[0][0].shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_start": "fitted"}, "head_start fitted needs a pretrained network with head linear"),
        ({"epochs": 0}, "epochs 0 trains nothing"),
        ({"proxy_start": "samples", "shard": True}, "proxy_start samples needs all proxies in one process"),
    ],
)
def test_settings_that_do_not_fit(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**settings)
