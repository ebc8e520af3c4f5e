"""Files that are written whole or not at all."""

from pathlib import Path

import pytest

from proxygml.files import written_whole


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
