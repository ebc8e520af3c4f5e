"""proxygml index."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import tyro

from proxygml.cli.display import messages, output, show_progress
from proxygml.cli.parsing import subcommands
from proxygml.cli.stopping import resume_hint
from proxygml.data.splits import Split
from proxygml.training.recipe import Device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxygml.data import ImageList
    from proxygml.embeddings import Embeddings
    from proxygml.model import Kind, Model
    from proxygml.retrieval import AnyIndex
    from proxygml.training.run import Progress

    Source = Embeddings | AnyIndex | ImageList

Location = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]
FolderLocation = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
SOURCES: tuple["Kind", ...] = ("embeddings", "images", "index", "run")
SourceLocation = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NPZ|IMAGES|INDEX|RUN")]


def build(
    source: SourceLocation = None,
    *,
    out: str,
    run: Path | None = None,
    dataset: str | None = None,
    data: Path | None = None,
    split: Split | None = None,
    device: Device | None = None,
    kind: Literal["exact", "hnsw", "ivf-pq"] | None = None,
) -> None:
    """Build an index; after Ctrl-C, a kill or a full disk the same command continues.

    Args:
        source: An .npz of embeddings, a folder of images (at any depth; the parent folder is the class), another index,
            or a run (its own images).
        out: A new folder, or postgresql://USER@HOST/DATABASE?index=NAME.
        run: The run that embeds images; a copy of its network is stored in the index, to embed queries.
        dataset: A dataset, instead of a source.
        data: Folder of that dataset, or of the run's images if they have moved.
        split: Which images (default: all of a run, test of a dataset).
        device: Accelerator that embeds images (default: the run's, if this machine has it).
        kind: How to search (default: by the number of vectors, see docs/search.md).
    """
    from proxygml.data import ImageList
    from proxygml.embeddings import Embeddings
    from proxygml.model import Model, kind_of
    from proxygml.retrieval import create_index, is_url, open_index
    from proxygml.retrieval.contents import build_lock
    from proxygml.retrieval.url import IndexURL
    from proxygml.retrieval.validation import checked_blocks

    if run is None and source is not None and kind_of(source, SOURCES) == "run":
        run = Path(source)
    model = None if run is None else Model(run, device=device)
    items = _open_source(source, model, dataset, data, split, device)
    if source is None:
        name = f"{dataset} {data or ''} {split or 'test'}"
    else:
        name = str(IndexURL.parse(source)) if is_url(source) else os.path.abspath(source)
    if isinstance(items, ImageList):
        dim, model_id = cast("Model", model).recipe.embedding_dim, cast("Model", model).model_id
    else:
        dim, model_id = items.dim, items.model
    if not len(items):
        raise ValueError(f"expected vectors to search in, but {source} is empty")
    if isinstance(items, Embeddings):  # before anything is written
        for _ in checked_blocks(items, dim, source):
            pass
    lock = nullcontext() if is_url(out) else build_lock(Path(out))
    with resume_hint(lambda: "the same command continues"), lock:
        try:
            index = open_index(out)
        except FileNotFoundError:
            index = create_index(out, dim=dim, model=model_id, kind=kind, expected_size=len(items))
        if not len(index):
            index.set_metadata("source", name)
        if index.metadata.get("source") != name:
            other = index.metadata.get("source")
            raise FileExistsError(f"{out} is an index of {other}: `proxygml index add` adds to it")
        if kind not in (None, index.kind):
            raise ValueError(f"{out} was started as {index.kind}, not {kind}: name another --out")
        _fill(index, items, model)


def add(
    index: Location,
    source: SourceLocation = None,
    run: Path | None = None,
    dataset: str | None = None,
    data: Path | None = None,
    split: Split | None = None,
    device: Device | None = None,
) -> None:
    """Add to an index; paths that it contains already stay unchanged.

    Args:
        index: Folder of the index, or its address postgresql://...
        source: An .npz of embeddings, a folder of images, another index, or a run.
        run: The run that embeds images (default: the one stored in the index).
        dataset: A dataset, instead of a source.
        data: Folder of that dataset, or of the run's images if they have moved.
        split: Which images (default: all of a run, test of a dataset).
        device: Accelerator that embeds images (default: the run's, if this machine has it).
    """
    from proxygml.model import Model
    from proxygml.retrieval import open_index

    opened = open_index(index)
    folder = run or opened.model_folder()
    model = None if folder is None else Model(folder, device=device)
    _fill(opened, _open_source(source, model, dataset, data, split, device), model)


def remove(
    index: Location, items: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ITEM ...")]
) -> None:
    """Remove items from an index; the images themselves are not deleted.

    Args:
        index: Folder of the index, or its address postgresql://...
        items: Paths as a search shows them, folders, or classes.
    """
    from proxygml.retrieval import open_index

    opened = open_index(index)
    count = opened.remove(_paths_of(items, opened))
    output.print(f"removed {count:,} of {count + len(opened):,} items")


def _paths_of(names: "Sequence[str]", index: "AnyIndex") -> list[str]:
    """The paths in an index that names stand for: a path itself, all below a folder, or all of a class."""
    paths: list[str] = []
    listing: list[tuple[str, str]] = []
    for name in names:
        absolute = os.path.abspath(name)
        found = list(index.contains([name, absolute]))
        if not found:
            listing = listing or index.listing()
            folders = f"{name.rstrip('/')}/", f"{absolute}/"
            found = [path for path, _ in listing if name and path.startswith(folders)]
        found = found or [path for path, class_name in listing if class_name == name]
        if not found:
            raise ValueError(f"{index.location} contains no path, folder or class {name}")
        paths += found
    return paths


def relocate(index: Location, old: FolderLocation, new: FolderLocation) -> None:
    """Change the paths of images that have moved to another folder; they keep their vectors.

    Args:
        index: Folder of the index, or its address postgresql://...
        old: The folder where they were.
        new: The folder where they are now.
    """
    from proxygml.retrieval import open_index

    opened = open_index(index)
    before, after = os.path.abspath(old), os.path.abspath(new)
    count = opened.relocate(before, after)
    if not count:
        first = next((path for path, _ in opened.listing()), "nothing")
        raise ValueError(f"{opened.location} contains no paths below {before}; its first is {first}")
    for name in ("source", "root"):
        folder = opened.metadata.get(name, "")
        if f"{folder}/".startswith(f"{before}/"):
            opened.set_metadata(name, after + folder[len(before) :])
    output.print(f"relocated {count:,} of {len(opened):,} items")
    if not os.path.isdir(after):
        messages.print(f"{after} does not exist on this machine")


def info(index: Location, json: bool = False) -> None:
    """Describe an index, with the measured recall of its search.

    Args:
        index: Folder of the index, or its address postgresql://...
        json: Print it as JSON.
    """
    from proxygml.retrieval import open_index

    opened = open_index(index)
    with show_progress() as progress:
        recall = _measure_recall(opened, progress)
    values = {**opened.metadata, "items": len(opened), "classes": len(opened.class_names), "recall@10": recall}
    if json:
        output.print_json(data=values, ensure_ascii=True)
    else:
        for name, value in values.items():
            output.print(f"{name:12s}{value}")


ACTIONS = subcommands({"build": build, "add": add, "remove": remove, "relocate": relocate, "info": info})


def index(action: Annotated[ACTIONS, tyro.conf.arg(name="")]) -> None:  # type: ignore[valid-type]
    """Build an index to search in, in a folder or in a PostgreSQL database, and keep it up to date."""
    cast(Callable[[], None], action)()


def _open_source(
    source: str | None,
    model: "Model | None",
    dataset: str | None,
    data: Path | None,
    split: Split | None,
    device: Device | None,
) -> "Source":
    from proxygml.data import load
    from proxygml.model import images_below, kind_of, open_vectors

    if (source is None) == (dataset is None):
        raise ValueError("expected an .npz, a folder of images, an index or a run; or --dataset NAME")
    if source is not None and kind_of(source, SOURCES) != "images":
        with show_progress() as progress:
            return open_vectors(source, split=split or "all", data=data, device=device, progress=progress)
    if model is None:
        raise ValueError("images need --run RUN, a trained run that embeds them")
    if source is not None:
        return images_below(Path(source))
    if split == "all":
        raise ValueError("a dataset is indexed in parts: --split train, then `index add` with --split test")
    changes = {"dataset": dataset, "data": None if data is None else str(data), "classes": None}
    recipe = model.recipe.changed(changes)
    both = load(recipe.dataset, recipe.data, size=recipe.image_size, test_fraction=recipe.test_fraction)
    return both[0 if split == "train" else 1]


def _fill(index: "AnyIndex", source: "Source", model: "Model | None") -> None:
    """Add a source to an index, bring its search up to date, and print a summary."""
    from proxygml.data import ImageList
    from proxygml.embeddings import Embeddings
    from proxygml.model import add_embeddings, add_images
    from proxygml.retrieval import Index
    from proxygml.retrieval.validation import check_model

    if isinstance(index, Index):
        index.check()
    if model is not None:
        check_model(model.model_id, index.model, index.location)
    with show_progress() as progress:
        folder = None if model is None else model.run.folder
        if isinstance(source, ImageList):
            added = add_images(index, cast("Model", model), source, progress)
        else:
            added = add_embeddings(index, source, progress)
            folder = folder if isinstance(source, Embeddings) else source.model_folder()
        if folder is not None and index.model_folder() is None:
            index.save_model(folder)
        index.refresh(partial(progress, f"building {index.kind}", note=""))
        recall = _measure_recall(index, progress)
    if not len(index):
        raise ValueError(f"none of the {added.skipped:,} images can be read: {index.location} is empty")
    output.print(
        f"{len(index):,} items in {index.location}: {added.new:,} new, {added.existing:,} existing, "
        f"{added.skipped:,} skipped\n"
        f"{index.kind} search finds {100 * recall:.1f} % of the 10 nearest"
    )


def _measure_recall(index: "AnyIndex", progress: "Progress") -> float:
    progress("measuring recall", 0, 1, "")
    recall = index.recall()
    progress("measuring recall", 1, 1, "")
    return recall
