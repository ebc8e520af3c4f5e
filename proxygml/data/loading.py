"""Batches that other processes load, and what is said where one of these is killed or cannot read an image."""

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class LostLoaderError(OSError):
    """A process that decodes images has ended."""

    def __init__(self, message: str = "a process that decodes images was killed (is there enough memory?)") -> None:
        super().__init__(message)


def is_lost(error: BaseException) -> bool:
    """Whether torch says so, which it does in the midst of whatever this process is doing then."""
    return isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error)


def loaded(batches: "DataLoader") -> Iterator:
    """The batches, one after another."""
    try:
        # Ctrl-C in a terminal reaches them too, where it is for this process alone to end them. It does so by SIGTERM,
        # which in a copy of this process that has only begun would be an exception that may get lost.
        batches.worker_init_fn = _end_when_told
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            iterator = iter(batches)  # starts them, as copies of this process with what it blocks
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield from iterator
    except RuntimeError as error:
        if not is_lost(error):  # an error inside one is told otherwise
            raise
        raise LostLoaderError from error
    except OSError as error:  # of an image; a process tells it with all of its traceback, whose last line has it
        line = next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__)
        raise OSError(line.removeprefix("OSError: ")) from error


def _end_when_told(_: int) -> None:
    """In a process that is about to load: torch has seen to it that SIGTERM ends it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
