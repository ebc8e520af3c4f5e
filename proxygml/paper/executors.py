"""Executors of an experiment's runs: processes on this machine, a Ray cluster, or SLURM.

Results are the same. Every machine of a cluster needs this package, the data and the working folder at the same paths.
"""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Protocol

import torch

from proxygml.optional import library
from proxygml.training.recipe import Recipe
from proxygml.training.run import machine

Measure = Callable[[Recipe, Path], dict]
DAY = 24 * 60  # minutes


class Task(Protocol):
    """A running or waiting run."""

    def done(self) -> bool: ...

    def result(self) -> dict: ...


Started = tuple[Mapping[str, Task], type[Exception]]  # tasks by name; the error that `result` raises for a lost process


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

    def start(
        self, measure: Measure, recipes: Mapping[str, Recipe], work: Path, *, alone: bool
    ) -> AbstractContextManager[Started]:
        """Context that calls `measure(recipe, work / name)` for each recipe; leaving it early stops them all."""
        if self.kind == "ray":
            return on_ray(measure, recipes, work)
        if self.kind == "slurm":
            return on_slurm(measure, recipes, work)
        return on_this_machine(measure, recipes, work, jobs=self.parallel, alone=alone)

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
def on_ray(measure: Measure, recipes: Mapping[str, Recipe], work: Path) -> Iterator[Started]:
    """The Ray cluster at RAY_ADDRESS, or a local one. A run that loses its worker resumes on another."""
    ray = library("ray", extra="cluster", user="--executor ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would send reports to its developers
    ray.init(logging_level="ERROR", log_to_driver=False)
    try:
        most = max(int(node["Resources"].get("CPU", 1)) for node in ray.nodes())
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        tasks = {}
        for name, recipe in recipes.items():
            cores = min(1 + recipe.workers, most)
            remote = ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=3)(attempt)
            tasks[name] = remote.remote(measure, recipe, work.resolve() / name, 1, Path.cwd()).future()
        yield tasks, ray.exceptions.RayError
    finally:
        ray.shutdown()  # and its running tasks


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
