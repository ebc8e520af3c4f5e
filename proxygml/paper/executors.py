"""Executors of an experiment's runs: processes on this machine, or SLURM.

Results are the same. Every machine of a cluster needs this package, the data and the working folder at the same paths.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch

from proxygml.display import Progress
from proxygml.optional import library
from proxygml.paper.results import without_paths
from proxygml.training import build
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run, machine, provenance

Measure = Callable[[Recipe, Path], dict]
Started = tuple[Mapping[str, Future], type[Exception]]  # by name; the error that `result` raises for a lost process
DAY = 24 * 60  # minutes


@dataclass(frozen=True)
class Executor:
    """Kind of executor, and parallel runs on this machine (None: one for each GPU, or for each core without GPUs)."""

    kind: str = "local"
    jobs: int | None = None
    precision: str | None = None  # of all runs, whatever their recipes say; it does not make them other runs
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.kind != "local" and self.jobs is not None:
            raise ValueError(f"--jobs is for this machine: {self.kind} starts as many runs as it has room for")

    @property
    def parallel(self) -> int:
        return self.jobs or len(_gpus()) or os.cpu_count() or 1

    def to_json(self) -> dict[str, str | int]:
        """The entry in `made_by` of a result."""
        how: dict[str, str | int] = {"jobs": self.parallel} if self.kind == "local" else {"executor": self.kind}
        return how | ({"precision": self.precision} if self.precision else {})

    def run_recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with the precision and workers of this executor."""
        changes = {"precision": self.precision, "workers": self.workers}
        return recipe.changed({name: value for name, value in changes.items() if value is not None})


def finished(
    recipes: Mapping[str, Recipe],
    measure: Measure,
    *,
    work: Path,
    executor: Executor,
    progress: Progress,
    activity: str = "training",
    alone: bool = False,
) -> Generator[tuple[str, dict], None, None]:
    """The result of `measure(recipe, work / name)` for each recipe, by name, as soon as it is known.

    `alone` gives each a new process. To close the generator ends them.
    """
    recipes = {name: executor.run_recipe(recipe) for name, recipe in recipes.items()}
    for data, recipe in {recipe.data: recipe for recipe in recipes.values()}.items():
        if data is not None:
            build.load_images(recipe)  # data that no run can read is reported once, before the first run
    made_by = provenance() | executor.to_json()
    made_by["command"] = without_paths(str(made_by["command"]))
    total, epochs_done = sum(recipe.epochs for recipe in recipes.values()), 0
    failed: list[str] = []
    if executor.kind == "slurm":
        started = on_slurm(measure, recipes, work)
    else:
        started = on_this_machine(measure, recipes, work, jobs=executor.parallel, alone=alone)
    with started as (tasks, lost):
        waiting = dict(tasks)
        while waiting:
            time.sleep(0.2)
            for name in [name for name, task in waiting.items() if task.done()]:
                recipe = recipes[name]
                epochs_done += recipe.epochs
                try:
                    outcome = waiting.pop(name).result()
                except lost as error:
                    *_, last_line = str(error).strip().split("\n")  # the message may be a traceback
                    outcome = {"failed": f"it ended without a result ({last_line})"}
                if "failed" in outcome:  # the other runs continue
                    failed.append(f"{recipe.loss} with seed {recipe.seed}: {outcome['failed']}")
                    continue
                on = {"machine": outcome.pop("machine")}
                yield name, outcome | {"made_by": made_by | on}
                shutil.rmtree(work / name, ignore_errors=True)
            under_way = sum(len(Run(work / name).log) for name in waiting)
            ended = f"{len(recipes) - len(waiting)} of {len(recipes)} runs"
            progress(activity, epochs_done + under_way, total, ended)
    if failed:
        raise ValueError(f"{len(failed)} of {len(recipes)} runs failed, first {failed[0]}")


@contextmanager
def on_this_machine(
    measure: Measure, recipes: Mapping[str, Recipe], work: Path, *, jobs: int, alone: bool
) -> Iterator[Started]:
    """`jobs` processes that share the cores, each with one GPU; `alone`: a new process for each run."""
    threads = max(1, torch.get_num_threads() // jobs)
    tasks: dict[str, Future] = {}
    with _new_pool(jobs, alone=alone) as pool:  # waits for its manager thread, even if it is broken
        try:
            # Ctrl-C reaches the workers too: wait until they have called `_begin`.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for name, recipe in recipes.items():
                    tasks[name] = pool.submit(attempt, measure, recipe, work / name, threads)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield tasks, BrokenProcessPool
        except BaseException:
            while not all(task.done() for task in tasks.values()):  # a pool that lost a process ends all others
                for process in multiprocessing.active_children():
                    process.terminate()
                    process.join()  # it uses its folder until it has ended
            raise


@contextmanager
def on_slurm(measure: Measure, recipes: Mapping[str, Recipe], work: Path) -> Iterator[Started]:
    """One array of SLURM jobs; sbatch reads its options from the environment (SBATCH_PARTITION, ...)."""
    submitit = library("submitit", extra="cluster", user="--executor slurm")
    try:
        executor = submitit.AutoExecutor(folder=work / "slurm", cluster="slurm")
    except RuntimeError as error:
        raise ValueError(f"SLURM is not available here ({error}): use --executor local") from error
    cores = 1 + max(recipe.workers for recipe in recipes.values())
    executor.update_parameters(name="proxygml", cpus_per_task=cores, timeout_min=DAY)
    with executor.batch():
        tasks = {
            name: executor.submit(attempt, measure, recipe, work.resolve() / name, 1, Path.cwd())
            for name, recipe in recipes.items()
        }
    try:
        yield tasks, submitit.core.utils.UncompletedJobError
    finally:
        for task in tasks.values():
            if not task.done():
                task.cancel()


def attempt(measure: Measure, recipe: Recipe, folder: Path, threads: int, here: Path | None = None) -> dict:
    """The result of a run with its machine, or {"failed": reason}; called in the worker process."""
    if here is not None:
        os.chdir(here)
    torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loss warns of the settings of some rows
        try:
            return measure(recipe, folder) | {"machine": machine()}
        except (ValueError, OSError) as error:
            return {"failed": str(error)}


def _new_pool(jobs: int, *, alone: bool) -> ProcessPoolExecutor:
    spawned = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    if alone and sys.version_info < (3, 11):
        raise ValueError("a new process for each run, whose memory is measured, needs Python 3.11 or newer")
    gpus = _gpus()
    return ProcessPoolExecutor(
        jobs,
        mp_context=spawned,
        initializer=_begin,
        initargs=(spawned.Value("i", 0), [gpus[job % len(gpus)] for job in range(jobs)] if gpus else []),
        **({"max_tasks_per_child": 1} if alone else {}),
    )


def _gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return names.split(",")[: torch.cuda.device_count()]


def _begin(started: Synchronized, gpus: list[str]) -> None:
    """In each process of this machine: use the next GPU, and end silently when the experiment is stopped."""
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]  # before CUDA starts here
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_the_command, daemon=True).start()


def _end_with_the_command() -> None:
    if (command := multiprocessing.parent_process()) is not None:
        command.join()  # even if it was killed and could not end its children
    os._exit(1)
