"""Images listed in your own CSV or parquet file with the columns path, label and optionally split."""

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from proxygml.data import ImageList
from proxygml.data.lists import open_text, path_below, quote
from proxygml.data.splits import split_by_class, split_images
from proxygml.files import MAX_EXPANSION, MAX_UNPACKED, one_line

BATCH = 128  # rows of a parquet file: a small file may repeat a very long text in each
Row = tuple[int, str, str, str | None]  # row number, path, label and, if there is such a column, split


def load(table: Path, *, root: Path | None = None, test_fraction: float = 0.5) -> tuple[ImageList, ImageList]:
    """Training and test images from a table.

    Paths are relative to `root`, by default the folder of the table, and must stay inside it. The column split is
    train or test in every row; both splits may then have images of the same class. Without this column,
    `split_classes` selects `test_fraction` of the classes for testing. Labels follow the sorted class names.
    """
    table = Path(table)
    if not table.is_file():
        raise FileNotFoundError(f"no table {table}: expected a CSV or parquet file, see docs/datasets.md")
    root = table.parent if root is None else Path(root)
    read_rows = _read_parquet if table.suffix.lower() in (".parquet", ".pq") else _read_csv
    paths, classes = [], []
    seen: set[str] = set()
    is_test: list[bool] = []
    file_name = table.name  # computed once: pathlib parses it at every access
    for row, path, label, split in read_rows(table):
        where = f"{file_name}, row {row}"
        if not path or not label:
            raise ValueError(f"{where}: expected a path and a label, got path {quote(path)} and label {quote(label)}")
        path = path_below(path, root, where)
        if split is not None:
            split = split.lower()
            if split not in ("train", "test"):
                raise ValueError(f"{where}: expected split train or test, got {quote(split)}")
            is_test.append(split == "test")
        if path in seen:  # it would be its own nearest neighbor and raise every score
            raise ValueError(f"{where}: {quote(path)} is in an earlier row too, list every image once")
        seen.add(path)
        paths.append(path)
        classes.append(sys.intern(label))  # one object per class saves memory
    if not paths:
        raise ValueError(f"{table} lists no images: expected a header and a row for each image")
    if not is_test:
        return split_by_class(paths, classes, test_fraction, root=root)
    return split_images(paths, classes, is_test, root=root, no_test=test_fraction == 0)


def _read_csv(table: Path) -> Iterator[Row]:
    delimiter = "\t" if table.suffix.lower() == ".tsv" else ","
    rows = csv.reader(open_text(table), delimiter=delimiter, skipinitialspace=True)
    try:
        header = next(rows, [])
        column = _columns(table, header)
        for fields in rows:
            if not fields:
                continue  # an empty line
            if len(fields) != len(header):
                got = f"{len(fields)}: {one_line(fields[: len(header) + 2], max_length=200)}"
                raise ValueError(f"{table.name}, row {rows.line_num}: expected {len(header)} columns, got {got}")
            split = fields[column["split"]].strip() if "split" in column else None
            yield rows.line_num, fields[column["path"]], fields[column["label"]].strip(), split
    except csv.Error as error:
        raise ValueError(f"{table.name}, row {rows.line_num}: not valid CSV: {error}") from error


def _read_parquet(table: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"reading {table} needs pyarrow: pip install pyarrow, or save the table as CSV") from error
    try:
        contents = parquet.ParquetFile(table)
        schema, metadata = contents.schema_arrow, contents.metadata
        column = _columns(table, schema.names)
        names = [schema.names[place] for place in column.values()]
        if nested := [name for name in names if schema.field(name).type.num_fields]:
            raise ValueError(f"expected texts or numbers in {nested[0]}, got {schema.field(nested[0]).type}")
        row, limit = 0, max(MAX_UNPACKED, MAX_EXPANSION * table.stat().st_size)
        unpacked = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        if unpacked > limit:
            raise ValueError(f"it unpacks to {unpacked:,} bytes: it is not opened")
        for batch in contents.iter_batches(BATCH, columns=names):
            values = {name: batch.column(schema.names[place]).to_pylist() for name, place in column.items()}
            splits = map(str, values["split"]) if "split" in column else [None] * len(batch)
            for path, label, split in zip(values["path"], values["label"], splits, strict=True):
                row += 1
                missing = label is None or label != label  # NaN differs from itself
                yield row, path if isinstance(path, str) else "", "" if missing else str(label).strip(), split
    except Exception as error:  # damaged bytes make pyarrow raise any error
        raise ValueError(f"cannot read {table} as a parquet file: {one_line(error)}") from error


def _columns(table: Path, header: Sequence[str]) -> dict[str, int]:
    """Indices of the columns path, label and, if there is one, split."""
    names = [name.strip().lower() for name in header]
    if any(names.count(name) != 1 for name in ("path", "label")) or names.count("split") > 1:
        got = one_line(list(header), max_length=200)
        raise ValueError(f"{table}: expected the columns path, label and optionally split, got {got}")
    return {name: names.index(name) for name in ("path", "label", "split") if name in names}
