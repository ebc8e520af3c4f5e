"""proxygml audit."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from proxygml.cli.cluster import check_outside, read_photos, report_missing
from proxygml.cli.display import show_next
from proxygml.cli.options import AS_TRAINED, SILENT, Hardware
from proxygml.display import Progress, counted, in_one_line, messages, output, show_progress

if TYPE_CHECKING:
    import numpy as np

    from proxygml.embeddings import Embeddings

MOST_SHOWN = 5  # confused pairs of classes, and split classes


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
        out: A new folder; with --apply, a new table, in a folder that contains the images.
        apply: An audit.csv whose accepted rows are applied.
        run: What embeds a folder of images: a trained run, or a pretrained backbone by its name (default:
            efficientnet-lite0).
        data: Folder of the images of an .npz with relative paths, or of the run's images, if they have moved.
        json: Print the numbers as JSON.
    """
    from proxygml.retrieval.contents import check_new
    from proxygml.tasks.audit import MIN_SIZE
    from proxygml.tasks.audit import audit as examine
    from proxygml.tasks.corrections import describe, write_corrected, write_findings

    if apply is None:
        check_new(out)
        check_outside(out, source)
    elif out.is_dir():
        raise ValueError(f"expected a table to write as --out, got the folder {out}: name {out / 'corrected.csv'}")
    elif out.exists():
        raise FileExistsError(f"{out} exists already: name a new table")
    with show_progress() as progress:
        items, files, splits = _read(source, hardware, run, data, progress)
    if apply is not None:
        report_missing(source, items, files)
        changed, left_out, unused = write_corrected(apply, out, items, files, splits)
        output.print(f"{out}: {counted(changed, 'label')} corrected, {counted(left_out, 'image')} left out")
        if unused:
            messages.print(f"no change for {counted(unused, 'accepted row')} of confused or split classes")
        if all(files):
            show_next((["train", "photos", "--dataset", "table", "--data", out], "with the corrected labels"))
        return
    found = examine(items)
    report_missing(source, items, files)
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
        counted(numbers["labels"], "likely label error")
        if several
        else "labels were not checked: that needs two classes"
    )
    output.print(
        f"{counted(len(items), 'image')}: {checked}\n"
        f"{counted(numbers['duplicates'], 'near-duplicate')} (similarity from {found.duplicate_similarity:.3f}), "
        f"{numbers['across_classes']:,} across classes"
        + (f", {numbers['across_train_and_test']:,} across train and test" if splits is not None else "")
        + f"\n{counted(numbers['outliers'], 'outlier')}, {counted(numbers['confused'], 'pair')} of confused classes, "
        f"{counted(numbers['split'], 'class')} split in two"
        + (f"; not checked: {counted(found.small, 'class')} of fewer than {MIN_SIZE} images" if found.small else "")
    )
    table = out / "audit.csv"
    confused = [
        f"  {in_one_line(first)} and {in_one_line(second)}: "
        f"{100 * fraction:.0f} % of the neighbors of both are of the other class"
        for first, second, fraction in found.confused
    ]
    split = [f"  {in_one_line(name)}: two groups (silhouette {silhouette:.2f})" for name, silhouette in found.split]
    for lines in (confused, split):
        for line in lines[:MOST_SHOWN]:
            output.print(line)
        if len(lines) > MOST_SHOWN:
            output.print(f"  and {len(lines) - MOST_SHOWN:,} more in {table}")
    if found.findings:
        folders = [os.path.abspath(file.parent) for file in files if file is not None]
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
    from proxygml.tasks.photos import image_files
    from proxygml.vectors import read_all, run_parts

    if kind_of(source, ("images", "embeddings", "index", "run")) != "run":
        return *read_photos(source, hardware, run=run, split="all", data=data, progress=progress), None
    parts = {
        name: read_all(index) for name, index in run_parts(hardware.load(source, data=data), progress=progress).items()
    }
    items = concatenate(list(parts.values()))
    splits = np.repeat(list(parts), [len(part) for part in parts.values()])
    return items, image_files(items.paths, [Path()]), splits
