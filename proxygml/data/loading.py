"""Iterate over a DataLoader, with clear errors if a worker is killed or cannot read an image."""

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class WorkerKilledError(OSError):
    """A DataLoader worker has ended."""

    def __init__(self, message: str = "a process that decodes images was killed (is there enough memory?)") -> None:
        super().__init__(message)


def is_worker_killed(error: BaseException) -> bool:
    """Whether torch reports a killed worker; it raises this error at any point of the main process."""
    return isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error)


def load_batches(loader: "DataLoader") -> Iterator:
    """The batches of a loader."""
    try:
        # Ctrl-C in a terminal also reaches the workers, but only this process should end them, with SIGTERM. In a
        # worker that has just been forked, this process's SIGTERM handler would raise an exception that can get lost.
        loader.worker_init_fn = _unblock_sigterm
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            iterator = iter(loader)  # forks the workers, which inherit the blocked signals
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield from iterator
    except RuntimeError as error:
        if not is_worker_killed(error):
            raise
        raise WorkerKilledError from error
    except OSError as error:  # an unreadable image; a worker adds its traceback before the last line
        line = next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__)
        raise OSError(line.removeprefix("OSError: ")) from error


def _unblock_sigterm(_: int) -> None:
    """Called in each worker after torch has set the default SIGTERM handler."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
