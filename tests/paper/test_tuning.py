"""The search for settings: equal trials for all, resumed where it stopped, and what is searched."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from proxygml.losses import METHODS, defaults, make
from proxygml.paper.results import load_runs
from proxygml.paper.tuning import EPSILONS, HELD_OUT, apply, as_it_is, space, suggest, tuned
from proxygml.training.build import own_rate
from proxygml.training.presets import GLYPHS
from proxygml.training.recipe import Recipe, parse_settings

pytest.importorskip("optuna", reason="optuna is not installed: proxygml[paper]")
ROWS = {"ours": GLYPHS, "theirs": GLYPHS.changed({"loss": "ms", "loss_settings": ("alpha=3",)})}


def judged(recipes: Mapping[str, Recipe], note: str) -> Iterator[tuple[str, dict]]:
    """A made-up world in which 1e-3 is the best rate of the network."""
    for mark, recipe in recipes.items():
        assert recipe.held_out == HELD_OUT
        assert not recipe.test
        score = 1 / (1 + abs(recipe.learning_rate - 1e-3))
        yield mark, {"scores": {"map_at_r": score}, "seconds": 1.0}


def search(results: Path, trials: int, finish=judged) -> dict[str, Recipe]:
    return tuned("glyphs", ROWS, results=results, trials=trials, finish=finish)


def test_every_row_has_as_many_trials_and_the_best_is_taken(tmp_path: Path) -> None:
    best = search(tmp_path, 6)
    trials = load_runs(tmp_path / "tuning/glyphs.json")
    for name, recipe in best.items():
        own = [trial for trial in trials if trial["row"] == name]
        assert len(own) == 6
        assert own[0]["settings"] == {}  # the row as it is
        chosen = max(own, key=lambda trial: trial["map_at_r"])
        assert recipe == apply(ROWS[name], chosen["settings"])
        assert abs(recipe.learning_rate - 1e-3) <= abs(ROWS[name].learning_rate - 1e-3)


def test_stopped_search_goes_on(tmp_path: Path) -> None:
    straight = search(tmp_path / "straight", 4)

    def stops(recipes: Mapping[str, Recipe], note: str) -> Iterator[tuple[str, dict]]:
        yield next(judged(recipes, note))
        if note == "trial 3 of 4":
            raise KeyboardInterrupt
        yield from list(judged(recipes, note))[1:]

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "stopped", 4, stops)
    kept = load_runs(tmp_path / "stopped/tuning/glyphs.json")
    assert len(kept) == 5
    assert search(tmp_path / "stopped", 4) == straight
    assert load_runs(tmp_path / "stopped/tuning/glyphs.json")[:5] == kept


@pytest.mark.parametrize("loss", METHODS)
def test_search_space(loss: str) -> None:
    plain = GLYPHS.changed({"loss": loss})
    ends = space(plain, fixed=False)
    settings = suggest(plain, ends, [{"settings": {}, "map_at_r": 0.5}])
    assert settings.keys() == ends.keys() | {"adam_epsilon"}
    assert settings["adam_epsilon"] in EPSILONS
    assert all(lowest <= settings[name] <= highest for name, (lowest, highest) in ends.items())
    recipe = apply(plain, settings)
    if not plain.is_proxygml:
        make(loss, 5, 8, parse_settings(recipe.loss_settings))


@pytest.mark.parametrize("loss", sorted(METHODS.keys() - {"contrastive"}))  # whose margin depends on its variant
def test_the_row_as_it_is_lies_within_what_is_searched(loss: str) -> None:
    plain = GLYPHS.changed({"loss": loss})
    ends = space(plain, fixed=False)
    settings = as_it_is(plain, ends)
    assert settings.keys() == ends.keys() | {"adam_epsilon"}
    same = apply(plain, settings)
    assert same == plain.changed({"proxy_learning_rate": own_rate(plain), "loss_settings": same.loss_settings})
    if loss != "proxygml":
        assert defaults(loss) | parse_settings(same.loss_settings) == defaults(loss)


def test_the_search_learns_from_the_row_as_it_is() -> None:
    ends = space(GLYPHS, fixed=True)
    others = [
        {"settings": dict.fromkeys(ends, multiple) | {"adam_epsilon": 1e-8}, "map_at_r": 0.5} for multiple in (0.3, 2.9)
    ]

    def suggested(score: float) -> dict[str, float]:
        return suggest(GLYPHS, ends, [{"settings": {}, "map_at_r": score}, *others])

    assert suggested(0.9) != suggested(0.1)
    assert 0.5 < suggested(0.9)["learning_rate"] < 2  # near what was best
    outside = GLYPHS.changed({"ratio": 0.01})
    assert as_it_is(outside, space(outside, fixed=False)) == {}
    assert suggest(outside, space(outside, fixed=False), [{"settings": {}, "map_at_r": 0.5}])


def test_settings_of_a_trial_come_on_top_of_the_rows_own() -> None:
    settings = {"learning_rate": 2.0, "proxy_learning_rate": 0.5, "adam_epsilon": 1e-2, "beta": 40.0}
    recipe = apply(ROWS["theirs"].changed({"head_learning_rate": 1e-2}), settings)
    assert (recipe.learning_rate, recipe.head_learning_rate) == (2 * GLYPHS.learning_rate, 2e-2)
    assert (recipe.proxy_learning_rate, recipe.adam_epsilon) == (0.015, 1e-2)
    assert parse_settings(recipe.loss_settings) == {"alpha": 3, "beta": 40.0}


def test_what_an_experiment_compares_is_not_searched(tmp_path: Path) -> None:
    rows = {f"r {ratio}": GLYPHS.changed({"ratio": ratio}) for ratio in (0.05, 0.5)}
    best = tuned("glyphs", rows, only=["r 0.5"], results=tmp_path, trials=3, finish=judged)
    assert {name: recipe.ratio for name, recipe in best.items()} == {"r 0.5": 0.5}
    assert len(load_runs(tmp_path / "tuning/glyphs.json")) == 3
    best = tuned("glyphs", rows, results=tmp_path, trials=3, finish=judged)
    assert [recipe.ratio for recipe in best.values()] == [0.05, 0.5]
    assert len(load_runs(tmp_path / "tuning/glyphs.json")) == 6
    assert space(GLYPHS, fixed=False).keys() - space(GLYPHS, fixed=True).keys() == {"ratio"}
