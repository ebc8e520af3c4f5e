"""Recipes: every setting of a run."""

import itertools
import json
from dataclasses import FrozenInstanceError, fields

import pytest

from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.recipes import GLYPHS, PRESETS, Recipe, parse_settings


def test_defaults_are_the_papers() -> None:
    recipe = Recipe()
    assert (recipe.proxies_per_class, recipe.ratio, recipe.proxy_weight) == (12, 0.05, 0.3)
    assert (recipe.learning_rate, recipe.proxy_learning_rate, recipe.adam_epsilon) == (1e-4, 3e-2, 1e-2)
    assert (recipe.epochs, recipe.batch_size, recipe.embedding_dim, recipe.image_size) == (50, 32, 512, 224)


@pytest.mark.parametrize("name", PRESETS)
def test_a_recipe_survives_json(name: str) -> None:
    recipe = PRESETS[name][1]
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_an_unknown_setting_names_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="no setting 'learning_rates': did you mean 'learning_rate'"):
        GLYPHS.changed({"learning_rates": 1})
    with pytest.raises(ValueError, match="no setting 'proxies': did you mean 'proxies_per_class'"):
        Recipe.from_json(json.dumps({"proxies": 3}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs of at least 1, got 0"),
        ({"batch_size": 1}, "batch_size of at least 2"),
        ({"held_out": 1.0}, "held_out from 0 to below 1"),
        ({"crop_scale": (0.9, 0.5)}, "crop_scale as two rising shares"),
        ({"recall_at": ()}, "recall_at as numbers"),
        ({"epochs": "3"}, "expected epochs as int, got .3."),
        ({"flip": 1}, "expected flip as bool"),
        ({"decay": (1, 2.5)}, "expected decay as"),
        ({"crop_scale": (0.1, 0.2, 0.3)}, "expected crop_scale as"),
        ({"pooling": "mean"}, "expected pooling as"),
        ({"links": 1.5}, "expected links as"),
        ({"start_ratio": 0.0}, "start_ratio above 0, got 0"),
        ({"start_ratio": 1.0, "links": 60}, "start_ratio needs loss proxygml, and a ratio instead of links"),
        ({"start_ratio": 1.0, "loss": "ms"}, "start_ratio needs loss proxygml"),
        ({"max_class_size": 1}, "max_class_size of at least 2, got 1"),
        ({"keep_epoch": "first"}, "expected keep_epoch as"),
        ({"feature_crops": -1}, "feature_crops of at least 0, got -1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe().changed(settings)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_what_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Recipe.from_json(text)


def test_a_recipe_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        GLYPHS.epochs = 3


def test_every_setting_is_explained() -> None:
    import ast
    import inspect

    bodies = [ast.parse(inspect.getsource(one)).body[0].body for one in (Recipe, ProxyGMLSettings)]
    explained = {
        statement.target.id
        for body in bodies
        for statement, after in itertools.pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr)
    }
    assert explained == {field.name for field in fields(Recipe)}


def test_settings_of_a_loss_are_numbers_truths_or_words() -> None:
    parsed = parse_settings(("alpha=2", "beta=0.5", "rate=1e-3", "ratios=1,0.5", "cascade=True", "variant=all"))
    assert parsed == {"alpha": 2, "beta": 0.5, "rate": 1e-3, "ratios": (1, 0.5), "cascade": True, "variant": "all"}
    assert isinstance(parsed["alpha"], int)
    for wrong in ("alpha", "=2", "alpha="):
        with pytest.raises(ValueError, match=r"expected loss_settings as name=value, got"):
            Recipe(loss_settings=(wrong,))


@pytest.mark.parametrize("settings", [{"proxy_weight": 0.3}, {"optimizer": "sgd"}, {"loss": "ms"}])
def test_a_sparse_gradient_is_refused_where_nothing_can_use_it(settings: dict) -> None:
    with pytest.raises(ValueError, match="sparse_gradient needs loss proxygml with proxy_weight 0, and optimizer adam"):
        Recipe(**({"sparse_gradient": True, "proxy_weight": 0.0} | settings))
