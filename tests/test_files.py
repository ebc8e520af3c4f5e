"""Atomic files, checksums and folder locks."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from proxygml import files
from proxygml.files import (
    LOCK_NAME,
    UnwritableError,
    atomic_write,
    file_checksum,
    locked,
    remove_temporaries,
    require_unlocked,
    verify_checksum,
    with_checksum,
)

HOLDER = (  # prints when it has the lock, then waits
    "import sys; from pathlib import Path; from proxygml.files import locked\n"
    "with locked(Path(sys.argv[1])):\n"
    "    {}print('locked', flush=True); sys.stdin.read()\n"
)


def test_atomic_write_is_complete(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "deep" / "a.txt") as temporary:
        temporary.write_text("new")
        assert not (tmp_path / "deep" / "a.txt").exists()
    assert (tmp_path / "deep" / "a.txt").read_text() == "new"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_interrupted_write_keeps_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def write_half() -> None:
        with atomic_write(target) as temporary:
            temporary.write_text("ne")
            raise error

    with pytest.raises(error):
        write_half()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_atomic_write_respects_the_umask(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with atomic_write(tmp_path / "whole") as temporary:
        temporary.write_text("")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_renaming_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As is the file before it: otherwise the power may take the new file or its name."""
    synced = []

    def fsync(handle: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{handle}"), (tmp_path / "a").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_write(tmp_path / "a") as temporary:
        temporary.touch()
    assert synced == [(str(temporary), False), (str(tmp_path), True)]


def test_failed_write_names_the_file(tmp_path: Path) -> None:
    def fill() -> None:
        with atomic_write(tmp_path / "a.txt") as temporary, temporary.open("w"):
            raise OSError(errno.ENOSPC, "No space left on device")  # as a write does, without a name

    with pytest.raises(UnwritableError, match=rf"could not write {tmp_path}/a.txt: No space left on device"):
        fill()
    with (
        pytest.raises(UnwritableError, match=r"could not write .*/b.txt: No space"),
        atomic_write(tmp_path / "b.txt") as b,
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "from", None, str(b))  # as a copy does
    (tmp_path / "file").touch()
    with (
        pytest.raises(UnwritableError, match=r"could not write .*/file/a.txt: "),
        atomic_write(tmp_path / "file/a.txt"),
    ):
        pass


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"), atomic_write(tmp_path / "a.txt"):
        (tmp_path / "absent").read_text()


@pytest.mark.slow
def test_new_folder_is_complete_or_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "new"

    def interrupted() -> None:
        with files.new_folder(folder) as draft:
            (draft / "half").mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not folder.exists()
    folder.mkdir()
    (folder / ".hidden").touch()
    with files.new_folder(folder) as draft:
        (draft / "links").mkdir()
        (draft / "table.csv").touch()
    assert sorted(path.name for path in folder.iterdir()) == [".hidden", "links", "table.csv"]


def test_temporaries_of_killed_processes_are_removed(tmp_path: Path) -> None:
    process = (
        "import os, signal, sys; from pathlib import Path; from proxygml.files import atomic_write\n"
        "with atomic_write(Path(sys.argv[1])) as draft:\n"
        "    draft.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for name in ("last.pt", "last.pt", "model.safetensors"):
        subprocess.run([sys.executable, "-c", process, tmp_path / name])
    (tmp_path / "last.pt").touch()
    assert len(list(tmp_path.iterdir())) == 4
    with atomic_write(tmp_path / "last.pt") as in_use:
        remove_temporaries(tmp_path / "last.pt")
        assert in_use.exists()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[1:] == ["last.pt"]
    assert left[0].startswith(".model-")


def test_altered_values_are_detected() -> None:
    values = {"scores": {"recall@1": 0.1 + 0.2}, "epochs": (1, 2), "name": "ä"}
    text = json.dumps(with_checksum(values))
    assert verify_checksum(json.loads(text)) == json.loads(json.dumps(values))
    with pytest.raises(ValueError, match="it was altered; if you edited it on purpose, remove its checksum"):
        verify_checksum(json.loads(text.replace("0.30000000000000004", "0.31000000000000004")))
    assert verify_checksum({"older": 1}) == {"older": 1}


@pytest.mark.parametrize("size", [None, 0, 5, 2**20 + 7])
def test_file_checksum_is_crc32(tmp_path: Path, size: int | None) -> None:
    content = bytes(range(256)) * 8192
    (tmp_path / "a").write_bytes(content)
    assert file_checksum(tmp_path / "a", size) == zlib.crc32(content[:size])


def start_holder(folder: Path, first: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", HOLDER.format(first), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_lock_names_its_process_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_TIMEOUT", 0.0)
    holder = start_holder(tmp_path / "run")
    assert holder.stdout.readline() == "locked\n"
    message = rf"process {holder.pid} on \S+ is using {tmp_path / 'run'}: wait for it, or stop it"
    with pytest.raises(ValueError, match=message), locked(tmp_path / "run"):
        pass
    with pytest.raises(ValueError, match=message):
        require_unlocked(tmp_path / "run")
    holder.kill()
    holder.communicate()
    (tmp_path / "run" / LOCK_NAME).write_text(f"process {os.getpid()} on this machine")  # a live process: not the owner
    require_unlocked(tmp_path / "run")
    with locked(tmp_path / "run"), locked(tmp_path / "other"):
        pass


def test_fork_of_a_killed_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Such as DataLoader workers, which notice only after seconds that their parent is gone."""
    fork = "import os, time; child = os.fork()\n    if not child: time.sleep(600)\n    print(child, end=' ');"
    holder = start_holder(tmp_path, fork)
    child = int(holder.stdout.readline().split()[0])
    try:
        holder.kill()
        holder.wait()
        with locked(tmp_path):
            os.kill(child, 0)  # it is alive
    finally:
        os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_lock_waits_for_a_process_that_is_exiting(tmp_path: Path) -> None:
    held = threading.Event()

    def hold() -> None:
        with locked(tmp_path):
            held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with locked(tmp_path):
        thread.join()


@pytest.mark.parametrize("target", ["letter.txt", "new.txt"])
def test_lock_follows_no_link(target: str, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear Anna")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_NAME).symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match=r"run/.lock is a link: remove it"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "letter.txt").read_text() == "Dear Anna"
    assert not (tmp_path / "new.txt").exists()


def test_lock_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_NAME)
    with pytest.raises(ValueError, match="is a pipe or device: expected a file"), locked(tmp_path):
        pass


def test_file_systems_without_locks_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path), locked(tmp_path):
        pass
