"""Images that a table lists with their labels: your own CSV or parquet file, or the text lists of a benchmark."""

import csv
import hashlib
import io
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from proxygml.data import ImageList
from proxygml.data.names import TOGETHER, Names
from proxygml.files import one_line

WHERE = "your own CSV or parquet file with the columns path, label and, where you want to choose, split"
LICENCE = "yours"
Class = TypeVar("Class", str, int)  # its name, or an id


def load(
    table: Path, *, root: Path | None = None, test_fraction: float = 0.5, seed: int = 0
) -> tuple[ImageList, ImageList]:
    """What to train on and what to test on, from a table with the columns path, label and optionally split.

    Paths are relative to `root`, which is the table's own folder unless given, and may not leave it. The column split
    says train or test in every row; the two may then share classes. Without it, `test_fraction` of the classes are for
    testing, chosen by `split_classes`. Labels follow the sorted class names in either list.
    """
    table = Path(table)
    if not table.is_file():
        raise FileNotFoundError(f"no table {table}: expected a CSV or parquet file, see docs/datasets.md")
    root = table.parent if root is None else Path(root)
    read_rows = _read_parquet if table.suffix.lower() in (".parquet", ".pq") else _read_csv
    paths, rows, hashes = Names(), array("q"), array("q")
    classes: list[str] = []
    known: dict[str, str] = {}  # of equal names only the first is kept
    for_testing: list[bool] = []
    file_name = table.name  # which pathlib finds anew at every call
    for row, path, label, split in read_rows(table):
        where = f"{file_name}, row {row}"
        if not path or not label:
            raise ValueError(f"{where}: expected a path and a label, got path {_shown(path)} and label {_shown(label)}")
        path = path_below(path, root, where)
        if split is not None:
            split = split.lower()
            if split not in ("train", "test"):
                raise ValueError(f"{where}: expected split train or test, got {_shown(split)}")
            for_testing.append(split == "test")
        paths.append(path)
        rows.append(row)
        hashes.append(hash(path))
        classes.append(known.setdefault(label, label))
    if not paths:
        raise ValueError(f"{table} lists no images: expected a row for each image below the names of the columns")
    _refuse_repeated(paths, rows, np.frombuffer(hashes, dtype=np.int64), table)
    if not for_testing:
        test_classes = split_classes(known, test_fraction=test_fraction, seed=seed)
        for_testing = [name in test_classes for name in classes]
    return divide(paths, classes, for_testing, root=root)


def _refuse_repeated(paths: Names, rows: Sequence[int], hashes: np.ndarray, table: Path) -> None:
    """An error where a path is listed twice: it would be its own nearest neighbor and make every score too good."""
    _, of_path, count = np.unique(hashes, return_inverse=True, return_counts=True)
    first_seen: dict[str, int] = {}  # path -> row
    for place in np.flatnonzero(count[of_path] > 1).tolist():
        first = first_seen.setdefault(paths[place], rows[place])
        if first != rows[place]:
            where = f"{table.name}, row {rows[place]}"
            raise ValueError(f"{where}: {_shown(paths[place])} already stands in row {first}, list every image once")


def divide(
    paths: Sequence[str],
    classes: Sequence[Class],
    for_testing: Sequence[bool],
    *,
    root: Path,
    class_names: Mapping[Class, str] | None = None,
) -> tuple[ImageList, ImageList]:
    """The images that are not `for_testing` and those that are, each as `image_list` makes it."""
    tests = sum(for_testing)
    if not 0 < tests < len(paths):
        raise ValueError(
            f"{root}: expected images to train on and images to test on, got {len(paths) - tests} and {tests}: "
            f"the list was cut short or names one side only"
        )
    paths = paths if isinstance(paths, Names) else Names(paths)
    train, test = (
        image_list(paths.take(side), [classes[i] for i in side.tolist()], root=root, class_names=class_names)
        for side in (np.flatnonzero(np.equal(for_testing, own)) for own in (False, True))
    )
    return train, test


def image_list(
    paths: Sequence[str],
    classes: Sequence[Class],
    *,
    root: Path | None,
    class_names: Mapping[Class, str] | None = None,
    pixels: np.ndarray | None = None,
) -> ImageList:
    """Image i is `paths[i]` of class `classes[i]`; labels 0..C-1 follow the sorted classes.

    `class_names` gives the name of every class where `classes` are ids; otherwise a class is its own name.
    """
    present = sorted(set(classes))
    label_of = {name: label for label, name in enumerate(present)}
    return ImageList(
        paths=paths,
        labels=np.fromiter((label_of[name] for name in classes), dtype=np.int64, count=len(classes)),  # (M,)
        class_names=tuple(str(name) if class_names is None else class_names[name] for name in present),
        root=root,
        pixels=pixels,
    )


def split_classes(names: Iterable[str], *, test_fraction: float, seed: int) -> set[str]:
    """The classes for testing: `test_fraction` of them, at least one, and at least one is left to train on.

    They are the first in the order of a hash of seed and name: the same on every machine and with every version of
    every library, and a class that is added later moves few of the others to the other side.
    """
    names = set(names)
    if not 0 < test_fraction < 1:
        raise ValueError(f"expected test_fraction between 0 and 1, got {test_fraction}: 0.5 tests on half the classes")
    if len(names) < 2:
        raise ValueError(f"expected at least 2 classes to divide into train and test, got {len(names)}")
    count = min(max(round(test_fraction * len(names)), 1), len(names) - 1)

    def place(name: str) -> bytes:
        return hashlib.sha256(f"{seed}/{name}".encode("utf-8", "surrogatepass")).digest()  # file names may be no text

    return set(sorted(names, key=place)[:count])


