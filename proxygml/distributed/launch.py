"""The processes of one command on one machine: this one and copies of it, which end with it."""

import atexit
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAST_WORDS = 1.5  # seconds that copies have to end after this process
WORD = "PROXYGML_WORD"  # names the empty file whose remover speaks for all


class LostOthersError(ValueError):
    """This process no longer reaches the others, of which one may know why."""


def is_first_process() -> bool:
    """Whether this is the one of several processes that speaks for all; torchrun and Fabric number them."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))


def start_copies(processes: int) -> None:
    """Start this command again as processes 1, 2, ... of so many; this one is process 0. Fabric reads LOCAL_RANK.

    Fabric would start them itself, but within seconds of the end of one it kills all, before any has said why.
    """
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_keep_port())
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
        import torch  # here: only those who start processes need it

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    handle, os.environ[WORD] = tempfile.mkstemp(prefix="proxygml-")
    os.close(handle)
    module = sys.modules["__main__"].__spec__
    command = [sys.executable, os.path.abspath(sys.argv[0])] if module is None else [sys.executable, "-m", module.name]
    copies = [
        subprocess.Popen([*command, *sys.argv[1:]], env={**os.environ, "LOCAL_RANK": str(rank)})
        for rank in range(1, processes)
    ]
    os.environ["LOCAL_RANK"] = "0"
    atexit.register(_end, copies)


def may_speak(error: Exception) -> bool:
    """Whether this process is the one of all that says why they end; who knows comes before who only misses another."""
    if not is_first_process():
        time.sleep(LAST_WORDS)  # where the first fails alike, it speaks
    if WORD not in os.environ:  # another launcher, which ends the others when the first has ended
        if not is_first_process():
            time.sleep(LAST_WORDS)
        return True
    if isinstance(error, LostOthersError):
        time.sleep(2 * LAST_WORDS)
    try:
        os.unlink(os.environ[WORD])
    except FileNotFoundError:
        return False
    return True


def _end(copies: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + LAST_WORDS
    for copy in copies:
        try:
            copy.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            copy.kill()
            copy.wait()
    Path(os.environ[WORD]).unlink(missing_ok=True)


def _keep_port() -> int:
    """A port for the processes to meet at, which nobody else is given as long as this one runs."""
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch, which asks for the same, may listen there
    keeper.bind(("127.0.0.1", 0))
    atexit.register(keeper.close)
    return keeper.getsockname()[1]
