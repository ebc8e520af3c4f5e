"""proxygml index."""

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro

from proxygml.cli.display import drawn_progress, in_one_line, messages, output
from proxygml.cli.stopping import told_to_go_on

if TYPE_CHECKING:
    from proxygml.data import ImageList
    from proxygml.embeddings import Embeddings
    from proxygml.model import Added
    from proxygml.retrieval import AnyIndex
    from proxygml.training.run import Progress, Run

MOST_LINES = 20  # of images that cannot be read

Place = Annotated[str, tyro.conf.Positional]


def build(
    gallery: Annotated[str | None, tyro.conf.Positional] = None,
    *,
    out: str,
    run: Path | None = None,
    dataset: str | None = None,
    data: Path | None = None,
    split: Literal["test", "train"] = "test",
    kind: Literal["exact", "hnsw", "ivf-pq"] | None = None,
) -> None:
    """Make an index of a gallery; after Ctrl-C, a kill or a full disk the same command goes on.

    Args:
        gallery: An .npz of embeddings, a folder of images (however deep; a class is a folder), or another index.
        out: A new folder, or postgresql://USER@HOST/DATABASE?index=NAME.
        run: The run whose network embeds images; a copy of it is kept in the index, to embed queries.
        dataset: A dataset, instead of a gallery.
        data: Folder of that dataset.
        split: Which half of that dataset.
        kind: How to search [default: by the number of vectors, see docs/search.md].
    """
    from proxygml.embeddings import Embeddings
    from proxygml.retrieval import create_index, is_url, open_index
    from proxygml.retrieval.folder import build_lock
    from proxygml.retrieval.validation import checked_blocks
    from proxygml.training.run import Run

    trained = None if run is None else Run.open(run)
    source = _source(gallery, trained, dataset, data, split)
    name = f"{dataset} {data or ''} {split}" if gallery is None else _absolute(gallery)
    count, width, model_id = _measures(source, trained)
    if not count:
        raise ValueError(f"expected vectors to search in, but {gallery} holds none")
    if width < 1:  # before there is a folder
        raise ValueError(f"expected vectors of 1 dimension or more, got {width}")
    if isinstance(source, Embeddings):  # before anything is written
        for _ in checked_blocks(source, width, gallery):
            pass
    alone = nullcontext() if is_url(out) else build_lock(Path(out))
    with told_to_go_on(lambda: "the same command goes on"), alone:
        try:
            index = open_index(out)
        except FileNotFoundError:
            index = create_index(out, dim=width, model=model_id, kind=kind, expected_size=count)
        if not len(index):
            index.set_metadata("source", name)
        if index.metadata.get("source") != name:
            holds = f"an index of {index.metadata.get('source')}"
            raise FileExistsError(f"{out} holds {holds}: `proxygml index add` adds to it")
        if kind not in (None, index.kind):
            raise ValueError(f"{out} was begun as {index.kind}, not {kind}: name another --out")
        _fill(index, source, trained)


def add(
    index: Place,
    gallery: Annotated[str | None, tyro.conf.Positional] = None,
    run: Path | None = None,
    dataset: str | None = None,
    data: Path | None = None,
    split: Literal["test", "train"] = "test",
) -> None:
    """Add a gallery to an index; what it holds already, by path, stays as it is.

    Args:
        index: Folder of the index, or its address postgresql://...
        gallery: An .npz of embeddings, a folder of images, or another index.
        run: The run whose network embeds images [default: the one that is kept in the index].
        dataset: A dataset, instead of a gallery.
        data: Folder of that dataset.
        split: Which half of that dataset.
    """
    from proxygml.retrieval import open_index
    from proxygml.training.run import Run

    held = open_index(index)
    kept = run or held.model_folder()
    trained = None if kept is None else Run.open(kept)
    _fill(held, _source(gallery, trained, dataset, data, split), trained)


def remove(index: Place, paths: Annotated[tuple[str, ...], tyro.conf.Positional]) -> None:
    """Take items out of an index; the images themselves stay where they are.

    Args:
        index: Folder of the index, or its address postgresql://...
        paths: Of the items, as a search shows them.
    """
    from proxygml.retrieval import open_index

    held = open_index(index)
    as_given = held.contains(paths)
    count = held.remove([path if path in as_given else os.path.abspath(path) for path in paths])
    output.print(f"removed {count:,} of {count + len(held):,} items", highlight=False)


def info(index: Place, json: bool = False) -> None:
    """What an index holds, and the share of what is nearest that it finds.

    Args:
        index: Folder of the index, or its address postgresql://...
        json: Print it as JSON.
    """
    from proxygml.retrieval import open_index

    held = open_index(index)
    with drawn_progress() as progress:
        recall = _measured_recall(held, progress)
    known = {**held.metadata, "items": len(held), "classes": len(held.class_names), "recall@10": recall}
    if json:
        output.print_json(data=known, ensure_ascii=True)
    else:
        for name, value in known.items():
            output.print(f"{name:12s}{value}", highlight=False, markup=False)


