"""The first half of the fair protocol: choose the settings of every row on held-out training classes, by equal trials.

Trials are kept in results/tuning/DATASET.json, from which the search goes on where it stopped: the settings of a trial
follow from the trials before it alone.
"""

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType

from proxygml import losses
from proxygml.optional import library
from proxygml.paper.results import fingerprint, load_runs, results_file, save_runs
from proxygml.training.build import own_rate
from proxygml.training.recipe import Recipe, parse_settings

TRIALS = 12
HELD_OUT = 0.25  # fraction of the training classes
RATES = {"learning_rate": (0.25, 4.0), "proxy_learning_rate": (0.01, 10.0)}  # multiples of the row's own rates
EPSILONS = (1e-8, 1e-2)  # of the optimizer; with the larger one, small gradients take small steps
OWN = {  # ranges of each loss's own searched settings
    "proxygml": {"ratio": (0.05, 1.0), "proxy_weight": (0.03, 3.0)},
    "semihard": {"margin": (0.05, 0.5)},
    "liftedstruct": {"margin": (0.5, 2.0)},
    "clustering": {"gamma": (2.0, 50.0)},
    "proxy-nca": {"softmax_scale": (3.0, 30.0)},
    "htl": {"first_margin": (0.05, 0.5)},
    "damlrrm": {"structured_fraction": (0.5, 0.9)},
    "hdml": {"alpha": (30.0, 300.0)},
    "softtriple": {"la": (7.0, 60.0), "gamma": (0.03, 0.3)},
    "ms": {"beta": (20.0, 100.0), "base": (0.25, 1.0)},
    "margin": {"margin": (0.05, 0.5)},
    "proxy-anchor": {"alpha": (10.0, 100.0), "margin": (0.03, 0.3)},
    "n-pair": {"regularization_weight": (0.0005, 0.02)},
    "contrastive": {"margin": (0.4, 1.6)},
    "triplet": {"margin": (0.05, 0.5)},
    "norm-softmax": {"scale": (7.0, 60.0)},
    "cosface": {"scale": (15.0, 100.0)},
    "am-softmax": {"scale": (10.0, 100.0)},
    "arcface": {"scale": (15.0, 100.0)},
    "l-softmax": {"plain_weight": (1.0, 25.0)},
    "subcenter-arcface": {"scale": (15.0, 100.0)},
    "center": {"center_weight": (0.0005, 0.05)},
}


def tuned(
    dataset: str,
    rows: Mapping[str, Recipe],
    *,
    only: Collection[str] = (),
    results: Path,
    trials: int = TRIALS,
    held_out: float = HELD_OUT,
    finish: Callable[[Mapping[str, Recipe], str], Generator[tuple[str, dict], None, None]],
) -> dict[str, Recipe]:
    """Each row, or `only` these, with the settings that gave the highest MAP@R on held-out training classes.

    `finish(recipes by fingerprint, note)` yields the result of each run as soon as it has ended.
    """
    _optuna()  # if it is missing, fail before the first trial
    path = results_file(results, "tuning", dataset)
    tried = load_runs(path)
    compared = {recipe.ratio for recipe in rows.values()}  # if rows differ in it, the experiment is about it
    rows = chosen(rows, only)
    searched = {name: space(recipe, fixed=len(compared) > 1) for name, recipe in rows.items()}
    for number in range(trials):
        recipes: dict[str, Recipe] = {}
        owners: dict[str, list[tuple[str, str, dict[str, float]]]] = {}
        for name, recipe in rows.items():
            before = trials_of(tried, name, recipe)
            if len(before) <= number:
                settings = suggest(recipe, searched[name], before)
                changed = apply(recipe, settings).changed(
                    {"held_out": held_out, "tested_epochs": (), "test": False, "seed": 0}
                )
                recipes[fingerprint(changed)] = changed
                owners.setdefault(fingerprint(changed), []).append((name, fingerprint(recipe), settings))
        with closing(finish(recipes, f"trial {number + 1} of {trials}")) as made:
            for key, run in made:
                result = {"map_at_r": run["scores"]["map_at_r"], "seconds": run["seconds"]}
                for name, of, settings in owners[key]:
                    tried.append({"row": name, "of": of, "settings": settings, **result})
                save_runs(path, tried)
    return {name: apply(recipe, best(trials_of(tried, name, recipe))) for name, recipe in rows.items()}


