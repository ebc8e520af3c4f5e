"""Processes that load batches: what they hear of signals."""

import multiprocessing
import os
import signal
import time

import pytest
from torch.utils.data import DataLoader

from proxygml.cli.stopping import told_to_go_on
from proxygml.data.loading import LostLoaderError, loaded


class Blocked:
    """As items the signals that the process blocks which loads them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> set[int]:
        return {int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])}


def test_processes_hear_of_their_end_but_not_of_control_c() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    for blocked in loaded(DataLoader(Blocked(), batch_size=None, num_workers=2)):
        assert signal.SIGINT in blocked
        assert signal.SIGTERM not in blocked
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


class Killed:
    """Items of which the first ends the process that loads it."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> int:
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        return number


def test_after_one_was_killed_the_others_end_although_this_program_answers_sigterm_itself() -> None:
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(LostLoaderError, match="was killed"):
            list(loaded(DataLoader(Killed(), batch_size=None, num_workers=2)))
        for process in multiprocessing.active_children():
            process.terminate()
            process.join(60)
            assert not process.is_alive()
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_a_killed_one_or_a_stop_may_be_told_by_any_error_and_how_to_go_on_is_said_all_the_same() -> None:
    said = r"was killed .*\. When that is mended, give it again"
    with pytest.raises(LostLoaderError, match=said), told_to_go_on(lambda: "give it again"):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    with pytest.raises(KeyboardInterrupt, match="give it again"), told_to_go_on(lambda: "give it again"):
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()
    with pytest.raises(RuntimeError, match=r"^another$"), told_to_go_on(lambda: "give it again"):
        raise RuntimeError("another")