def index(
    action: Annotated[
        Annotated[Any, tyro.conf.subcommand(name="build", constructor=build)]
        | Annotated[Any, tyro.conf.subcommand(name="add", constructor=add)]
        | Annotated[Any, tyro.conf.subcommand(name="remove", constructor=remove)]
        | Annotated[Any, tyro.conf.subcommand(name="info", constructor=info)],
        tyro.conf.arg(name=""),
    ],
) -> None:
    """Make an index of a gallery to search in, in a folder or in a PostgreSQL database, and keep it up to date."""


def _source(
    gallery: str | None, run: "Run | None", dataset: str | None, data: Path | None, split: str
) -> "Embeddings | AnyIndex | ImageList":
    """What a gallery is."""
    from proxygml.data import load
    from proxygml.embeddings import Embeddings
    from proxygml.model import images_below
    from proxygml.retrieval import is_url, open_index

    if (gallery is None) == (dataset is None):
        raise ValueError("expected a gallery: an .npz, a folder of images or an index; or --dataset NAME")
    if gallery is None:
        if run is None:
            raise ValueError("images need --run RUN, a trained run whose network embeds them")
        recipe = run.recipe.changed({"dataset": dataset, "data": None if data is None else str(data), "classes": None})
        both = load(recipe.dataset, recipe.data, size=recipe.image_size, test_fraction=recipe.test_fraction)
        return both[0 if split == "train" else 1]
    if is_url(gallery) or (Path(gallery) / "items.sqlite").exists():
        return open_index(gallery)
    if Path(gallery).is_file():
        return Embeddings.load(Path(gallery))
    images = images_below(Path(gallery))
    if run is None:
        raise ValueError(f"the images in {gallery} need --run RUN, a trained run whose network embeds them")
    return images


def _measures(source: "Embeddings | AnyIndex | ImageList", run: "Run | None") -> tuple[int, int, str]:
    """How many vectors there will be, how wide they are, and the model_id of the model that makes them."""
    from proxygml.data import ImageList
    from proxygml.embeddings import Embeddings

    if isinstance(source, ImageList):
        embeds = cast("Run", run)  # as `_source` has seen to
        return len(source), embeds.recipe.embedding_dim, embeds.model_id
    if isinstance(source, Embeddings):
        return *source.vectors.shape, source.model
    return len(source), source.dim, source.model


def _fill(index: "AnyIndex", source: "Embeddings | AnyIndex | ImageList", run: "Run | None") -> None:
    """Put a gallery into an index, make it ready, and say what it has become."""
    from proxygml import model
    from proxygml.data import ImageList
    from proxygml.embeddings import Embeddings
    from proxygml.retrieval import Index
    from proxygml.retrieval.validation import check_model

    if isinstance(index, Index):
        index.check()
    if run is not None:
        check_model(run.model_id, index.model, index.location)
    with drawn_progress() as progress:
        if isinstance(source, ImageList):
            added = model.add_images(index, cast("Run", run), source, progress)
        elif isinstance(source, Embeddings):
            added = model.add_embeddings(index, model.divided(source), len(source.vectors), progress)
        else:
            added = model.add_embeddings(index, source.blocks(), len(source), progress)
        kept = source.model_folder() if hasattr(source, "model_folder") else None if run is None else run.folder
        if kept is not None and index.model_folder() is None:
            index.save_model(kept)
        index.refresh(partial(progress, f"building {index.kind}", note=""))
        recall = _measured_recall(index, progress)
    show_problems(added)
    if not len(index):
        raise ValueError(f"none of the {len(added.problems):,} images can be read: {index.location} is empty")
    output.print(
        f"{len(index):,} items in {index.location}: {added.new:,} new, {added.held:,} were there, "
        f"{len(added.problems):,} skipped\n"
        f"{index.kind} search finds {100 * recall:.1f} % of the 10 nearest",
        highlight=False,
        markup=False,
    )


def _measured_recall(index: "AnyIndex", progress: "Progress") -> float:
    progress("measuring recall", 0, 1, "")
    recall = index.recall()
    progress("measuring recall", 1, 1, "")
    return recall


def show_problems(added: "Added") -> None:
    for problem in added.problems[:MOST_LINES]:
        messages.print(f"skipped {in_one_line(problem.path)}: {problem.reason}", highlight=False, markup=False)
    if len(added.problems) > MOST_LINES:
        messages.print(f"skipped {len(added.problems) - MOST_LINES:,} more images that cannot be read", highlight=False)


def _absolute(gallery: str) -> str:
    from proxygml.retrieval import is_url
    from proxygml.retrieval.url import IndexURL

    return str(IndexURL.parse(gallery)) if is_url(gallery) else os.path.abspath(gallery)
