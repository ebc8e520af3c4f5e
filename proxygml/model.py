"""Galleries: what is to be searched, embedded block by block and put into an index, where what is there stays."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from proxygml import files
from proxygml.data import ImageList, open_image
from proxygml.data.check import Problem, find_problems
from proxygml.data.folder import list_images
from proxygml.data.splits import image_list
from proxygml.embeddings import Embeddings
from proxygml.retrieval import AnyIndex, Index, is_url, open_index
from proxygml.retrieval.folder import build_lock
from proxygml.training import build, evaluator
from proxygml.training.run import Progress, Run, no_progress

BLOCK = 1024  # images that are embedded and kept at a time: what Ctrl-C may cost


@dataclass
class Added:
    """What became of a gallery: items that came into the index, that were there, and that cannot be read."""

    new: int = 0
    held: int = 0
    problems: list[Problem] = field(default_factory=list)


def images_below(folder: Path) -> ImageList:
    """All images below a folder, however deep; their class is the folder that holds them, by its path."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: expected images, an .npz of embeddings or an index")
    paths, classes = list_images(folder, loose=folder.resolve().name)
    return image_list(paths, classes, root=folder)


def add_embeddings(index: AnyIndex, blocks: Iterable[Embeddings], total: int, progress: Progress) -> Added:
    """Put blocks of embeddings, `total` items, into an index; each is there when the next is asked for."""
    added, done = Added(), 0
    for block in blocks:
        new = index.add(block)
        done += len(block.vectors)
        added.new += new
        added.held += len(block.vectors) - new
        progress("adding", done, max(total, done), "")
    return added


def divided(embeddings: Embeddings, size: int = 50_000) -> Iterator[Embeddings]:
    """Embeddings in blocks."""
    for start in range(0, len(embeddings.vectors), size):
        some = slice(start, start + size)
        yield replace(
            embeddings, vectors=embeddings.vectors[some], labels=embeddings.labels[some], paths=embeddings.paths[some]
        )


def add_images(index: AnyIndex, run: Run, images: ImageList, progress: Progress) -> Added:
    """Embed images with the network of a run and put them into an index, but for those that it holds.

    Each block is kept when it is done: after Ctrl-C or a kill the same call goes on with what is missing.
    """
    added, done = Added(), 0

    def unknown() -> Iterator[ImageList]:
        nonlocal done
        for start in range(0, len(images), BLOCK):
            done = start
            part = images.select(np.arange(start, min(start + BLOCK, len(images))))
            names = [name_of(part, path) for path in part.paths]
            held = index.contains([name for name in names if _is_text(name)])
            added.held += sum(name in held for name in names)
            new = np.array([place for place, name in enumerate(names) if name not in held], np.int64)
            if len(new):
                part = part.select(new)
                found = find_problems(part, decode=True)
                known = {problem.index for problem in found}
                found += [
                    Problem(place, path, "its name is no text: rename it")
                    for place, path in enumerate(part.paths)
                    if not _is_text(path) and place not in known
                ]
                added.problems += found
                usable = np.setdiff1d(np.arange(len(part)), [problem.index for problem in found])
                if len(usable):
                    yield part.select(usable.astype(np.int64))

    def told(what: str, within: int, _: int, note: str) -> None:
        progress(what, done + within, len(images), note)

    for block in evaluator.embed_each(run, unknown(), progress=told):
        names = np.array([name_of(images, path) for path in block.paths], str)
        new = index.add(replace(block, paths=names))
        added.new += new
        added.held += len(names) - new  # that another process has added meanwhile
    progress("embedding", len(images), len(images), "")
    return added


def name_of(images: ImageList, path: str) -> str:
    """What an index calls an image: the absolute path of its file, or its name where it is no file of its own."""
    is_file = images.pixels is None and images.open_file is open_image
    return os.path.abspath(os.path.join(images.root or ".", path)) if is_file else path


def embed_photos(run: Run, paths: Sequence[Path]) -> np.ndarray:
    """The vectors (M, D) of photos to search for; one that cannot be read is an error that names it."""
    images = ImageList([os.path.abspath(path) for path in paths], np.zeros(len(paths), np.int64), ("photos",))
    for problem in find_problems(images, decode=True):
        raise ValueError(f"{paths[problem.index]} cannot be searched for: {problem.reason}")
    return evaluator.embed_images(run, images).vectors


def open_gallery(place: str | Path, progress: Progress = no_progress) -> tuple[AnyIndex, Added]:
    """What can be searched: a run (its test images), an .npz of embeddings, or an index, by folder or address.

    Beside it what was embedded for it just now.
    """
    path = Path(place)
    if is_url(place) or (path / "items.sqlite").is_file():
        return open_index(place), Added()
    if path.is_file():
        return Index.from_embeddings(Embeddings.load(path)), Added()
    if (path / "recipe.json").is_file():
        return index_of_run(path, progress)
    raise FileNotFoundError(f"{place} is no run, no .npz of embeddings and no index: `proxygml index build` makes one")


def index_of_run(folder: Path, progress: Progress = no_progress) -> tuple[Index, Added]:
    """The index of a run's own test images, in the run's folder; made at the first call, or finished."""
    run, place = Run.open(folder), folder / "index"
    model_id = run.model_id
    if (place / "items.sqlite").is_file():
        index = Index.open(place)
        if index.model == model_id and index.metadata.get("complete") == "yes":
            return index, Added()
        index.close()
    with build_lock(place):
        kept = (place / "items.sqlite").is_file()
        if kept and Index.open(place).model != model_id:  # the run was trained further, or anew
            for path in place.iterdir():
                if path.name != files.LOCK_NAME:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            kept = False
        if not kept:
            Index.create(place, dim=run.recipe.embedding_dim, model=model_id)
        index = Index.open(place)
        images = build.load_images(run.recipe)[1]
        added = add_images(index, run, images, progress)
        index.save_model(folder)
        index.set_metadata("complete", "yes")
        return index, added


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
