"""One process at a time in a folder, also after one that was killed."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from proxygml import locks
from proxygml.locks import locked, refuse_locked

HOLDER = (  # a process that says so when it is in the folder, and stays there
    "import sys; from pathlib import Path; from proxygml.locks import locked\n"
    "with locked(Path(sys.argv[1])):\n"
    "    {}print('in', flush=True); sys.stdin.read()\n"
)


def holder(folder: Path, first: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", HOLDER.format(first), str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "in\n"
    return process


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a process that may be going."""
    monkeypatch.setattr(locks, "PATIENCE", 0.0)


def test_a_second_process_is_refused_with_the_number_of_the_first(tmp_path: Path, hurried: None) -> None:
    first = holder(tmp_path / "run")
    refusal = rf"process {first.pid} on \S+ is at work in {tmp_path / 'run'}: wait for it, or stop it"
    with pytest.raises(ValueError, match=refusal), locked(tmp_path / "run"):
        pass
    with pytest.raises(ValueError, match=refusal):
        refuse_locked(tmp_path / "run")
    first.communicate("")
    with locked(tmp_path / "run"), locked(tmp_path / "elsewhere"):
        pass


def test_the_lock_of_a_killed_process_is_void_whoever_has_its_number_now(tmp_path: Path, hurried: None) -> None:
    first = holder(tmp_path)
    first.kill()
    first.communicate()
    assert f"process {first.pid} on" in (tmp_path / locks.NAME).read_text()
    (tmp_path / locks.NAME).write_text(f"process {os.getpid()} on this machine")  # a process that lives
    refuse_locked(tmp_path)
    with locked(tmp_path):
        pass


def test_what_a_killed_process_has_forked_does_not_hold_its_lock(tmp_path: Path) -> None:
    """As torch's loading processes, which notice only after seconds that their parent is gone."""
    fork = "import os, time; child = os.fork()\n    if not child: time.sleep(600)\n    print(child, end=' ');"
    command = [sys.executable, "-c", HOLDER.format(fork), str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child, _ = process.stdout.readline().split()
    try:
        process.kill()
        process.wait()
        with locked(tmp_path):
            os.kill(int(child), 0)  # it lives
    finally:
        os.kill(int(child), signal.SIGKILL)
        process.communicate()


def test_it_waits_for_a_process_that_is_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as first:
        first.enter_context(locked(tmp_path))
        monkeypatch.setattr(locks, "PATIENCE", 1e9)
        monkeypatch.setattr(locks.time, "sleep", lambda _: first.close())
        with locked(tmp_path):
            pass


def test_where_the_file_system_has_no_locks_everybody_is_let_in(tmp_path: Path, monkeypatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", unknown)
    with locked(tmp_path), locked(tmp_path):
        pass
