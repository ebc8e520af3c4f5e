"""`proxygml paper queue`: all runs behind docs/results.md, one after another, the most informative first."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from proxygml.display import Progress
from proxygml.files import locked
from proxygml.paper import find
from proxygml.paper.executors import Executor
from proxygml.paper.results import fingerprint, known_runs
from proxygml.paper.running import Job, jobs_of, run_missing, split_missing
from proxygml.paper.settings import SETTINGS, base_recipe
from proxygml.training.recipe import Recipe


def _on(setting: str, *experiments: str) -> tuple[tuple[str, str], ...]:
    return tuple((experiment, setting) for experiment in experiments)


FIRST = ("frozen", "modules", "comparison", "ratio", "spread")
SMALL = ("frozen", "comparison", "ratio")
REST = ("convergence", "proxies", "lambda", "proxy-anchor", "grid", "illustration")
TIERS: tuple[tuple[tuple[str, str], ...], ...] = (  # experiment, setting
    (*_on("cars-head", *FIRST), *_on("cub-head", *FIRST), *_on("cars-small", *SMALL)),
    (
        *_on("cars-head", *REST),
        *_on("cub-head", *REST),
        *_on("omniglot-sop", "comparison"),
        *_on("cub-small", *SMALL),
    ),
    (
        *(("convergence", "cars-small"), ("convergence", "cub-small"), ("proxy-anchor", "omniglot-sop")),
        *(("cost", setting) for setting in ("cars-head", "cub-head", "omniglot-sop")),
    ),
)


@dataclass(frozen=True)
class Part:
    """An experiment in a setting: all its jobs, and those without a run."""

    tier: int
    experiment: str
    dataset: str
    jobs: list[Job]
    missing: list[Job]

    @property
    def name(self) -> str:
        return f"{self.experiment} on {self.dataset}"


def plan(data: str, results: Path, *, quick: bool = False) -> list[Part]:
    """The queue in order. A run that several experiments share is missing once, with the most tested epochs of any."""

    def key(experiment: str, dataset: str, job: Job) -> tuple[str, ...]:
        measured = find(experiment).measure is not None  # not shared with other experiments
        return experiment if measured else "", dataset, fingerprint(job.recipe)

    parts = []
    queued = [(tier, *names, _jobs(*names, data, quick)) for tier, pairs in enumerate(TIERS, 1) for names in pairs]
    fullest: dict[tuple[str, ...], Recipe] = {}
    for _, experiment, dataset, jobs in queued:
        for job in jobs:
            known = fullest.setdefault(key(experiment, dataset, job), job.recipe)
            if len(job.recipe.tested_epochs) > len(known.tested_epochs):
                fullest[key(experiment, dataset, job)] = job.recipe
    planned: set[tuple[str, ...]] = set()
    for tier, experiment, dataset, jobs in queued:
        jobs = [job._replace(recipe=fullest[key(experiment, dataset, job)]) for job in jobs]
        _, missing = split_missing(experiment, dataset, jobs, results)
        missing = [job for job in missing if key(experiment, dataset, job) not in planned]
        planned |= {key(experiment, dataset, job) for job in missing}
        parts.append(Part(tier, experiment, dataset, jobs, missing))
    return parts


def _jobs(experiment: str, dataset: str, data: str, quick: bool) -> list[Job]:
    about = find(experiment)
    rows = about.recipes(base_recipe(dataset, data, quick))
    return jobs_of({name: rows[name] for name in about.of_paper(rows)}, range(1 if quick else about.seeds))


def minutes_left(parts: list[Part], results: Path) -> dict[str, float]:
    """Estimate for each part, from finished runs or else from its setting."""
    left = {}
    for part in parts:
        seconds = [run["seconds"] for run in known_runs(results, part.dataset) if "seconds" in run]
        usual = 1.1 * statistics.median(seconds) / 60 if len(seconds) > 2 else SETTINGS[part.dataset].minutes
        left[part.name] = usual * len(part.missing)
    return left


def _require_data(parts: list[Part], data: str) -> None:
    """Name every missing dataset before the first run."""
    needed = dict.fromkeys(SETTINGS[part.dataset].folder for part in parts if part.missing)
    if missing := [name for name in needed if name is not None and not Path(data, name).exists()]:
        raise FileNotFoundError(f"no {' and no '.join(missing)} in {data}: the queue needs all, see docs/datasets.md")


def run_queue(
    data: str,
    *,
    results: Path,
    work: Path,
    executor: Executor,
    most: int | None = None,
    quick: bool = False,
    progress: Progress,
    on_run: Callable[[str, dict], None],
) -> list[str]:
    """Run the queue, at most `most` runs, one at a time on each GPU; a sentence for each part that failed."""
    if executor.kind != "local":
        raise ValueError(f"the queue runs on this machine: leave out --executor {executor.kind}")
    executor = replace(executor, jobs=executor.jobs or max(1, torch.cuda.device_count()))
    failed = []
    left = most
    with locked(work):
        parts = plan(data, results, quick=quick)
        _require_data(parts, data)
        for part in parts:
            jobs = part.missing if left is None else part.missing[:left]
            if not jobs and part.missing:
                break
            left = None if left is None else left - len(jobs)
            try:
                _, missing = split_missing(part.experiment, part.dataset, part.jobs, results)
                run_missing(
                    part.experiment,
                    part.dataset,
                    [job for job in part.jobs if job in jobs or job not in missing],
                    results,
                    work,
                    executor=executor,
                    progress=progress,
                    quick=quick,
                    on_run=lambda run, name=part.name: on_run(name, run),  # type: ignore[misc]
                )
            except ValueError as error:
                failed.append(f"{part.name}: {error}")
    return failed
