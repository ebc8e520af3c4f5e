"""proxygml index."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import tyro

from proxygml.cli.display import show_next
from proxygml.cli.objects import import_object
from proxygml.cli.options import SILENT, Hardware
from proxygml.cli.parsing import subcommands
from proxygml.cli.stopping import resume_hint
from proxygml.display import Progress, counted, counter, messages, output, show_progress
from proxygml.training.recipe import Split, is_class_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxygml.data import ImageList
    from proxygml.display import Progress
    from proxygml.embeddings import Embeddings
    from proxygml.model import Kind, Model
    from proxygml.retrieval import Index

    Source = Embeddings | Index | ImageList

Location = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]
FolderLocation = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
SOURCES: tuple["Kind", ...] = ("embeddings", "images", "index", "run")
IndexKind = Literal["exact", "hnsw", "ivf-pq"]
SourceLocation = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NPZ|IMAGES|INDEX|RUN"), SILENT]


@dataclass(frozen=True)
class Items:
    """What goes into an index.

    Args:
        source: An .npz of embeddings, a folder of images (at any depth; the parent folder is the class), another index,
            or a run (its own images).
        run: What embeds images, a run or a pretrained backbone by its name; a copy of the network is stored in the
            index, to embed queries (default: the one stored there).
        dataset: A dataset, instead of a source.
        data: Folder of that dataset, or of the run's images if they have moved.
        split: Which images (default: all of a run, test of a dataset).
    """

    source: SourceLocation = None
    run: Annotated[Path | None, SILENT] = None
    dataset: Annotated[str | None, SILENT] = None
    data: Annotated[Path | None, SILENT] = None
    split: Annotated[Split | None, SILENT] = None

    def __post_init__(self) -> None:
        if (self.source is None) == (self.dataset is None):
            raise ValueError("expected an .npz, a folder of images, an index or a run; or --dataset NAME")

    def open(self, model: "Model | None", hardware: Hardware) -> "Source":
        """The vectors, or the images that this model embeds."""
        from proxygml.data.folder import images_below
        from proxygml.model import kind_of
        from proxygml.training.build import load_images
        from proxygml.vectors import open_vectors

        if self.source is not None and kind_of(self.source, SOURCES) != "images":
            split = self.split or "all"
            with show_progress() as progress:
                return open_vectors(self.source, split=split, data=self.data, load=hardware.load, progress=progress)
        if model is None:
            raise ValueError("images need --run RUN, a trained run or a pretrained backbone that embeds them")
        if self.source is not None:
            return images_below(Path(self.source))
        if self.split == "all":
            raise ValueError("a dataset is indexed in parts: --split train, then `index add` with --split test")
        data = None if self.data is None else str(self.data)
        limits = {"classes": None, "max_class_size": None}
        recipe = model.recipe.changed({"dataset": self.dataset, "data": data, **limits})
        own_object = import_object(recipe.dataset) if is_class_name(recipe.dataset) else None
        return load_images(recipe, own_object)[0 if self.split == "train" else 1]

    @property
    def name(self) -> str:
        """The same name whenever the same items are meant."""
        from proxygml.retrieval.url import IndexURL, is_url

        if self.source is None:
            return f"{self.dataset} {self.data or ''} {self.split or 'test'}"
        return str(IndexURL.parse(self.source)) if is_url(self.source) else os.path.abspath(self.source)


def build(
    items: Items,
    hardware: Hardware,
    *,
    out: str,
    kind: Annotated[IndexKind | None, SILENT] = None,
    prefix: Annotated[int | None, SILENT] = None,
) -> None:
    """Build an index; after Ctrl-C, a kill or a full disk the same command continues.

    Args:
        items: What goes into it.
        hardware: What embeds images.
        out: A new folder, or postgresql://USER@HOST/DATABASE?index=NAME.
        kind: How to search (default: by the number of vectors, see docs/search.md).
        prefix: Search so many first dimensions of nested embeddings, then rerank the best by all.
    """
    from proxygml.data import ImageList
    from proxygml.embeddings import Embeddings
    from proxygml.model import kind_of
    from proxygml.retrieval import Index, is_url
    from proxygml.retrieval.contents import build_lock
    from proxygml.retrieval.index import choose_kind
    from proxygml.retrieval.validation import checked_blocks
    from proxygml.tasks.classify import read_calibration, store_calibration

    run = items.run
    if run is None and items.source is not None and kind_of(items.source, SOURCES) == "run":
        run = Path(items.source)
    model = None if run is None else hardware.load(run)
    source = items.open(model, hardware)
    if isinstance(source, ImageList):
        dim, model_id = cast("Model", model).recipe.embedding_dim, cast("Model", model).model_id
    else:
        dim, model_id = source.dim, source.model
    if not len(source):
        raise ValueError(f"expected vectors to search in, but {items.source} is empty")
    if isinstance(source, Embeddings):  # before anything is written
        for _ in checked_blocks(source, dim, items.source):
            pass
    new_kind = choose_kind(out, dim=dim, kind=kind, expected_size=len(source), prefix=prefix)
    lock = nullcontext() if is_url(out) else build_lock(Path(out))
    with resume_hint(lambda: "the same command continues"), lock:
        try:
            index = Index.open(out)
        except FileNotFoundError:
            index = Index.create(out, dim=dim, model=model_id, kind=new_kind, prefix=prefix)
        if not len(index):
            index.set_metadata("source", items.name)
        if (other := index.metadata.get("source")) != items.name:
            raise FileExistsError(f"{out} is an index of {other}: `proxygml index add` adds to it")
        if kind not in (None, index.kind):
            raise ValueError(f"{out} was started as {index.kind}, not {kind}: name another --out")
        if prefix is not None and (other := index.metadata.get("prefix")) != str(prefix):
            started = "without --prefix" if other is None else f"with --prefix {other}"
            raise ValueError(f"{out} was started {started}, not --prefix {prefix}: name another --out")
        _fill(index, source, model)
        if isinstance(source, Index) and read_calibration(index) is None:
            calibration = read_calibration(source)  # of the same vectors
            if calibration is not None:
                store_calibration(index, calibration)
        ((path,),) = index.storage.rows("SELECT path FROM items ORDER BY id LIMIT 1")
    photo = path if os.path.isfile(path) and index.model_folder() is not None else ""
    show_next(
        (["search", out, "--image", photo], "those most similar to a photo"),
        (["browse", out], "neighbors, errors and a map of the space"),
        (["serve", out], "an HTTP API for other programs"),
    )


def add(index: Location, items: Items, hardware: Hardware) -> None:
    """Add to an index; paths that it contains already stay unchanged.

    Args:
        index: Folder of the index, or its address postgresql://...
        items: What to add.
        hardware: What embeds images.
    """
    from proxygml.retrieval import Index

    opened = Index.open(index)
    folder = items.run or opened.model_folder()
    model = None if folder is None else hardware.load(folder)
    _fill(opened, items.open(model, hardware), model)


def remove(
    index: Location, items: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ITEM ...")]
) -> None:
    """Remove items from an index; the images themselves are not deleted.

    Args:
        index: Folder of the index, or its address postgresql://...
        items: Paths as a search shows them, folders, or classes.
    """
    from proxygml.retrieval import Index

    opened = Index.open(index)
    count = opened.remove(_paths_of(items, opened))
    output.print(f"removed {count:,} of {counted(count + len(opened), 'item')}")


def _paths_of(names: "Sequence[str]", index: "Index") -> list[str]:
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
    from proxygml.retrieval import Index

    opened = Index.open(index)
    before, after = os.path.abspath(old), os.path.abspath(new)
    count = opened.relocate(before, after)
    if not count:
        first = next((path for path, _ in opened.listing()), "nothing")
        raise ValueError(f"{opened.location} contains no paths below {before}; its first is {first}")
    for name in ("source", "root"):
        folder = opened.metadata.get(name, "")
        if f"{folder}/".startswith(f"{before}/"):
            opened.set_metadata(name, after + folder[len(before) :])
    output.print(f"relocated {count:,} of {counted(len(opened), 'item')}")
    if not os.path.isdir(after):
        messages.print(f"{after} does not exist on this machine")


def info(index: Location, json: bool = False) -> None:
    """Describe an index, with the measured recall of its search.

    Args:
        index: Folder of the index, or its address postgresql://...
        json: Print it as JSON.
    """
    from proxygml.retrieval import Index

    opened = Index.open(index)
    with show_progress() as progress:
        recall = _measure_recall(opened, progress)
    labeled = "SELECT COUNT(DISTINCT class) FROM items JOIN classes ON classes.id = class WHERE name != ''"
    classes = opened.storage.rows(labeled)[0][0]  # without those of removed items
    values = {**opened.metadata, "items": len(opened), "classes": classes, "recall@10": recall}
    if json:
        output.print_json(data=values, ensure_ascii=True)
    else:
        for name, value in values.items():
            output.print(f"{name:16s}{value}")


ACTIONS = subcommands({"build": build, "add": add, "remove": remove, "relocate": relocate, "info": info})


def index(action: Annotated[ACTIONS, tyro.conf.arg(name="")]) -> None:  # type: ignore[valid-type]
    """Build an index to search in, in a folder or in a PostgreSQL database, and keep it up to date."""
    cast(Callable[[], None], action)()


def _fill(index: "Index", source: "Source", model: "Model | None") -> None:
    """Add a source to an index, bring its search up to date, and print a summary."""
    from proxygml.data import ImageList
    from proxygml.embeddings import Embeddings
    from proxygml.retrieval.adding import add_embeddings, add_images
    from proxygml.retrieval.validation import check_model

    index.check()
    if model is not None:
        check_model(model.model_id, index.model, index.location)
    with show_progress() as progress:
        folder = None if model is None else model.run.folder
        if isinstance(source, ImageList):
            added = add_images(index, cast("Model", model).embed, source, progress)
        else:
            added = add_embeddings(index, source, progress)
            folder = folder if isinstance(source, Embeddings) else source.model_folder()
        if folder is not None and index.model_folder() is None:
            index.save_model(folder)
        index.refresh(counter(progress, f"building {index.kind}"))
        recall = _measure_recall(index, progress)
    if not len(index):
        raise ValueError(f"{counted(added.skipped, 'image')} skipped, none can be read: {index.location} is empty")
    prefix = index.metadata.get("prefix")
    search = f"search by the first {prefix} of {index.dim:,} dimensions" if prefix else f"{index.kind} search"
    output.print(
        f"{counted(len(index), 'item')} in {index.location}: {added.new:,} new, {added.existing:,} existing, "
        f"{added.skipped:,} skipped\n"
        f"{search} finds {100 * recall:.1f} % of the 10 nearest"
    )


def _measure_recall(index: "Index", progress: Progress) -> float:
    progress("measuring recall", 0, 1, "")
    recall = index.recall()
    progress("measuring recall", 1, 1, "")
    return recall
