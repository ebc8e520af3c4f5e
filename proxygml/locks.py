"""One process at a time in a folder: a lock that ends with the process that holds it."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from proxygml.files import UnwritableError

NAME = ".lock"
PATIENCE = 3.0  # seconds to wait for a process that was just stopped and is still going
UNKNOWN = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # on some network file systems there are no locks
_held: set[int] = set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other process out of a folder, which is made if need be; an error names the one that is in it.

    By flock rather than by a process number in a file: the system lets go of it when its process ends, be it killed or
    the machine switched off, and nobody has to guess whether a number now belongs to another process. The number in the
    file is only shown. What Python starts does not inherit the lock, so that it never outlives its process.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UnwritableError(f"could not write {folder / NAME}: {error.strerror}") from error
    _held.add(handle)
    try:
        _take(handle, folder)
        with suppress(OSError):  # a full disk: then it is not named
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        if handle in _held:  # not in a fork of the process
            _held.remove(handle)
            os.close(handle)


def refuse_locked(folder: Path) -> None:
    """An error where a process is at work in the folder."""
    if (folder / NAME).exists():
        with locked(folder):
            pass


def _take(handle: int, folder: Path) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            who = os.pread(handle, 300, 0).decode(errors="replace") or "another process"
            raise ValueError(f"{who} is at work in {folder}: wait for it, or stop it") from None
        except OSError as error:
            if error.errno not in UNKNOWN:
                raise
        return


def _let_go_in_fork() -> None:
    """A fork, as torch's loading processes are, shares the lock: it would hold it on when its parent is killed."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_fork)
