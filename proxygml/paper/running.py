"""Runs the missing runs of an experiment in parallel, and saves each as soon as it finishes.

An interrupted run resumes after its last epoch; a run that another experiment already has is copied.
"""

import shutil
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from proxygml.display import Progress
from proxygml.files import locked
from proxygml.paper import find
from proxygml.paper.executors import Executor, finished
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
from proxygml.paper.tuning import HELD_OUT, TRIALS, chosen, tuned
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from proxygml.training.start import resume, train


def run_experiment(
    name: str,
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
    """Run the missing runs of an experiment, or of `only` these rows.

    Protocol "fair" first tunes every row on held-out training classes; test classes are scored once, after the last
    epoch.
    """
    experiment, fair = find(name), protocol == "fair"
    if fair and (experiment.measure is not None or experiment.every_epoch):
        raise ValueError(f"{name} does not compare final scores: leave out --protocol fair")
    rows = experiment.recipes(base_recipe(dataset, data, quick), protocol)
    if not rows:
        raise ValueError(f"{name} needs a pretrained network, which {dataset} does not start from")
    if unknown := [row for row in only if row not in rows]:
        raise ValueError(f"expected rows among {str(list(rows))[1:-1]}, got {unknown[0]!r}")
    if executor.kind != "local" and experiment.measure is not None:
        raise ValueError(f"{name} is measured on one machine: leave out --executor {executor.kind}")
    with locked(work):
        if fair:
            trials, held_out = (2, 0.5) if quick else (TRIALS, HELD_OUT)

            def finish(recipes: Mapping[str, Recipe], note: str) -> Generator[tuple[str, dict], None, None]:
                told = f"choosing settings, {note}"
                return finished(recipes, train_or_fail, work=work, executor=executor, progress=progress, activity=told)

            rows = tuned(dataset, rows, only=only, results=results, trials=trials, held_out=held_out, finish=finish)
            dataset = f"{dataset}-fair"
        jobs = jobs_of(chosen(rows, only), seeds)
        run_missing(name, dataset, jobs, results, work, executor=executor, progress=progress, quick=quick)


class Job(NamedTuple):
    """One run of an experiment."""

    row: str
    seed: int
    recipe: Recipe


def jobs_of(rows: Mapping[str, Recipe], seeds: Iterable[int]) -> list[Job]:
    """Every row with the first seed, then with the next."""
    return [Job(row, seed, recipe.changed({"seed": seed})) for seed in seeds for row, recipe in rows.items()]


def split_missing(experiment: str, dataset: str, jobs: Iterable[Job], results: Path) -> tuple[list[dict], list[Job]]:
    """Split what results/ lacks of an experiment: runs to copy from other experiments, and jobs to run.

    An experiment with `measure` copies none. A run of another recipe with the row and seed of a job is an error.
    """
    path = results_file(results, experiment, dataset)
    runs = load_runs(path)
    known = known_runs(results, dataset) if find(experiment).measure is None else []
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
    results: Path,
    work: Path,
    *,
    executor: Executor,
    progress: Progress,
    quick: bool = False,
    on_run: Callable[[dict], None] | None = None,
) -> None:
    """Complete results/EXPERIMENT/DATASET.json with a run for every job; unfinished runs are in `work`.

    A run trains and scores, or calls the experiment's `measure`, one at a time, each in a new process unless `quick`.
    """
    path, measure = results_file(results, experiment, dataset), find(experiment).measure
    taken, missing = split_missing(experiment, dataset, jobs, results)
    if taken:
        add_runs(path, taken)
    if not missing:
        return
    recipes = {fingerprint(job.recipe): job.recipe for job in missing}
    if measure is not None:  # an interrupted measurement starts again
        executor, work = replace(executor, jobs=1), work / f"{experiment}-{dataset}"
        shutil.rmtree(work, ignore_errors=True)
    runs = finished(
        recipes,
        measure or train_or_resume,
        work=work,
        executor=executor,
        progress=progress,
        activity=experiment,
        alone=measure is not None and not quick,
    )
    with closing(runs):  # stops the others if a result cannot be saved
        for key, run in runs:
            wanted = [job for job in missing if fingerprint(job.recipe) == key]
            new = [{"row": job.row, "seed": job.seed, "fingerprint": key, **run} for job in wanted]
            add_runs(path, [one | {"settings": settings_of(recipes[key])} for one in new])
            if on_run is not None:
                on_run(new[0])


def train_or_resume(recipe: Recipe, folder: Path) -> dict:
    """Train or resume a run; its `summary`."""
    if not (folder / "recipe.json").exists():
        return summary(train(recipe, folder, progress=False))
    Run(folder).write_recipe(recipe)  # the data may have moved
    return summary(resume(folder, progress=False))


def train_or_fail(recipe: Recipe, folder: Path) -> dict:
    """The same, but settings that overflow score 0."""
    try:
        return train_or_resume(recipe, folder)
    except ValueError as error:
        overflows = ("the loss became", "expected finite embeddings", "the gradient was not finite")
        if not any(overflow in str(error) for overflow in overflows):
            raise
        return {"scores": {"map_at_r": 0.0}, "seconds": 0.0}


def summary(run: Run) -> dict:
    """Scores, learning curve and seconds of a finished run.

    With keep_epoch "best", as in the paper, the scores of the best epoch on test classes; otherwise of the last epoch,
    on test classes or else on held-out ones.
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
