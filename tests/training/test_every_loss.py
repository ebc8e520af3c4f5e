"""Every loss through the real trainer: what learns, what stays, and that a stopped run goes on to the same end."""

from pathlib import Path

import pytest
import torch
from lightning_fabric import seed_everything

from proxygml.data.splits import hold_out
from proxygml.losses import METHODS, find, make
from proxygml.training import build, start
from proxygml.training.presets import GLYPHS
from proxygml.training.recipe import Recipe
from tests.training.test_training import PlugPulledError, same_weights, stop_at


def recipe_for(loss: str) -> Recipe:
    return GLYPHS.changed(
        {"loss": loss, "classes": 12, "epochs": 2, "batch_size": 24, "proxies_per_class": 2, "ratio": 0.5}
        | {
            "embedding_dim": 48,
            "held_out": 0.2,
            "baselines": False,
            "test": False,
            "frozen": ("block1",),
            "learning_rate": 1e-3,
        }
    )


@pytest.fixture(params=METHODS, scope="module")
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    recipe = recipe_for(request.param)
    return recipe, start.train(recipe, tmp_path_factory.mktemp(request.param) / "run")


@pytest.mark.slow
def test_every_trainable_parameter_moves_and_the_frozen_stay(undisturbed) -> None:
    recipe, run = undisturbed
    seed_everything(recipe.seed, verbose=False)
    model = build.build_model(recipe)
    train_images, _ = hold_out(build.load_images(recipe)[0], recipe.held_out)
    loss = build.build_loss(recipe, len(train_images.class_names))
    if hasattr(loss, "watch"):
        loss.watch(model)
    after = run.load_last()
    for name, module in [("model", model), ("loss", loss)]:
        for key, before in module.named_parameters():
            assert torch.equal(before, after[name][key]) != before.requires_grad, key
            assert torch.isfinite(after[name][key]).all(), key


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_end(undisturbed, tmp_path: Path) -> None:
    recipe, whole = undisturbed
    labels = hold_out(build.load_images(recipe)[0], recipe.held_out)[0].labels
    steps = len(build.draw_batches(recipe, labels, build.build_loss(recipe, labels.max() + 1), epoch=0))
    with pytest.raises(PlugPulledError):
        start.train(recipe, tmp_path / "run", progress=stop_at(steps + 1))
    same_weights(start.resume(tmp_path / "run").folder / "last.pt", whole.folder / "last.pt")


def test_the_network_can_be_had_again(undisturbed) -> None:
    _, run = undisturbed
    vectors = build.load_model(run)(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert vectors.shape == (2, 48)
    assert torch.isfinite(vectors).all()


def test_an_unknown_loss_or_setting_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"expected a loss, got 'tripet': did you mean 'triplet'\? \(known: proxygml, proxygml-plus, ",
    ):
        find("tripet")
    with pytest.raises(ValueError, match="ms has no setting gamma: it has alpha, beta"):
        make("ms", 3, 8, {"gamma": 1.0})
    for name, setting, expected in [
        ("ms", {"beta": "x"}, "expected beta of ms as a number, got 'x'"),
        ("ms", {"beta": True}, "expected beta of ms as a number, got True"),
        ("proxy-nca", {"exclude_positive": "maybe"}, "expected exclude_positive of proxy-nca as bool, got 'maybe'"),
        ("semihard", {"variant": 3}, "expected variant of semihard as str, got 3"),
    ]:
        with pytest.raises(ValueError, match=expected):
            make(name, 3, 8, setting)
    assert make("softtriple", 3, 8, {"centers_per_class": 2}).loss.fc.shape == (8, 6)
