"""proxygml audit."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from proxygml.cli.cluster import check_outside, find_files, read_photos
from proxygml.cli.display import show_next
from proxygml.cli.options import AS_TRAINED, SILENT, Hardware
from proxygml.display import Progress, in_one_line, output, show_progress

if TYPE_CHECKING:
    import numpy as np

    from proxygml.embeddings import Embeddings

MOST_SHOWN = 5  # pairs of classes, and classes


def audit(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES|NPZ|INDEX|RUN")],
    hardware: Hardware = AS_TRAINED,
    *,
    out: Path,
    apply: Path | None = None,
    run: Annotated[Path | None, SILENT] = None,
    data: Path | None = None,
    json: bool = False,
) -> None:
    """Find wrong labels, near-duplicates, outliers, and classes that are confused or split in two.

    `proxygml audit PHOTOS --out audit` writes audit/audit.csv and a contact sheet. Write yes into the column accept of
    the rows that you agree with; then `proxygml audit PHOTOS --apply audit/audit.csv --out PHOTOS/corrected.csv` writes
    a table to train on.

    Args:
        source: A folder of images with one folder per class, an .npz of embeddings, an index, or a run (all images).
        hardware: What embeds images.
        out: A new folder; with --apply, the table to write, in a folder that contains the images.
        apply: An audit.csv whose accepted rows are applied.
        run: What embeds a folder of images: a trained run, or a pretrained backbone by its name (default:
            efficientnet-lite0).
        data: Folder of the images of an .npz with relative paths, or of the run's images, if they have moved.
        json: Print the numbers as JSON.
    """
    from proxygml.retrieval.contents import check_new
    from proxygml.tasks.audit import audit as examine
    from proxygml.tasks.corrections import describe, write_corrected, write_findings

    if apply is None:
        check_new(out)
        check_outside(out, source)
    elif out.is_dir():
        raise ValueError(f"expected a table to write as --out, got the folder {out}: name {out / 'corrected.csv'}")
    with show_progress() as progress:
        items, files, splits = _read(source, hardware, run, data, progress)
    if apply is not None:
        changed, left_out = write_corrected(apply, out, items, files, splits)
        output.print(f"{out}: {changed:,} labels corrected, {left_out:,} images left out")
        if all(files):
            show_next((["train", "photos", "--dataset", "table", "--data", out], "with the corrected labels"))
        return
    found = examine(items)
    write_findings(out, items, found, files, splits)
    notes = [describe(items, finding, splits) for finding in found.findings]
    numbers = {
        "images": len(items),
        "labels": found.count("label"),
        "duplicates": found.count("duplicate"),
        "across_classes": sum("classes" in note for note in notes),
        "across_train_and_test": sum("train and test" in note for note in notes),
        "outliers": found.count("outlier"),
        "confused": len(found.confused),
        "split": len(found.split),
    }
    if json:
        output.print_json(data=numbers)
        return
    several = len({*items.labels.tolist()} - {-1}) > 1
    checked = (
        f"{numbers['labels']:,} labels look wrong" if several else "labels were not checked: that needs two classes"
    )
    output.print(
        f"{len(items):,} images: {checked}\n"
        f"{numbers['duplicates']:,} near-duplicates (similarity from {found.duplicate_similarity:.3f}), "
        f"{numbers['across_classes']:,} across classes"
        + (f", {numbers['across_train_and_test']:,} across train and test" if splits is not None else "")
        + f"\n{numbers['outliers']:,} outliers, {numbers['confused']:,} pairs of confused classes, "
        f"{numbers['split']:,} classes split in two"
    )
    for first, second, fraction in found.confused[:MOST_SHOWN]:
        names = f"{in_one_line(first)} and {in_one_line(second)}"
        output.print(f"  {names}: {100 * fraction:.0f} % of their neighbors are of the other one")
    for name, silhouette in found.split[:MOST_SHOWN]:
        output.print(f"  {in_one_line(name)}: two groups (silhouette {silhouette:.2f})")
    if found.findings:
        table, folders = out / "audit.csv", [os.path.abspath(file.parent) for file in files if file is not None]
        corrected = Path(os.path.commonpath(folders) if folders else "", "corrected.csv")
        accepted = f"after you have written yes into the column accept of {table}"
        given = [word for option, value in (("--run", run), ("--data", data)) if value for word in (option, value)]
        show_next((["audit", source, *given, "--apply", table, "--out", corrected], accepted))


def _read(
    source: str, hardware: Hardware, run: Path | None, data: Path | None, progress: Progress
) -> "tuple[Embeddings, list[Path | None], np.ndarray | None]":
    """Embeddings, their files, and of a run the split of each image."""
    import numpy as np

    from proxygml.embeddings import concatenate
    from proxygml.model import kind_of
    from proxygml.vectors import read_all, run_parts

    if kind_of(source, ("images", "embeddings", "index", "run")) != "run":
        return *read_photos(source, hardware, run=run, split="all", data=data, progress=progress), None
    parts = {
        name: read_all(index) for name, index in run_parts(hardware.load(source, data=data), progress=progress).items()
    }
    items = concatenate(list(parts.values()))
    splits = np.repeat(list(parts), [len(part) for part in parts.values()])
    return items, find_files(source, items.paths, [Path()], progress), splits
