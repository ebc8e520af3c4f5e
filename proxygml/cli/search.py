"""proxygml search."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from proxygml.cli.options import AS_TRAINED, SILENT, Hardware
from proxygml.display import counted, in_one_line, messages, output, show_progress, show_table
from proxygml.training.recipe import Split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxygml.embeddings import Embeddings
    from proxygml.retrieval import Hit, Index


def search(
    index: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|NPZ|INDEX")],
    hardware: Hardware = AS_TRAINED,
    image: tuple[Path, ...] = (),
    vectors: Path | None = None,
    count: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 10,
    expand: Annotated[int | None, SILENT] = None,
    augment: Annotated[int | None, SILENT] = None,
    rerank: Annotated[int | None, SILENT] = None,
    run: Path | None = None,
    space: Path | None = None,
    split: Split = "all",
    data: Path | None = None,
    json: bool = False,
) -> None:
    """Find the items most similar to some images: `proxygml search RUN --image photo.jpg -n 10`.

    Args:
        index: Where to search: a run (its images, which are embedded the first time), an .npz of embeddings, or an
            index, by its folder or its address postgresql://...
        hardware: What embeds images.
        image: Images to search for, or folders of images.
        vectors: Or an .npz of embeddings to search for, thousands of them.
        count: How many items to find for each.
        expand: Search for the mean of an image and so many of its nearest items (docs/search.md).
        augment: Compare with the mean of each item and so many of its nearest.
        rerank: Order so many of the nearest items by the neighbors that they share with the image.
        run: What embeds the images, if the index does not contain its network: a run, or a pretrained backbone by its
            name.
        space: The fitted space of the index, which is applied to what you search for (docs/features.md).
        split: Search only in the training or test images of a run.
        data: Folder of the run's images, if they have moved.
        json: Print the hits as JSON.
    """
    check_queries(image, vectors, "search for")

    from proxygml.embeddings import Embeddings
    from proxygml.model import kind_of
    from proxygml.retrieval import Index
    from proxygml.vectors import open_vectors

    with show_progress() as progress:
        source = open_vectors(index, split=split, data=data, load=hardware.load, progress=progress)
    opened = Index.from_embeddings(source) if isinstance(source, Embeddings) else source
    queries = read_queries(index, opened, hardware, image=image, vectors=vectors, run=run, space=space)
    results = opened.search(queries.vectors, count, expand=expand, augment=augment, rerank=rerank)
    if json:
        entries = [
            {"query": name, "hits": [hit._asdict() for hit in hits]}
            for name, hits in zip(queries.paths.tolist(), results, strict=True)
        ]
        output.print_json(data=entries, ensure_ascii=True)  # no control characters for a terminal
    else:
        show_hits(queries.paths.tolist(), results)
    paths = {hit.path for hits in results for hit in hits}
    missing = sorted(path for path in paths if os.path.isabs(path) and not os.path.exists(path))
    if missing:
        remedy = "name their folder with --data" if kind_of(index) == "run" else "use `proxygml index relocate`"
        remedy = f"if they have moved, {remedy}"
        messages.print(f"missing: {counted(len(missing), 'image')}, first {missing[0]}: {remedy}")


def check_queries(images: "Sequence[Path]", vectors: Path | None, purpose: str) -> None:
    """An error unless there are either images or vectors, for a purpose such as "search for"."""
    if bool(images) == (vectors is not None):
        raise ValueError(f"expected something to {purpose}: --image PHOTO ..., or --vectors QUERIES.npz")


def read_queries(
    location: str,
    index: "Index",
    hardware: Hardware,
    *,
    image: "Sequence[Path]",
    vectors: Path | None,
    run: Path | None,
    space: Path | None,
) -> "Embeddings":
    """The vectors of images, embedded by the model of the index at a location, or those of an .npz."""
    import numpy as np

    from proxygml.embeddings import Embeddings
    from proxygml.retrieval.validation import check_model
    from proxygml.vectors import query_model, transform

    if vectors is None:
        model = query_model(location, index, run=run, load=hardware.load)
        if model is None:
            raise ValueError(f"{location} does not contain the network of its vectors: name its run with --run RUN")
        paths = [path for each in image for path in _images_at(each)]
        names = np.array([str(path) for path in paths])
        queries = Embeddings(model.encode(paths), np.full(len(paths), -1), names, model=model.model_id)
    else:
        queries = Embeddings.load(vectors)
    if space is not None:
        queries = transform(space, queries)
    check_model(queries.model, index.model, location)
    return queries


def _images_at(path: Path) -> "list[Path]":
    """The path itself, or the readable images below a folder; the others are named."""
    from proxygml.data.folder import images_below
    from proxygml.data.readable import describe_skipped, readable_images

    if not path.is_dir():
        return [path]
    images = images_below(path)
    readable = readable_images(images, skip_broken=True)
    if skipped := describe_skipped(images, readable):
        messages.print(f"skipped {skipped}")
    return [path / each for each in readable.paths]


def show_hits(queries: "Sequence[str]", results: "Sequence[Sequence[Hit]]") -> None:
    """Print a table for each query."""
    for query, hits in zip(queries, results, strict=True):
        cells = {
            "distance": [f"{hit.distance:.3f}" for hit in hits],
            "similarity": [f"{hit.similarity:.4f}" for hit in hits],
            "class": [in_one_line(hit.label) for hit in hits],
            f"nearest to {in_one_line(query)}": [in_one_line(hit.path) for hit in hits],
        }
        if not any(cells["class"]):
            del cells["class"]
        show_table(list(cells), zip(*cells.values(), strict=True), left=(2, 3))
