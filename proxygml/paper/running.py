"""Runs what an experiment lacks, several at a time, and keeps every finished run at once.

A run that was interrupted goes on after its last epoch; one that another experiment has made already is taken from it.
"""

import shutil
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from proxygml.files import atomic_write, locked
from proxygml.paper import find
from proxygml.paper.executors import Executor, Measure
from proxygml.paper.processes import finished
from proxygml.paper.results import (
    add_runs,
    fingerprint,
    known_runs,
    load_runs,
    matches,
    results_file,
    settings_of,
)
from proxygml.paper.settings import base_recipe
from proxygml.paper.tuning import TRIALS, chosen, tuned
from proxygml.training import trainer
from proxygml.training.recipe import Recipe
from proxygml.training.run import Progress, Run


def run_experiment(
    experiment: str,
    dataset: str,
    data: str | None,
    *,
    seeds: Iterable[int],
    only: Collection[str] = (),
    protocol: str = "paper",
    quick: bool,
    results: Path,
    work: Path,
    executor: Executor,
    progress: Progress,
) -> None:
    """Make what results/ lacks of an experiment, or of `only` these rows of it.

    As the paper did, test classes are scored after every epoch and the best counts; or fair: the settings of every row
    are chosen on held-out training classes and the test classes are scored once, after the last epoch.
    """
    module = find(experiment)
    measure = getattr(module, "measure", None)
    if protocol == "fair" and (measure is not None or hasattr(module, "EVERY_EPOCH")):
        raise ValueError(f"{experiment} does not compare final scores: leave out --protocol fair")
    base = base_recipe(dataset, data, quick)
    rows = rows_of(experiment, base, protocol)
    if not rows:
        raise ValueError(f"{experiment} needs a pretrained network, which {dataset} does not start from")
    if unknown := [name for name in only if name not in rows]:
        raise ValueError(f"expected rows among {str(list(rows))[1:-1]}, got {unknown[0]!r}")
    if executor.kind != "local" and measure is not None:
        raise ValueError(f"{experiment} is measured on one machine: leave out --executor {executor.kind}")
    executor = Executor(jobs=1) if measure else executor
    with locked(work):
        if protocol == "fair":
            rows = _tuned(dataset, rows, only, quick, results, work, executor, progress)
            dataset = f"{dataset}-fair"
        else:
            rows = chosen(rows, only)
        run_missing(
            experiment,
            dataset,
            jobs_of(rows, seeds),
            results=results,
            work=work,
            executor=executor,
            measure=measure,
            alone=measure is not None and not quick,
            progress=progress,
        )


def paper_protocol_rows(experiment: str, base: Recipe) -> dict[str, Recipe]:
    """The rows of an experiment with test classes scored after epochs: those of the authors' code, else every one."""
    module = find(experiment)
    tested = tuple(range(1, base.epochs + 1))
    if base.keep_epoch == "last":
        curve = tested if hasattr(module, "EVERY_EPOCH") else ()
        return module.rows(base.changed({"tested_epochs": curve}))
    if not hasattr(module, "EVERY_EPOCH"):
        tested = tuple(epoch for epoch in base.tested_epochs if epoch <= base.epochs) or tested
    return module.rows(base.changed({"held_out": 0.0, "baselines": False, "tested_epochs": tested, "test": False}))


def rows_to_tune(experiment: str, base: Recipe) -> dict[str, Recipe]:
    """The rows of an experiment, with test classes scored once, after the last epoch.

    Without VARIANTS, the same method with another value of a setting that is searched here.
    """
    module = find(experiment)
    rows = module.rows(base.changed({"held_out": 0.0, "baselines": False, "tested_epochs": ()}))
    return {name: recipe for name, recipe in rows.items() if name not in getattr(module, "VARIANTS", ())}


def rows_of(experiment: str, base: Recipe, protocol: str) -> dict[str, Recipe]:
    """The rows of an experiment by either protocol."""
    return (rows_to_tune if protocol == "fair" else paper_protocol_rows)(experiment, base)


