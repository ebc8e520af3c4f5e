"""Recipe: validation and JSON."""

import itertools
import json
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from proxygml.training.presets import GLYPHS, PRESETS
from proxygml.training.recipe import Recipe, parse_settings


def test_defaults_are_the_papers() -> None:
    recipe = Recipe()
    assert (recipe.proxies_per_class, recipe.ratio, recipe.proxy_weight) == (12, 0.05, 0.3)
    assert (recipe.learning_rate, recipe.proxy_learning_rate, recipe.adam_epsilon) == (1e-4, 3e-2, 1e-2)
    assert (recipe.epochs, recipe.batch_size, recipe.embedding_dim, recipe.image_size) == (50, 32, 512, 224)


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name: str) -> None:
    recipe = PRESETS[name][1]
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_unknown_setting_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="no setting 'learning_rates': did you mean 'learning_rate'"):
        GLYPHS.changed({"learning_rates": 1})
    with pytest.raises(ValueError, match="no setting 'proxies': did you mean 'proxies_per_class'"):
        Recipe.from_json(json.dumps({"proxies": 3}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs 0 trains nothing: expected epochs of at least 1"),
        ({"batch_size": 1}, "batch_size of at least 2"),
        ({"seed": 2**31}, "expected seed from 0 to 2\\*\\*31 - 1, got 2147483648"),  # faiss takes an int
        ({"held_out": 1.0}, "held_out from 0 to below 1"),
        ({"crop_scale": (0.9, 0.5)}, "crop_scale as .min, max. above 0 and up to 1"),
        ({"recall_at": ()}, "at least one number in recall_at"),
        ({"epochs": "3"}, "expected epochs as int, got .3."),
        ({"flip": 1}, "expected flip as bool"),
        ({"decay": (1, 2.5)}, "expected decay as"),
        ({"crop_scale": (0.1, 0.2, 0.3)}, "expected crop_scale as"),
        ({"pooling": "mean"}, "expected pooling as Literal.'average', 'max', 'average.max'., got 'mean'"),
        ({"links": 1.5}, "expected links as"),
        ({"start_ratio": 0.0}, "start_ratio above 0, got 0"),
        ({"start_ratio": 1.0, "links": 60}, "start_ratio needs loss proxygml, and a ratio instead of links"),
        ({"start_ratio": 1.0, "loss": "ms"}, "start_ratio needs loss proxygml"),
        ({"max_class_size": 1}, "max_class_size of at least 2, got 1"),
        ({"keep_epoch": "first"}, "expected keep_epoch as"),
        ({"loss": "proxygml-plus", "mask_softmax": False}, "are for loss proxygml alone"),
        ({"test_scale": 0.001}, "expected test_scale times image_size from 1 to"),
        ({"test_scale": 1e300}, "expected test_scale times image_size from 1 to"),
        ({"feature_crops": -1}, "feature_crops of at least 0, got -1"),
    ],
)
def test_invalid_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe().changed(settings)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_invalid_json(text: str) -> None:
    with pytest.raises(ValueError):
        Recipe.from_json(text)


def test_recipe_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        GLYPHS.epochs = 3


def test_every_setting_is_documented() -> None:
    import ast
    import inspect

    groups = [each for each in Recipe.__mro__ if is_dataclass(each)]
    bodies = [ast.parse(inspect.getsource(group)).body[0].body for group in groups]
    documented = {
        statement.target.id
        for body in bodies
        for statement, after in itertools.pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr)
    }
    assert documented == {field.name for field in fields(Recipe)}


def test_parse_settings() -> None:
    parsed = parse_settings(("alpha=2", "beta=0.5", "rate=1e-3", "ratios=1,0.5", "cascade=True", "variant=all"))
    assert parsed == {"alpha": 2, "beta": 0.5, "rate": 1e-3, "ratios": (1, 0.5), "cascade": True, "variant": "all"}
    assert isinstance(parsed["alpha"], int)
    for wrong in ("alpha", "=2", "alpha="):
        with pytest.raises(ValueError, match=r"expected loss_settings as name=value, got"):
            Recipe(loss_settings=(wrong,))


@pytest.mark.parametrize("settings", [{"proxy_weight": 0.3}, {"optimizer": "sgd"}, {"loss": "ms"}])
def test_sparse_gradient_requirements(settings: dict) -> None:
    with pytest.raises(ValueError, match="sparse_gradient needs loss proxygml with proxy_weight 0, and optimizer adam"):
        Recipe(**({"sparse_gradient": True, "proxy_weight": 0.0} | settings))
