"""The findings of an audit as a table, and the corrected table of the rows that a user accepts."""

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from proxygml.data.lists import open_text, quote
from proxygml.embeddings import Embeddings
from proxygml.files import atomic_write, new_folder
from proxygml.plots import draw_sheet
from proxygml.tasks.audit import Audit, Finding
from proxygml.tasks.cluster import most_central

COLUMNS = ("kind", "path", "label", "suggestion", "other", "other_label", "note", "score", "accept")
SHEET = 20, 7  # findings on the contact sheet, and images of the suggested class beside each
YES, NO = ("yes", "y", "x", "1", "true"), ("", "no", "n", "0", "false")


def describe(items: Embeddings, finding: Finding, splits: np.ndarray | None = None) -> str:
    """Whether a duplicate connects classes, or the images of splits (M,) such as train and test."""
    if finding.kind != "duplicate":
        return ""
    pair = [finding.row, finding.other]
    across = ["classes"] if len({*items.labels[pair].tolist()}) > 1 else []
    if splits is not None and len({*splits[pair].tolist()}) > 1:
        across.append("train and test")
    return f"across {' and '.join(across)}" if across else ""


def write_findings(
    folder: Path,
    items: Embeddings,
    audit: Audit,
    files: Sequence[Path | None],
    splits: np.ndarray | None = None,
) -> None:
    """Write audit.csv, with an empty column `accept`, and audit.png to a new folder."""
    names = [items.class_name(label) for label in items.labels.tolist()]
    lines: list[tuple[Any, ...]] = []
    for each in audit.findings:
        own, other = (items.paths[each.row], names[each.row]), (items.paths[each.other], names[each.other])
        note = describe(items, each, splits)
        lines.append((each.kind, *own, each.suggestion, *other, note, f"{each.score:.4f}", ""))
    for first, second, fraction in audit.confused:
        lines.append(("confused", "", first, "", "", second, "", f"{fraction:.4f}", ""))
    for name, silhouette in audit.split:
        lines.append(("split", "", name, "", "", "", "", f"{silhouette:.4f}", ""))
    shown = []
    rows_of = {items.class_name(label): np.flatnonzero(items.labels == label) for label in np.unique(items.labels)}
    for kind, count in (("label", SHEET[0]), ("duplicate", 5), ("outlier", 5)):
        for each in [finding for finding in audit.findings if finding.kind == kind][:count]:
            title = f"{names[each.row]}?\n{each.suggestion}" if kind == "label" else f"{kind}\n{names[each.row]}"
            beside = (
                most_central(items.vectors, rows_of[each.suggestion])[: SHEET[1]] if kind == "label" else [each.other]
            )
            shown.append((title, [files[each.row], *(files[row] for row in beside)]))
    with new_folder(folder) as draft:
        _write(draft / "audit.csv", [COLUMNS, *lines])
        draw_sheet(shown, draft / "audit.png")


def write_corrected(
    audit_csv: Path,
    out: Path,
    items: Embeddings,
    files: Sequence[Path | None],
    splits: np.ndarray | None = None,
) -> tuple[int, int, int]:
    """Write a table of the labeled items with the accepted rows of audit.csv.

    An accepted label becomes the suggestion; an accepted duplicate or outlier is left out. Returns the numbers of
    changed labels, of images left out, and of accepted rows of confused or split classes, which change nothing.
    """
    places = {str(path): row for row, path in enumerate(items.paths)}
    labels = [items.class_name(label) for label in items.labels.tolist()]
    changed, left_out, unused = set(), set(), 0
    for where, fields in _accepted(audit_csv):
        if fields["kind"] in ("confused", "split"):
            unused += 1
            continue
        row = places.get(fields["path"])
        if row is None:
            raise ValueError(f"{where}: there is no image {quote(fields['path'])}: name the source that was audited")
        if fields["kind"] == "label":
            if not fields["suggestion"].strip():
                raise ValueError(f"{where}: expected a suggestion to accept, got none")
            labels[row] = fields["suggestion"].strip()
            changed.add(row)
        else:
            left_out.add(row)
    root = out.absolute().parent
    table: list[tuple[str, ...]] = [("path", "label") if splits is None else ("path", "label", "split")]
    for row, (path, file) in enumerate(zip(items.paths.tolist(), files, strict=True)):
        if row in left_out or not labels[row]:
            continue
        if file is not None:
            path = os.path.relpath(file, root)
            if path.startswith(".."):
                raise ValueError(f"expected --out in a folder that contains the images, as {file.parent}, got {out}")
        table.append((path, labels[row], *([] if splits is None else [splits[row]])))
    _write(out, table)
    return len(changed - left_out), len(left_out), unused


def _accepted(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """ "FILE, row N" and the fields of every row whose column `accept` says yes."""
    delimiter = ";" if ";" in open_text(path).readline() else ","  # as Excel writes where 0.5 is 0,5
    reader = csv.DictReader(open_text(path), delimiter=delimiter)
    try:
        if missing := {"kind", "path", "suggestion", "accept"} - {*(reader.fieldnames or ())}:
            raise ValueError(f"{path}: expected the columns of audit.csv, got none named {sorted(missing)[0]}")
        for fields in reader:
            where, answer = f"{path.name}, row {reader.line_num}", (fields["accept"] or "").strip().lower()
            if answer not in YES + NO:
                raise ValueError(f"{where}: expected yes or nothing in the column accept, got {quote(answer)}")
            if answer in YES:
                yield where, {name: fields[name] or "" for name in ("kind", "path", "suggestion")}
    except csv.Error as error:
        raise ValueError(f"{path}: not valid CSV: {error}") from error


def _write(path: Path, lines: Sequence[Sequence[Any]]) -> None:
    with atomic_write(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