def trials_of(tried: list[dict], name: str, recipe: Recipe) -> list[dict]:
    """Those of a row as it is today."""
    return [trial for trial in tried if trial["row"] == name and trial["of"] == fingerprint(recipe)]


def best(trials: list[dict]) -> dict[str, float]:
    """The settings of the trial with the highest MAP@R."""
    return max(trials, key=lambda trial: trial["map_at_r"])["settings"]


def chosen(rows: Mapping[str, Recipe], only: Collection[str]) -> dict[str, Recipe]:
    """These rows, or all if none is named."""
    return {name: recipe for name, recipe in rows.items() if not only or name in only}


def space(recipe: Recipe, fixed: bool) -> dict[str, tuple[float, float]]:
    """Ranges to search for a row; `fixed` leaves ProxyGML's ratio alone."""
    own = OWN.get(recipe.loss, {})
    return RATES | {name: ends for name, ends in own.items() if not (fixed and name == "ratio")}


def suggest(recipe: Recipe, searched: Mapping[str, tuple[float, float]], before: list[dict]) -> dict[str, float]:
    """The settings of a row's next trial, given those before it; the first trial is the row unchanged."""
    if not before:
        return {}
    optuna = _optuna()
    space = {name: optuna.distributions.FloatDistribution(*ends, log=True) for name, ends in searched.items()}
    space["adam_epsilon"] = optuna.distributions.CategoricalDistribution(EPSILONS)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=len(before), n_startup_trials=3)
    )
    for trial in before:
        settings = trial["settings"] or as_it_is(recipe, searched)
        if settings:
            study.add_trial(optuna.trial.create_trial(params=settings, distributions=space, value=trial["map_at_r"]))
    return {name: float(f"{value:.3g}") for name, value in study.ask(space).params.items()}


def as_it_is(recipe: Recipe, searched: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """A row as settings of a trial; None if one of them is outside the searched ranges."""
    own = losses.defaults(recipe.loss) | parse_settings(recipe.loss_settings)
    own |= {"ratio": recipe.ratio, "proxy_weight": recipe.proxy_weight}
    if recipe.adam_epsilon not in EPSILONS:
        return {}
    settings: dict[str, float] = {"adam_epsilon": recipe.adam_epsilon}
    for name, (low, high) in searched.items():
        value = 1.0 if name in RATES else own[name]
        if not isinstance(value, (int, float)) or not low <= value <= high:
            return {}
        settings[name] = value
    return settings


def _optuna() -> ModuleType:
    optuna = library("optuna", extra="paper", user="the fair protocol")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def apply(recipe: Recipe, settings: Mapping[str, float]) -> Recipe:
    """A recipe with the settings of a trial."""
    if not settings:
        return recipe
    changed: dict[str, object] = {
        "learning_rate": recipe.learning_rate * settings["learning_rate"],
        "proxy_learning_rate": own_rate(recipe) * settings["proxy_learning_rate"],
        "adam_epsilon": settings["adam_epsilon"],
    }
    if recipe.head_learning_rate is not None:
        changed["head_learning_rate"] = recipe.head_learning_rate * settings["learning_rate"]
    for name, value in settings.items():
        if name in OWN["proxygml"]:
            changed[name] = value
        elif name not in changed:
            others = {key: one for key, one in parse_settings(recipe.loss_settings).items() if key != name}
            changed["loss_settings"] = (*(f"{key}={one}" for key, one in others.items()), f"{name}={value}")
    return recipe.changed(changed)
