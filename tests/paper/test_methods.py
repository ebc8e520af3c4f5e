"""How each compared method is run."""

import pytest

from proxygml.losses import METHODS
from proxygml.paper import methods
from proxygml.paper.methods import FAIR, UNKNOWN, native, settings
from proxygml.training import build
from proxygml.training.presets import PRESETS
from proxygml.training.recipe import Recipe

PAPER = {dataset: PRESETS[f"paper-{dataset}"][1] for dataset in ("cub", "cars", "sop")}


def test_only_known_losses_have_settings() -> None:
    assert FAIR.keys() | native("cub").keys() | UNKNOWN.keys() <= METHODS.keys()


def test_every_row_of_the_papers_table_has_a_native_run() -> None:
    rows = {"semihard", "clustering", "liftedstruct", "proxy-nca", "hdc", "htl", "damlrrm", "hdml", "softtriple", "ms"}
    assert rows | {"proxygml", "margin", "proxy-anchor", "n-pair"} == native("cub").keys()
    assert native("cub").keys() | UNKNOWN.keys() == METHODS.keys()  # of the others it is said that none is known


@pytest.mark.parametrize("dataset", PAPER)
@pytest.mark.parametrize("loss", METHODS)
def test_a_native_recipe_builds_its_loss_and_its_optimizer(loss: str, dataset: str) -> None:
    recipe = PAPER[dataset].changed(settings(loss, "native", dataset))
    assert recipe.loss == loss
    made = build.build_loss(recipe, 98)
    small = recipe.changed({"backbone": "convnet"})  # the real ones take seconds to build
    model = build.build_model(small)
    if hasattr(made, "watch"):
        made.watch(model)
    groups = build.build_optimizer(small, model, made).param_groups
    assert groups[0]["lr"] == recipe.learning_rate
    assert all(epoch < recipe.epochs for epoch in recipe.decay)


@pytest.mark.parametrize("loss", METHODS)
def test_fair_recipe(loss: str) -> None:
    recipe, paper = PAPER["cub"].changed(settings(loss, "fair", "cub")), PAPER["cub"]
    may_differ = {"loss", "warmup", "proxy_learning_rate", "images_per_class"}
    differing = {name for name in vars(paper) if getattr(recipe, name) != getattr(paper, name)}
    assert differing <= may_differ
    assert recipe.batch_size == 32


def test_native_proxy_anchor_has_its_three_skills() -> None:
    recipe = PAPER["cub"].changed(settings("proxy-anchor", "native", "cub"))
    assert (recipe.pooling, recipe.warmup, recipe.optimizer) == ("average+max", (0,), "adamw")
    assert (recipe.batch_size, recipe.decay, recipe.decay_factor) == (180, (10, 20, 30, 40, 50), 0.5)


def test_iterations_become_epochs_that_see_as_many_images() -> None:
    recipe = PAPER["cars"].changed(settings("hdc", "native", "cars"))
    assert recipe.epochs == round(20_000 * 100 / 8054)
    assert recipe.decay == (round(10_000 * 100 / 8054),)


def test_what_is_not_known_is_said() -> None:
    assert UNKNOWN["cosface"] == "we know of no run on these datasets: its own constants, all else as fair"
    assert settings("cosface", "native", "cub") == settings("cosface", "fair", "cub") | {"tested_epochs": ()}
    with pytest.raises(ValueError, match="ms was run on cub, cars, sop, not on glyphs: use --like fair"):
        methods.settings("ms", "native", "glyphs")
    assert isinstance(Recipe().changed(settings("cosface", "fair", "glyphs")), Recipe)


def test_learning_rates_for_the_papers_epsilon() -> None:
    assert settings("softtriple", "fair", "cub")["proxy_learning_rate"] == 1e-2
    assert settings("softtriple", "fair", "glyphs")["proxy_learning_rate"] is None
