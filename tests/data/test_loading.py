"""DataLoader workers and signals."""

import multiprocessing
import os
import signal
import time

import pytest
from torch.utils.data import DataLoader

from proxygml.cli.stopping import resume_hint
from proxygml.data.loading import WorkerKilledError, load_batches


class Blocked:
    """Items are the signals that the worker blocks."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> set[int]:
        return {int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])}


def test_workers_block_sigint_only() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    for blocked in load_batches(DataLoader(Blocked(), batch_size=None, num_workers=2)):
        assert signal.SIGINT in blocked
        assert signal.SIGTERM not in blocked
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


class Killed:
    """The first item kills its worker."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> int:
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        return number


def test_killed_worker_ends_the_others() -> None:
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(WorkerKilledError, match="was killed"):
            list(load_batches(DataLoader(Killed(), batch_size=None, num_workers=2)))
        for process in multiprocessing.active_children():
            process.terminate()
            process.join(60)
            assert not process.is_alive()
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_how_to_resume_is_reported() -> None:
    said = r"was killed .*\. When that is fixed, give it again"
    with pytest.raises(WorkerKilledError, match=said), resume_hint(lambda: "give it again"):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    with pytest.raises(KeyboardInterrupt, match="give it again"), resume_hint(lambda: "give it again"):
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()
    with pytest.raises(RuntimeError, match=r"^another$"), resume_hint(lambda: "give it again"):
        raise RuntimeError("another")
