"""Add embeddings or images to an index, block by block."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from proxygml.data import ImageList
from proxygml.data.check import Problem, find_problems
from proxygml.display import Progress, counted
from proxygml.embeddings import Embeddings
from proxygml.retrieval.index import Index
from proxygml.retrieval.validation import is_text

BLOCK = 1024  # images that are embedded and stored at a time: at most these are lost by Ctrl-C
MAX_NAMED = 20  # unreadable images that are reported by name
Embed = Callable[[ImageList, Callable[[int, int], None]], Embeddings]  # images, progress


@dataclass
class Added:
    """Numbers of items that were added to an index, that it contained already, and of images that cannot be read."""

    new: int = 0
    existing: int = 0
    skipped: int = 0


def item_name(images: ImageList, path: str) -> str:
    """The path of an image in an index: absolute for a file, unchanged for an image inside another file."""
    return os.path.abspath(os.path.join(images.root or ".", path)) if images.has_files else path


def add_embeddings(index: Index, source: Embeddings | Index, progress: Progress) -> Added:
    """Add all vectors of embeddings or of another index, block by block."""
    added, done = Added(), 0
    for block in source.blocks():
        new = index.add(block)
        done += len(block)
        added.new += new
        added.existing += len(block) - new
        progress("adding", done, max(len(source), done), "")
    return added


def add_images(index: Index, embed: Embed, images: ImageList, progress: Progress) -> Added:
    """Embed the images that an index does not contain and add them; unreadable images are skipped and reported.

    Every block is stored when it is done: after Ctrl-C or a kill, the same call continues.
    """
    added = Added()
    for start in range(0, len(images), BLOCK):
        block = images.select(np.arange(start, min(start + BLOCK, len(images))))
        names = [item_name(block, path) for path in block.paths]
        existing = index.contains([name for name in names if is_text(name)])
        missing = np.array([place for place, name in enumerate(names) if name not in existing], np.int64)
        added.existing += len(names) - len(missing)
        if not len(missing):
            continue
        block = block.select(missing)
        problems = {problem.index: problem for problem in find_problems(block)}
        for place, path in enumerate(block.paths):
            if not is_text(path):
                problems.setdefault(place, Problem(place, path, "its name is not valid Unicode: rename it"))
        for problem in list(problems.values())[: max(0, MAX_NAMED - added.skipped)]:
            progress(f"skipped {problem.path}", 0, 0, problem.reason)
        added.skipped += len(problems)
        readable = np.setdiff1d(np.arange(len(block)), list(problems))
        if not len(readable):
            continue

        def report(done: int, _: int, start: int = start) -> None:
            progress("embedding", start + done, len(images), "")

        result = embed(block.select(readable), report)
        paths = np.array([item_name(images, path) for path in result.paths], str)
        new = index.add(replace(result, paths=paths))
        added.new += new
        added.existing += len(paths) - new  # another process has added them
    if len(images):
        progress("embedding", len(images), len(images), "")
    if added.skipped > MAX_NAMED:
        progress("skipped", 0, 0, f"{counted(added.skipped - MAX_NAMED, 'more image')} that cannot be read")
    return added
