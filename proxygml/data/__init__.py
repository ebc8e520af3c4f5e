"""Labeled images by name: `load("glyphs")` gives what to train on and what to test on."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, cast

import numpy as np
from PIL import Image

from proxygml.data.names import Names

# What a file is, its first bytes say, whatever it is called. Other formats call programs, as EPS does Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "MPO", "TIFF", "GIF", "BMP", "PPM", "AVIF", "JPEG2000")


def open_image(file: Path | IO[bytes]) -> Image.Image:
    """The image in a file, not yet decoded, if it is of one of FORMATS."""
    return Image.open(file, formats=_known_formats())


@cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # of older Pillows some lack AVIF


@dataclass(frozen=True)
class ImageList:
    """Images with labels: image i is `paths[i]` of class `labels[i]`, which is called `class_names[labels[i]]`.

    Images live in files below `root`, or, where `pixels` is given, in memory; then `paths` only names them.
    """

    paths: Sequence[str]  # M of them
    labels: np.ndarray  # (M,) integers 0..C-1
    class_names: tuple[str, ...]  # C original names or ids, for reports
    root: Path | None = None
    pixels: np.ndarray | None = None  # (M, H, W) gray or (M, H, W, 3), uint8
    features: np.ndarray | None = None  # (M, V, 2, F) of a frozen network: see features.py
    open_file: Callable[[Path], Image.Image] = open_image

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        if len(labels) != len(self.paths):
            raise ValueError(f"expected one label for each of {len(self.paths)} images, got {len(labels)}")
        for name in ("pixels", "features"):
            array = getattr(self, name)
            if array is not None and len(array) != len(self.paths):
                raise ValueError(f"expected {name} for each of {len(self.paths)} images, got {len(array)}")
        present = np.unique(labels)
        if not np.array_equal(present, np.arange(len(self.class_names))):
            raise ValueError(
                f"expected labels 0..{len(self.class_names) - 1} with an image in each of the "
                f"{len(self.class_names)} classes, got {len(present)} different labels"
            )
        object.__setattr__(self, "labels", labels.astype(np.int64))
        if not isinstance(self.paths, Names):
            object.__setattr__(self, "paths", Names(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> Image.Image:
        """Image `index`, opened but, where it is a file, not yet decoded."""
        if self.pixels is not None:
            return Image.fromarray(self.pixels[index])
        return self.open_file(self.file(index))

    def file(self, index: int) -> Path:
        """Where image `index` is, unless it is in memory."""
        return Path(self.root or ".", self.paths[index])

    def of_classes(self, classes: Sequence[int] | np.ndarray) -> "ImageList":
        """The images of these classes alone, relabeled 0.. in the order in which the classes are given."""
        new_label = np.full(len(self.class_names), -1)
        new_label[np.asarray(classes, dtype=np.int64)] = np.arange(len(classes))
        chosen = np.flatnonzero(new_label[self.labels] >= 0)
        return self._of_images(chosen, new_label[self.labels[chosen]], classes)

    def without(self, indices: Sequence[int]) -> "ImageList":
        """All images but these, the classes that are left numbered anew."""
        kept = np.setdiff1d(np.arange(len(self)), np.asarray(indices, dtype=np.int64))
        if not len(kept):
            raise ValueError(f"none of the {len(self)} images can be used")
        return self.only(kept)

    def only(self, indices: np.ndarray) -> "ImageList":
        """These images alone, their classes numbered anew."""
        classes, labels = np.unique(self.labels[indices], return_inverse=True)
        return self._of_images(indices, labels, classes)

    def first_of_each(self, most: int) -> "ImageList":
        """The first `most` images of every class."""
        order = np.argsort(self.labels, kind="stable")  # (M,) class by class
        starts = np.searchsorted(self.labels[order], self.labels[order])  # (M,) where the class of each begins
        return self.only(np.sort(order[np.arange(len(order)) - starts < most]))

    def _of_images(self, chosen: np.ndarray, labels: np.ndarray, classes: Sequence[int] | np.ndarray) -> "ImageList":
        return replace(
            self,
            paths=cast(Names, self.paths).take(chosen),
            labels=labels,
            class_names=tuple(self.class_names[c] for c in classes),
            pixels=None if self.pixels is None else self.pixels[chosen],
            features=None if self.features is None else self.features[chosen],
        )


DATASETS = (  # each a module of this package
    *("glyphs", "cub", "cars", "sop", "omniglot", "folder", "table", "tar"),
)


def load(
    name: str,
    root: str | Path | None = None,
    *,
    size: int = 32,
    classes: int | None = None,
    max_class_size: int | None = None,
    test_fraction: float = 0.5,
) -> tuple[ImageList, ImageList]:
    """The training and the test images of a dataset, as a rule of classes that do not overlap.

    `size` is the side of drawn images (glyphs), in pixels; `classes` takes only the first so many of each, and
    `max_class_size` the first so many images of every class; `test_fraction` of the classes are for testing where the
    data does not say (folder, table).
    """
    if name not in DATASETS:
        raise ValueError(f"expected a dataset among {', '.join(DATASETS)}, got {name!r}")
    module = importlib.import_module(f"proxygml.data.{name}")
    if name == "glyphs":
        if root is not None:
            raise ValueError(f"glyphs are drawn and need no --data, got {root}: name the --dataset it belongs to")
        both = module.load(size=size, classes=classes)
    elif root is None:
        what = {"folder": "a folder of your images", "table": "your table of images"}.get(name, f"the folder of {name}")
        raise ValueError(f"expected {what} as --data: see docs/datasets.md")
    else:
        divided = name in ("folder", "table", "tar")  # by us
        both = module.load(Path(root), test_fraction=test_fraction) if divided else module.load(Path(root))
        if classes is not None:
            fewest = min(len(images.class_names) for images in both)
            if not 2 <= classes <= fewest:
                raise ValueError(f"expected 2 to {fewest} classes of {name}, got {classes}")
            both = tuple(images.of_classes(range(classes)) for images in both)
    train, test = both
    if max_class_size is None:
        return train, test
    return train.first_of_each(max_class_size), test.first_of_each(max_class_size)
