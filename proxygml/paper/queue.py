"""All runs behind docs/results.md, the most telling first, one after another: `proxygml paper queue`.

It can be killed at any moment and started again: each finished run is written to results/ at once, and an unfinished
one continues after its last epoch.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from proxygml.files import locked
from proxygml.paper import find
from proxygml.paper.executors import Executor
from proxygml.paper.results import fingerprint, known_runs
from proxygml.paper.running import Job, jobs_of, paper_protocol_rows, paper_rows, run_missing, split_missing
from proxygml.paper.settings import SETTINGS, base_recipe
from proxygml.training.recipe import Recipe
from proxygml.training.run import Progress

FIRST = ("modules", "comparison", "ratio")
REST = ("convergence", "proxies", "lambda", "proxy-anchor", "grid", "illustration")
TIERS: tuple[tuple[tuple[str, str], ...], ...] = (  # experiment, setting
    (
        ("frozen", "cars-head"),
        *((experiment, "cars-head") for experiment in FIRST),
        ("frozen", "cars-small"),
        ("comparison", "cars-small"),
        ("ratio", "cars-small"),
    ),
    (
        *((experiment, "cars-head") for experiment in REST),
        *((experiment, "cub-head") for experiment in ("frozen", *FIRST, *REST)),
        ("comparison", "omniglot-sop"),
        ("frozen", "cub-small"),
        ("comparison", "cub-small"),
        ("ratio", "cub-small"),
    ),
    (
        ("convergence", "cars-small"),
        ("convergence", "cub-small"),
        ("proxy-anchor", "omniglot-sop"),
        ("cost", "cars-head"),
        ("cost", "cub-head"),
        ("cost", "omniglot-sop"),
    ),
)
SEEDS = 3


@dataclass(frozen=True)
class Part:
    """What is left of an experiment in a setting."""

    tier: int
    experiment: str
    dataset: str
    missing: list[Job]
    wanted: int

    @property
    def name(self) -> str:
        return f"{self.experiment} on {self.dataset}"


def plan(data: str, results: Path, *, quick: bool = False) -> list[Part]:
    """What is missing, in order. A run that several experiments want is listed once, scored as often as any wants."""
    parts = []
    planned: set[tuple[str, str]] = set()  # setting and fingerprint
    wanted = [(tier, *names) for tier, pairs in enumerate(TIERS, 1) for names in pairs]
    fullest: dict[tuple[str, str], Recipe] = {}
    for _, experiment, dataset in wanted:
        for job in [] if hasattr(find(experiment), "measure") else _jobs(experiment, dataset, data, quick):
            key = dataset, fingerprint(job.recipe)
            if key not in fullest or len(job.recipe.tested_epochs) > len(fullest[key].tested_epochs):
                fullest[key] = job.recipe
    for tier, experiment, dataset in wanted:
        measured = hasattr(find(experiment), "measure")
        jobs = _jobs(experiment, dataset, data, quick)
        if not measured:
            jobs = [job._replace(recipe=fullest[dataset, fingerprint(job.recipe)]) for job in jobs]
        _, missing = split_missing(experiment, dataset, jobs, results, measured=measured)
        if not measured:
            missing = [job for job in missing if (dataset, fingerprint(job.recipe)) not in planned]
            planned |= {(dataset, fingerprint(job.recipe)) for job in missing}
        parts.append(Part(tier, experiment, dataset, missing, len(jobs)))
    return parts


def _jobs(experiment: str, dataset: str, data: str, quick: bool) -> list[Job]:
    # Methods that the paper does not compare with are made only on request.
    rows = paper_rows(experiment, paper_protocol_rows(experiment, base_recipe(dataset, data, quick)))
    return jobs_of(rows, range(1 if quick else getattr(find(experiment), "SEEDS", SEEDS)))


def minutes_left(parts: list[Part], results: Path) -> dict[str, float]:
    """About how long the missing runs of each part take, by those that are finished or else as the setting says."""
    left = {}
    for part in parts:
        seconds = [run["seconds"] for run in known_runs(results, part.dataset) if "seconds" in run]
        usual = 1.1 * statistics.median(seconds) / 60 if len(seconds) > 2 else SETTINGS[part.dataset].minutes
        left[part.name] = usual * len(part.missing)
    return left


def _require_data(parts: list[Part], data: str) -> None:
    """An error that names every dataset that is missing, before the first run instead of after days."""
    needed = dict.fromkeys(SETTINGS[part.dataset].folder for part in parts if part.missing)
    if missing := [name for name in needed if name is not None and not Path(data, name).exists()]:
        raise FileNotFoundError(f"no {' and no '.join(missing)} in {data}: the queue needs all, see docs/datasets.md")


def run_queue(
    data: str,
    *,
    results: Path,
    work: Path,
    most: int | None = None,
    quick: bool = False,
    progress: Progress,
    on_run: Callable[[str, dict], None],
) -> list[str]:
    """Make what is missing, at most so many runs; what failed, in a sentence each."""
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
            measure = getattr(find(part.experiment), "measure", None)
            everything = _jobs(part.experiment, part.dataset, data, quick)
            try:
                where = part.experiment, part.dataset, everything, results
                _, not_made = split_missing(*where, measured=measure is not None)
                made = [job for job in everything if job not in not_made]  # by this experiment, or by another
                run_missing(
                    part.experiment,
                    part.dataset,
                    [*made, *jobs],
                    results=results,
                    work=work,
                    executor=Executor(jobs=1),
                    measure=measure,
                    alone=measure is not None and not quick,
                    progress=progress,
                    on_run=lambda run, name=part.name: on_run(name, run),  # type: ignore[misc]
                )
            except ValueError as error:
                failed.append(f"{part.name}: {error}")
    return failed
