"""Runs without processes of their own, for tests of what is around them; test_processes.py has real ones."""

from collections.abc import Callable
from concurrent.futures import Executor, Future

import pytest

from proxygml.paper import executors


class InThisProcess(Executor):
    """Calls a function when it is submitted."""

    def submit(self, function: Callable, /, *args: object) -> Future:
        future: Future = Future()
        future.set_result(function(*args))
        return future


def run_in_this_process(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(executors, "_new_pool", lambda jobs, *, alone: InThisProcess())


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_this_process(monkeypatch)
