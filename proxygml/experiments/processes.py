"""Several runs at a time, each in a process of its own, and all of them gone when the command is, however it ends."""

import fcntl
import multiprocessing
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import torch

from proxygml.recipes import Recipe
from proxygml.runs import Run, provenance


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second `proxygml paper` out of a folder; the system lets go of the lock of a process that has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ValueError(
                f"another `proxygml paper` (process {lock.read()}) is at work in {folder}: wait for it, or stop it"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def finished(
    recipes: Mapping[str, Recipe],
    measure: Callable[[Recipe, Path], dict],
    *,
    work: Path,
    jobs: int | None,
    progress: Callable[[int, str], None],
    alone: bool = False,
) -> Generator[tuple[str, dict], None, None]:
    """What `measure(recipe, work / name)` gave for each recipe, by name, as soon as it is known.

    `jobs` of them are made at a time, None: one for each core, or one on a GPU; `alone` gives each a new process. To
    close the generator ends them.
    """
    jobs = jobs or (1 if torch.cuda.is_available() else os.cpu_count() or 1)
    made_by = provenance() | {"jobs": jobs}
    epochs_done = 0
    failed: list[str] = []
    with ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),  # a fork of a process with threads may hang
        initializer=_begin,
        initargs=(jobs,),
        max_tasks_per_child=1 if alone else None,
    ) as pool:
        try:
            waiting: dict[Future, str] = {
                pool.submit(measure, recipe, work / name): name for name, recipe in recipes.items()
            }
            while waiting:
                ready, _ = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
                for future in ready:
                    name = waiting.pop(future)
                    epochs_done += recipes[name].epochs
                    try:
                        found = future.result()
                    except (ValueError, OSError) as error:  # the others shall not wait for it to be mended
                        failed.append(f"{recipes[name].loss} with seed {recipes[name].seed}: {error}")
                        continue
                    yield name, found | {"made_by": made_by}
                    shutil.rmtree(work / name, ignore_errors=True)
                under_way = sum(len(Run(work / name).log) for name in waiting.values())
                progress(epochs_done + under_way, f"{len(recipes) - len(waiting)} of {len(recipes)} runs")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
                process.join()  # the folder is its own until it is gone
            raise
    if failed:
        raise ValueError(f"{len(failed)} of {len(recipes)} runs failed, first {failed[0]}")


def _begin(jobs: int) -> None:
    """In each process: a share of the cores, and an end without a word when the experiment is stopped."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    warnings.simplefilter("ignore")  # some arms are settings that the loss warns of
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_the_command, daemon=True).start()


def _end_with_the_command() -> None:
    multiprocessing.parent_process().join()  # also where it was killed and could end nothing itself
    os._exit(1)
