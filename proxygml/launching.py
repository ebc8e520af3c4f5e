"""The processes of one command on one machine: this one and copies of it, which end with it."""

import atexit
import os
import socket
import subprocess
import sys
import time

import torch

LAST_WORDS = 1.5  # seconds that copies have to end after this process


def start_copies(processes: int) -> None:
    """Start this command again as processes 1, 2, ... of so many; this one is process 0. Fabric reads LOCAL_RANK.

    Fabric would start them itself, but within seconds of the end of one it kills all, before any has said why.
    """
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    module = sys.modules["__main__"].__spec__
    command = [sys.executable, os.path.abspath(sys.argv[0])] if module is None else [sys.executable, "-m", module.name]
    copies = [
        subprocess.Popen([*command, *sys.argv[1:]], env={**os.environ, "LOCAL_RANK": str(rank)})
        for rank in range(1, processes)
    ]
    os.environ["LOCAL_RANK"] = "0"
    atexit.register(_end, copies)


def _end(copies: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + LAST_WORDS
    for copy in copies:
        try:
            copy.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            copy.kill()
            copy.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
