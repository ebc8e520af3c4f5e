"""Files that are written whole or not at all."""

import errno
import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from proxygml.files import UnwritableError, file_checksum, sealed, sweep, unsealed, written_whole


def test_the_file_appears_complete_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    with written_whole(tmp_path / "deep" / "a.txt") as temporary:
        temporary.write_text("new")
        assert not (tmp_path / "deep" / "a.txt").exists()
    assert (tmp_path / "deep" / "a.txt").read_text() == "new"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def write_half() -> None:
        with written_whole(target) as temporary:
            temporary.write_text("ne")
            raise error

    with pytest.raises(error):
        write_half()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with written_whole(tmp_path / "whole") as temporary:
        temporary.write_text("")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    def fill() -> None:
        with written_whole(tmp_path / "a.txt") as temporary, temporary.open("w"):
            raise OSError(errno.ENOSPC, "No space left on device")  # as a write does, without a name

    with pytest.raises(UnwritableError, match=rf"could not write {tmp_path}/a.txt: No space left on device"):
        fill()
    with (
        pytest.raises(UnwritableError, match=r"could not write .*/b.txt: No space"),
        written_whole(tmp_path / "b.txt") as b,
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "from", None, str(b))  # as a copy does
    (tmp_path / "file").touch()
    with (
        pytest.raises(UnwritableError, match=r"could not write .*/file/a.txt: "),
        written_whole(tmp_path / "file/a.txt"),
    ):
        pass


def test_an_error_about_something_else_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"), written_whole(tmp_path / "a.txt"):
        (tmp_path / "absent").read_text()


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    process = (
        "import os, signal, sys; from pathlib import Path; from proxygml.files import written_whole\n"
        "with written_whole(Path(sys.argv[1])) as draft:\n"
        "    draft.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for name in ("last.pt", "last.pt", "best.pt"):
        subprocess.run([sys.executable, "-c", process, tmp_path / name])
    (tmp_path / "last.pt").touch()
    assert len(list(tmp_path.iterdir())) == 4
    sweep(tmp_path / "last.pt")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[1:] == ["last.pt"]
    assert left[0].startswith(".best-")


def test_values_that_were_altered_are_noticed_through_json() -> None:
    values = {"scores": {"recall@1": 0.1 + 0.2}, "epochs": (1, 2), "name": "ä"}
    text = json.dumps(sealed(values))
    assert unsealed(json.loads(text)) == json.loads(json.dumps(values))
    with pytest.raises(ValueError, match="it was altered; whoever did so on purpose takes out its checksum"):
        unsealed(json.loads(text.replace("0.30000000000000004", "0.31000000000000004")))
    assert unsealed({"older": 1}) == {"older": 1}


@pytest.mark.parametrize("size", [None, 0, 5, 2**20 + 7])
def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path, size: int | None) -> None:
    content = bytes(range(256)) * 8192
    (tmp_path / "a").write_bytes(content)
    assert file_checksum(tmp_path / "a", size) == zlib.crc32(content[:size])