def path_below(path: str, root: Path, where: str) -> str:
    """`path` relative to `root`, refused if it leaves it; `where` says in the error which row it came from.

    It reads the text alone, without a look at the disk: a list of a million images has to load in seconds.
    """
    if not path.startswith(("/", "\\", "./")) and ".." not in path and ":" not in path:
        return path  # nearly every path: nothing in it can lead away
    folder = os.path.join(os.path.abspath(root), "")
    whole = os.path.abspath(os.path.join(folder, path))
    if ".." in re.split(r"[/\\]", path) or not whole.startswith(folder):
        raise ValueError(f"{where}: expected a path inside {root} without '..', got {_shown(path)}")
    return whole[len(folder) :]


def read_lines(path: Path, columns: Sequence[str], *, header: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every line of a space-separated list; the last column may hold spaces itself.

    Where the list begins with a header, it has to name the `columns`.
    """
    expected = " ".join(f"<{name}>" for name in columns)
    for number, line in enumerate(_lines(path), start=1):
        line = line.rstrip()
        fields = line.split(maxsplit=len(columns) - 1)
        if header and number == 1:
            if fields != list(columns):
                raise ValueError(f"{path}, line 1: expected the header {' '.join(columns)!r}, got {_shown(line)}")
        elif fields and len(fields) != len(columns):
            raise ValueError(f"{path}, line {number}: expected {expected}, got {_shown(line)}")
        elif fields:  # an empty line is none
            yield number, fields


def whole_number(text: str, where: str, *, low: int, high: int | None = None) -> int:
    """The number that `text` spells, which has to lie in low..high; `where` says in the error where it stands."""
    if re.fullmatch("[0-9]{1,18}", text) and low <= int(text) and (high is None or int(text) <= high):
        return int(text)
    span = f"{low}..{high}" if high is not None else f"of at least {low}"
    raise ValueError(f"{where}: expected a whole number {span}, got {_shown(text)}")


def _read_csv(table: Path) -> Iterator[tuple[int, str, str, str | None]]:
    """Line number, path, label and, where there is such a column, split of every row."""
    delimiter = "\t" if table.suffix.lower() == ".tsv" else ","
    rows = csv.reader(_lines(table), delimiter=delimiter, skipinitialspace=True)
    try:
        header = next(rows, [])
        column = _columns(table, header)
        for fields in rows:
            if not fields:
                continue  # an empty line, such as editors leave at the end
            if len(fields) != len(header):
                came = f"{len(fields)}: {one_line(fields[: len(header) + 2], max_length=200)}"
                raise ValueError(f"{table.name}, row {rows.line_num}: expected {len(header)} columns, got {came}")
            split = fields[column["split"]].strip() if "split" in column else None
            yield rows.line_num, fields[column["path"]], fields[column["label"]].strip(), split
    except csv.Error as error:
        raise ValueError(f"{table.name}, row {rows.line_num}: not valid CSV: {error}") from error


def _read_parquet(table: Path) -> Iterator[tuple[int, str, str, str | None]]:
    """Row number from 1, path, label and, where there is such a column, split of every row."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"reading {table} needs pyarrow: pip install pyarrow, or save the table as CSV") from error
    try:
        header = parquet.read_schema(table).names
        column = _columns(table, header)
        contents = parquet.read_table(table, columns=[header[place] for place in column.values()])
        row = 0
        for batch in contents.to_batches(max_chunksize=TOGETHER):  # texts only of some rows at a time
            values = {name: batch.column(header[place]).to_pylist() for name, place in column.items()}
            splits = map(str, values["split"]) if "split" in column else [None] * len(batch)
            for path, label, split in zip(values["path"], values["label"], splits, strict=True):
                row += 1
                missing = label is None or label != label  # NaN differs from itself
                yield row, path if isinstance(path, str) else "", "" if missing else str(label).strip(), split
    except Exception as error:  # on damaged bytes pyarrow raises whatever it stumbles over
        raise ValueError(f"cannot read {table} as a parquet file: {one_line(error)}") from error


def _columns(table: Path, header: Sequence[str]) -> dict[str, int]:
    """Where the columns path, label and, if there is one, split stand."""
    names = [name.strip().lower() for name in header]
    if any(names.count(name) != 1 for name in ("path", "label")) or names.count("split") > 1:
        came = one_line(list(header), max_length=200)
        raise ValueError(f"{table}: expected the columns path, label and optionally split, got {came}")
    return {name: names.index(name) for name in ("path", "label", "split") if name in names}


def _shown(text: str) -> str:
    """A text as it stands in a message, however long it is: a line may be a whole file."""
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}... ({len(text):,} characters)"


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file; only a line feed ends one, while `str.splitlines` knows ten other signs."""
    try:
        return io.StringIO(path.read_text(encoding="utf-8-sig"))  # Excel begins its UTF-8 with a mark that is no text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got other bytes at {error.start}: save it as UTF-8") from error