def paper_rows(experiment: str, rows: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Of some rows those that the paper compares, or that stand beside them in every table here."""
    compared = getattr(find(experiment), "PAPER_ROWS", rows)
    return {name: recipe for name, recipe in rows.items() if name in compared}


def _tuned(
    dataset: str,
    rows: Mapping[str, Recipe],
    only: Collection[str],
    quick: bool,
    results: Path,
    work: Path,
    executor: Executor,
    progress: Progress,
) -> dict[str, Recipe]:
    def finish(recipes: Mapping[str, Recipe], note: str) -> Generator[tuple[str, dict], None, None]:
        total = sum(recipe.epochs for recipe in recipes.values())

        def report(done: int, which: str) -> None:
            progress(f"choosing settings, {note}", done, total, which)

        return finished(recipes, train_or_fail, work=work, executor=executor, progress=report)

    return tuned(dataset, rows, only=only, results=results, trials=2 if quick else TRIALS, finish=finish)


class Job(NamedTuple):
    """A run that an experiment wants."""

    row: str
    seed: int
    recipe: Recipe


def jobs_of(rows: Mapping[str, Recipe], seeds: Iterable[int]) -> list[Job]:
    """A run of every row with the first seed, then with the next."""
    return [Job(row, seed, recipe.changed({"seed": seed})) for seed in seeds for row, recipe in rows.items()]


def split_missing(
    experiment: str, dataset: str, jobs: Iterable[Job], results: Path, *, measured: bool
) -> tuple[list[dict], list[Job]]:
    """What results/ lacks of an experiment: runs that other experiments have made already, and jobs that none has.

    What was `measured` is not taken from others. A run of another recipe in the place of a job is an error: nothing is
    overwritten.
    """
    path = results_file(results, experiment, dataset)
    runs = load_runs(path)
    known = [] if measured else known_runs(results, dataset)
    taken: list[dict] = []
    missing: list[Job] = []
    for job in jobs:
        key = fingerprint(job.recipe)
        same = [run for run in runs if (run["row"], run["seed"]) == (job.row, job.seed)]
        if any(run["fingerprint"] != key for run in same):
            raise ValueError(
                f"{path} has a run of {job.row!r}, seed {job.seed}, that another recipe made: move the file away to "
                "run it all again, or go back to the settings it was made with"
            )
        if any(matches(run, job.recipe) for run in same):
            continue
        other = next((run for run in known if matches(run, job.recipe)), None)
        if other is None:
            missing.append(job)
        else:
            taken.append(other | {"row": job.row, "seed": job.seed})
    return taken, missing


def run_missing(
    experiment: str,
    dataset: str,
    jobs: Iterable[Job],
    *,
    results: Path,
    work: Path,
    executor: Executor,
    measure: Measure | None = None,
    alone: bool = False,
    progress: Progress,
    on_run: Callable[[dict], None] | None = None,
) -> None:
    """Make results/EXPERIMENT/DATASET.json hold a run for every job; unfinished ones live in `work`.

    A run is `measure(recipe, folder)`, of which others cannot take the result; None: train and score. `alone` gives
    each a process of its own. `on_run` is called with every run once it is saved.
    """
    path = results_file(results, experiment, dataset)
    taken, missing = split_missing(experiment, dataset, jobs, results, measured=measure is not None)
    if taken:
        add_runs(path, taken)
    if not missing:
        return
    recipes = {fingerprint(job.recipe): job.recipe for job in missing}
    if measure is not None:  # what was interrupted is measured again from its beginning
        work = work / f"{experiment}-{dataset}"
        shutil.rmtree(work, ignore_errors=True)
    total = sum(recipe.epochs for recipe in recipes.values())

    def report(done: int, note: str) -> None:
        progress(experiment, done, total, note)

    made = finished(recipes, measure or train_or_resume, work=work, executor=executor, progress=report, alone=alone)
    with closing(made):  # where a result cannot be kept, nothing trains on
        for key, run in made:
            wanted = [job for job in missing if fingerprint(job.recipe) == key]
            new = [{"row": job.row, "seed": job.seed, "fingerprint": key, **run} for job in wanted]
            add_runs(path, [one | {"settings": settings_of(recipes[key])} for one in new])
            if on_run is not None:
                on_run(new[0])


def train_or_resume(recipe: Recipe, folder: Path) -> dict:
    """Train, or go on with it; the scores of the best epoch and the course of all."""
    path = folder / "recipe.json"
    if not path.exists():
        return summary(trainer.train(recipe, folder))
    with atomic_write(path) as draft:  # the data may have moved
        draft.write_text(recipe.to_json())
    return summary(trainer.resume(folder))


def train_or_fail(recipe: Recipe, folder: Path) -> dict:
    """The same, but settings with which the network overflows are only the worst ones."""
    try:
        return train_or_resume(recipe, folder)
    except ValueError as error:
        overflows = ("the loss became", "expected finite embeddings", "the gradient was not finite")
        if not any(overflow in str(error) for overflow in overflows):
            raise
        return {"scores": {"map_at_r": 0.0}, "seconds": 0.0}


def summary(run: Run) -> dict:
    """What of a finished run is worth keeping.

    Where test classes chose among epochs, as in the paper, the best of these by Recall@1 counts; otherwise the scores
    after the last epoch, on test classes or else on held-out ones.
    """
    log, scores = run.log, run.scores
    tested = [entry for entry in log if "test" in entry] if run.recipe.keep_epoch == "best" else []
    seconds = 0.0
    curve = []
    for entry in log:
        seconds += entry["training_seconds"]
        judged = entry.get("test") or entry.get("held_out")
        if judged is not None:
            curve.append({"epoch": entry["epoch"], "seconds": round(seconds, 2), "recall@1": judged["recall@1"]})
    best = max(tested, key=lambda entry: entry["test"]["recall@1"]) if tested else None
    kept = best["test"] if best else scores.get("trained") or log[-1]["held_out"]
    return {
        "scores": _numbers(kept),
        **({"frozen": _numbers(scores["untrained"])} if "untrained" in scores else {}),
        "best_epoch": best["epoch"] if best else scores["best_epoch"],
        "curve": curve,
        "seconds": round(seconds, 1),
    }


def _numbers(scores: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in scores.items() if isinstance(value, float)}
