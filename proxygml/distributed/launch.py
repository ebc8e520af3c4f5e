"""Starts copies of this command as further processes on one machine, and chooses the one that reports an error."""

import atexit
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

GRACE = 1.5  # seconds that the copies have to end after this process
UNNOTICED = 30.0  # seconds that a process has to notice by itself that another has ended, as with gloo
ERROR_TOKEN = "PROXYGML_ERROR_TOKEN"  # path of an empty file; the process that removes it reports the error


class LostProcessError(ValueError):
    """The connection to another process is lost; that process may know the cause."""


def is_first_process() -> bool:
    """Whether this is the first of several processes, by the variables of torchrun and Fabric."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))


def join_processes() -> None:
    """Connect the processes that torchrun has started, without Fabric."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        import torch.distributed as dist  # slow to import, and only needed here

        dist.init_process_group()  # gloo for the CPU, nccl for GPUs


def start_copies(processes: int) -> None:
    """Start this command again as processes 1, 2, ...; this one is process 0. Fabric reads LOCAL_RANK.

    Fabric could start them, but when one ends it kills all within seconds, before any has reported the cause.
    """
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_reserve_port())
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
        import torch  # slow to import, and only needed here

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    handle, os.environ[ERROR_TOKEN] = tempfile.mkstemp(prefix="proxygml-")
    os.close(handle)
    module = sys.modules["__main__"].__spec__
    command = [sys.executable, os.path.abspath(sys.argv[0])] if module is None else [sys.executable, "-m", module.name]
    copies = [
        subprocess.Popen([*command, *sys.argv[1:]], env={**os.environ, "LOCAL_RANK": str(rank)})
        for rank in range(1, processes)
    ]
    os.environ["LOCAL_RANK"] = "0"
    atexit.register(_end, copies)
    threading.Thread(target=_watch, args=(partial(_lost_copy, copies), copies), daemon=True).start()


def watch_first_process() -> None:
    """In a copy: end when the process that started it has ended."""
    first = os.getppid()
    lost = lambda: None if os.getppid() == first else "process 0 has ended"  # noqa: E731
    threading.Thread(target=_watch, args=(lost, []), daemon=True).start()


def _lost_copy(copies: list[subprocess.Popen]) -> str | None:
    """Which copy has failed, if any."""
    for rank, copy in enumerate(copies, 1):
        if code := copy.poll():
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"process {rank} of {len(copies) + 1} {how}"
    return None


def _watch(find_lost: Callable[[], str | None], copies: list[subprocess.Popen]) -> None:
    """End this process and its copies when another is lost: with NCCL, it would wait until the timeout."""
    while (lost := find_lost()) is None:
        time.sleep(0.5)
    time.sleep(UNNOTICED)
    if _take_token():
        os.write(2, f"error: {lost}. Continue with --resume\n".encode())
    _end(copies)
    os._exit(1)


def should_report(error: Exception) -> bool:
    """Whether this process reports the error for all; one that knows the cause comes before one that lost another."""
    if not is_first_process():
        time.sleep(GRACE)  # if the first fails too, it reports
    if ERROR_TOKEN not in os.environ:  # another launcher ends the others after the first
        if not is_first_process():
            time.sleep(GRACE)
        return True
    if isinstance(error, LostProcessError):
        time.sleep(2 * GRACE)
    return _take_token()


def _take_token() -> bool:
    """Whether this process reports the error: the first that asks."""
    try:
        os.unlink(os.environ[ERROR_TOKEN])
    except FileNotFoundError:
        return False
    return True


def _end(copies: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + GRACE
    for copy in copies:
        try:
            copy.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            copy.kill()
            copy.wait()
    Path(os.environ[ERROR_TOKEN]).unlink(missing_ok=True)


def _reserve_port() -> int:
    """A free port for the processes, reserved while this one runs."""
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch sets it too and may listen there
    keeper.bind(("127.0.0.1", 0))
    atexit.register(keeper.close)
    return keeper.getsockname()[1]
