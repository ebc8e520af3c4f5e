"""proxygml cluster."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from proxygml.cli.display import show_next
from proxygml.cli.embeddings import PRETRAINED, embed_images
from proxygml.cli.options import AS_TRAINED, SILENT, Hardware
from proxygml.display import Progress, counted, counter, messages, output, show_progress
from proxygml.training.recipe import Split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxygml.embeddings import Embeddings


def cluster(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES|NPZ|INDEX|RUN")],
    hardware: Hardware = AS_TRAINED,
    *,
    out: Path,
    clusters: int | None = None,
    min_size: int = 5,
    run: Annotated[Path | None, SILENT] = None,
    split: Split = "test",
    data: Path | None = None,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Sort images into clusters: folders of links, a table to edit and train on, and a contact sheet.

    `proxygml cluster PHOTOS --out sorted` needs no labels, and copies or moves no photo.

    Args:
        source: A folder of images, an .npz of embeddings, an index, or a run.
        hardware: What embeds images.
        out: A new folder.
        clusters: How many clusters k-means makes (default: HDBSCAN finds dense groups, and leaves out the rest).
        min_size: Without --clusters: fewest images of a cluster.
        run: What embeds a folder of images: a trained run, or a pretrained backbone by its name (default:
            efficientnet-lite0).
        split: The images of a run.
        data: Folder of the images of an .npz with relative paths, or of the run's images, if they have moved.
        seed: Of k-means.
        json: Print the numbers as JSON.
    """
    import numpy as np

    from proxygml.retrieval.contents import check_new
    from proxygml.tasks.cluster import agreement, find_clusters, write_clusters

    check_new(out)
    check_outside(out, source)
    with show_progress() as progress:
        items, files = read_photos(source, hardware, run=run, split=split, data=data, progress=progress)
        found = find_clusters(
            items.vectors, clusters, min_size=min_size, seed=seed, progress=counter(progress, "clustering")
        )
    if found.max() < 0:
        raise ValueError(f"no {min_size} images are closer to each other than to the rest: try --clusters K")
    report_missing(source, items, files)
    write_clusters(out, items, found, files)
    left_out = int((found < 0).sum())
    numbers: dict[str, float] = {"images": len(items), "clusters": int(found.max()) + 1, "unclustered": left_out}
    labeled = items.labels >= 0
    if len(np.unique(items.labels[labeled])) > 1:
        numbers |= agreement(items.labels[labeled], found[labeled])
    if json:
        output.print_json(data=numbers)
        return
    output.print(
        f"{counted(len(items), 'image')} in {counted(int(found.max()) + 1, 'cluster')}, {left_out:,} in none: {out}"
    )
    if "nmi" in numbers:
        scores = {"NMI": "nmi", "AMI": "ami", "B-cubed F1": "b_cubed"}
        shown = ", ".join(f"{name} {100 * numbers[key]:.1f} %" for name, key in scores.items())
        output.print(f"agreement with the labels: {shown}")
    table = out / "clusters.csv"
    if all(files):
        show_next((["train", "photos", "--dataset", "table", "--data", table], "after you have edited its labels"))


def check_outside(out: Path, source: str) -> None:
    """An error if `out` is in the folder of images `source`: its links and pictures would count as images."""
    if Path(source).is_dir() and out.resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(f"expected --out outside {source}, got {out}: what it contains would count as images")


def read_photos(
    source: str, hardware: Hardware, *, run: Path | None, split: Split, data: Path | None, progress: Progress
) -> "tuple[Embeddings, list[Path | None]]":
    """The embeddings at a path, or of the images in a folder, and the files of the images where there are any."""
    from proxygml.model import kind_of
    from proxygml.tasks.photos import image_files
    from proxygml.vectors import open_vectors, read_all

    kind = kind_of(source, ("images", "embeddings", "index", "run"))
    if kind == "images":
        from proxygml.data.folder import images_below

        images = images_below(Path(source))
        items = embed_images(hardware.load(run or PRETRAINED), [images], skip_broken=True, progress=progress)
        return items, image_files(items.paths, [Path(source)])
    if run is not None:
        raise ValueError(f"--run embeds a folder of images, and {source} has vectors already: leave it out")
    items = read_all(open_vectors(source, split=split, data=data, load=hardware.load, progress=progress))
    roots = [data] if data is not None else [Path(), Path(source).parent] if kind == "embeddings" else [Path()]
    return items, image_files(items.paths, roots)


def report_missing(source: str, items: "Embeddings", files: "Sequence[Path | None]") -> None:
    """Say which images at a path have no file."""
    from proxygml.model import kind_of

    missing = [str(path) for path, file in zip(items.paths, files, strict=True) if file is None]
    if missing == [str(row) for row in range(len(items))]:  # as an .npz without paths is read
        messages.print(f"no paths in {source}: no links or pictures are made")
    elif missing:
        kind, remedy = kind_of(source), "name their folder with --data"
        if kind != "run" and os.path.isabs(missing[0]):
            remedy = f"if they have moved, {'use `proxygml index relocate`' if kind == 'index' else 'embed them again'}"
        messages.print(f"missing: {len(missing):,} of {counted(len(items), 'image')}, first {missing[0]}: {remedy}")
