"""Of several processes that end, one says why."""

import os
import re
import signal
import subprocess
import sys
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


BLOCKED = """
import os, signal, sys, time
from proxygml.distributed import launch
launch.UNNOTICED = 0.1
if "LOCAL_RANK" in os.environ:
    launch.watch_first_process()
else:
    launch.start_copies(3)
if os.environ["LOCAL_RANK"] == sys.argv[1]:
    time.sleep(1)  # until the others have started
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)  # as NCCL waits
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "code", "message"),
    [("1", 1, "process 1 of 3 was killed by signal 9"), ("0", -signal.SIGKILL, "process 0 has ended")],
)
def test_lost_process_ends_the_others(lost: str, code: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "blocked.py").write_text(BLOCKED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "blocked.py"), lost]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, timeout=100)
    assert done.returncode == code
    assert re.findall("error: .*", done.stderr) == [f"error: {message}. Continue with --resume"]
