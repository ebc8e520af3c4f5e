"""proxygml search."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table

from proxygml.cli.display import drawn_progress, in_one_line, messages, output
from proxygml.cli.index import Place, show_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxygml.retrieval import AnyIndex, Hit
    from proxygml.training.run import Run


def search(
    gallery: Place,
    image: tuple[Path, ...] = (),
    vectors: Path | None = None,
    count: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 10,
    run: Path | None = None,
    json: bool = False,
) -> None:
    """Find the items most like some images: `proxygml search RUN --image photo.jpg -n 10`.

    Args:
        gallery: What to search in: a run (its test images, which are embedded the first time), an .npz of embeddings,
            or an index, by its folder or its address postgresql://...
        image: Images to search for.
        vectors: Or an .npz of embeddings to search for, thousands of them.
        count: How many items to find for each.
        run: The run whose network embeds the images, where the gallery does not keep it.
        json: Print what is found as JSON.
    """
    from proxygml.embeddings import Embeddings
    from proxygml.model import embed_photos, open_gallery
    from proxygml.retrieval.validation import check_model

    if bool(image) == (vectors is not None):
        raise ValueError("expected something to search for: --image PHOTO ..., or --vectors QUERIES.npz")
    with drawn_progress() as progress:
        held, added = open_gallery(gallery, progress)
    show_problems(added)
    if vectors is None:
        names, model = [str(path) for path in image], _model(held, gallery, run)
        check_model(model.model_id, held.model, gallery)
        asked = embed_photos(model, image)
    else:
        queries = Embeddings.load(vectors)
        check_model(queries.model, held.model, gallery)
        names, asked = queries.paths.tolist(), queries.vectors
    found = held.search(asked, count)
    similar = held.metadata["unit_length"] == "1"
    if json:
        entries = [
            {
                "query": name,
                "hits": [
                    {**hit._asdict(), "similarity": hit.similarity if similar else None}  # a cosine or nothing
                    for hit in hits
                ],
            }
            for name, hits in zip(names, found, strict=True)
        ]
        output.print_json(data=entries, ensure_ascii=True)  # a terminal obeys nothing in it
    else:
        show_hits(names, found, similar=similar)
    gone = sorted(
        {hit.path for hits in found for hit in hits if os.path.isabs(hit.path) and not os.path.exists(hit.path)}
    )
    if gone:
        messages.print(f"{len(gone)} of the images found are gone, first {gone[0]}", highlight=False, markup=False)


def show_hits(queries: "Sequence[str]", found: "Sequence[Sequence[Hit]]", *, similar: bool) -> None:
    """A table for each query with what was found; with the cosine where vectors are of unit length."""
    for query, hits in zip(queries, found, strict=True):
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("similarity" if similar else "distance", justify="right")
        table.add_column("class", no_wrap=True)
        table.add_column(f"nearest to {in_one_line(query)}", no_wrap=True)
        for hit in hits:
            figure = hit.similarity if similar else hit.distance
            table.add_row(f"{figure:.4f}", in_one_line(hit.label), in_one_line(hit.path))
        output.print(table)


def _model(index: "AnyIndex", gallery: str, run: Path | None) -> "Run":
    """The run whose network embeds queries."""
    from proxygml.training.run import Run

    folder = run or index.model_folder()
    if folder is None:
        raise ValueError(f"{gallery} does not keep the network that made its vectors: name its run with --run RUN")
    return Run.open(folder)
