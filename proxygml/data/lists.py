"""Read the text lists that datasets come with; an error names the file and the line."""

import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from proxygml.files import require_file


def dataset_folder(root: Path, name: str, files: Sequence[str]) -> Path:
    """The folder with the files of a dataset: `root` or root/name."""
    folder = next((folder for folder in (root, root / name) if (folder / files[0]).is_file()), root)
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"no {file} in {folder}: unpack {name} there, see docs/datasets.md")
    return folder


def read_lines(path: Path, columns: Sequence[str], *, header: bool = False) -> Iterator[tuple[str, list[str]]]:
    """ "FILE, line N" and the fields of every line of a space-separated list; the last column may contain spaces.

    With `header`, the first line must name the columns.
    """
    file = str(path)
    for number, line in enumerate(open_text(path), start=1):
        line = line.rstrip()
        fields = line.split(maxsplit=len(columns) - 1)
        where = f"{file}, line {number}"
        if header and number == 1:
            if fields != list(columns):
                raise ValueError(f"{where}: expected the header {' '.join(columns)!r}, got {quote(line)}")
        elif fields and len(fields) != len(columns):
            raise ValueError(f"{where}: expected {' '.join(f'<{name}>' for name in columns)}, got {quote(line)}")
        elif fields:  # skip empty lines
            yield where, fields


def read_by_id(path: Path, columns: tuple[str, str], *, high: int | None = None) -> dict[int, tuple[str, str]]:
    """id -> ("FILE, line N", value) from a list with the columns id and value."""
    values: dict[int, tuple[str, str]] = {}
    for where, (text, value) in read_lines(path, columns):
        number = whole_number(text, where, high=high)
        if number in values:
            raise ValueError(f"{where}: expected every {columns[0].replace('_', ' ')} once, got {number} again")
        values[number] = where, value
    return values


def whole_number(text: str, where: str, *, high: int | None = None) -> int:
    """The number in a text, which must be at least 1 and at most `high`."""
    if re.fullmatch("[0-9]{1,18}", text) and int(text) >= 1 and (high is None or int(text) <= high):
        return int(text)
    span = f"1..{high}" if high is not None else "of at least 1"
    raise ValueError(f"{where}: expected a whole number {span}, got {quote(text)}")


def path_below(path: str, root: Path, where: str) -> str:
    """`path` relative to `root`; an error if it leaves `root`.

    Only the text is checked, not the disk, so that a list of a million images loads in seconds.
    """
    if not path.startswith(("/", "\\", "./")) and ".." not in path and ":" not in path:
        return path  # almost every path
    folder = os.path.join(os.path.abspath(root), "")
    absolute = os.path.abspath(os.path.join(folder, path))
    if ".." in re.split(r"[/\\]", path) or not absolute.startswith(folder):
        raise ValueError(f"{where}: expected a path inside {root} without '..', got {quote(path)}")
    return absolute[len(folder) :]


def open_text(path: Path) -> io.StringIO:
    """A UTF-8 text file; only "\\n" ends a line, unlike in `str.splitlines`."""
    try:
        return io.StringIO(require_file(path).read_text(encoding="utf-8-sig"))  # Excel writes a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got other bytes at {error.start}: save it as UTF-8") from error


def quote(text: str) -> str:
    """A text for an error message, at most 100 characters of it: a damaged file may be one long line."""
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}... ({len(text):,} characters)"
