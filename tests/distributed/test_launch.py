"""Of several processes that end, one says why."""

import os
from pathlib import Path

import pytest

from proxygml.distributed import launch
from proxygml.distributed.launch import LostProcessError, should_report


@pytest.fixture
def waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each process waits, in a command of several processes."""
    (tmp_path / "word").touch()
    monkeypatch.setenv(launch.ERROR_TOKEN, str(tmp_path / "word"))
    waits: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waits.append)
    return waits


def test_only_one_of_several_processes_speaks(waited: list[float]) -> None:
    assert [should_report(ValueError("no such file")) for _ in range(3)] == [True, False, False]
    assert waited == []


def test_cause_is_reported_first(waited: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    should_report(LostProcessError("the first no longer reaches the second"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    should_report(OSError("the second cannot read its images"))
    of_the_first, of_the_second = waited
    assert of_the_first > of_the_second > 0


def test_other_launcher_waits_for_the_cause(waited: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    word = os.environ[launch.ERROR_TOKEN]
    monkeypatch.delenv(launch.ERROR_TOKEN)
    assert should_report(LostProcessError("misses another"))
    assert waited == []
    monkeypatch.setenv("RANK", "1")
    assert should_report(ValueError("the same"))
    assert sum(waited) == 2 * launch.GRACE
    assert Path(word).exists()
