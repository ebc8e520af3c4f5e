"""Labeled images by name: `load("glyphs")` returns training images and test images."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from proxygml.data.decoding import open_image
from proxygml.data.lazy import LazyImages
from proxygml.files import unknown_name


@dataclass(frozen=True)
class ImageList:
    """Images with labels: image i is `paths[i]` of class `class_names[labels[i]]`.

    Images are files below `root`, or arrays in `pixels`; then `paths` are only their names.
    """

    paths: Sequence[str]  # M paths
    labels: np.ndarray  # (M,) integers 0..C-1
    class_names: tuple[str, ...]  # C names or ids
    root: Path | None = None
    pixels: np.ndarray | LazyImages | None = None  # M images (H, W) or (H, W, 3), uint8
    features: np.ndarray | None = None  # (M, crops, 2, F) of a frozen network: see training/features.py
    open_file: Callable[[Path], Image.Image] = open_image
    queries: np.ndarray | None = None  # (M,) bool: these are searched for among the others; None: all among all

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        if len(labels) != len(self.paths):
            raise ValueError(f"expected one label for each of {len(self.paths)} images, got {len(labels)}")
        for name in ("pixels", "features", "queries"):
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

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> Image.Image:
        """Image `index`; a file is not yet decoded."""
        if isinstance(self.pixels, LazyImages):
            return self.pixels.open(index)
        if self.pixels is not None:
            return Image.fromarray(self.pixels[index])
        return self.open_file(self.file(index))

    @property
    def has_files(self) -> bool:
        """Whether each image is a file of its own."""
        return self.pixels is None and self.open_file is open_image

    def file(self, index: int) -> Path:
        """Path of image `index`."""
        return Path(self.root or ".", self.paths[index])

    def select(self, indices: np.ndarray) -> "ImageList":
        """Only these images; their classes are relabeled 0.. in the same order."""
        classes, labels = np.unique(self.labels[indices], return_inverse=True)
        return replace(
            self,
            paths=[self.paths[index] for index in indices],
            labels=labels,
            class_names=tuple(self.class_names[c] for c in classes),
            pixels=None if self.pixels is None else self.pixels[indices],
            features=None if self.features is None else self.features[indices],
            queries=None if self.queries is None else self.queries[indices],
        )

    def select_classes(self, classes: Sequence[int] | np.ndarray) -> "ImageList":
        """Only the images of these classes, relabeled 0.. in the same order."""
        return self.select(np.flatnonzero(np.isin(self.labels, np.asarray(classes))))

    def limit_class_size(self, size: int) -> "ImageList":
        """The first `size` images of every class."""
        order = np.argsort(self.labels, kind="stable")  # (M,) class by class
        starts = np.searchsorted(self.labels[order], self.labels[order])  # (M,) position of the first of its class
        return self.select(np.sort(order[np.arange(len(order)) - starts < size]))


DATASETS = ("glyphs", "cub", "cars", "sop", "omniglot", "folder", "table", "tar")  # modules of this package


def load(
    name: str,
    root: str | Path | None = None,
    *,
    size: int = 32,
    classes: int | None = None,
    max_class_size: int | None = None,
    test_fraction: float = 0.5,
) -> tuple[ImageList, ImageList]:
    """The training and test images of a dataset, usually of different classes.

    `size` is the side of glyphs in pixels. `classes` limits each split to its first classes, `max_class_size` each
    class to its first images. `test_fraction` of the classes are for testing if the data has no split of its own
    (folder, table, tar).
    """
    if name not in DATASETS:
        raise unknown_name("a dataset", name, DATASETS)
    module = importlib.import_module(f"proxygml.data.{name}")
    if name == "glyphs":
        if root is not None:
            raise ValueError(f"glyphs are drawn and need no --data, got {root}: name the --dataset it belongs to")
        both = module.load(size=size)
    elif root is None:
        what = {"folder": "a folder of your images", "table": "your table of images"}.get(name, f"the folder of {name}")
        raise ValueError(f"expected {what} as --data: see docs/datasets.md")
    else:
        options = {"test_fraction": test_fraction} if name in ("folder", "table", "tar") else {}
        both = module.load(Path(root), **options)
    return limit_images(both, classes=classes, max_class_size=max_class_size)


def limit_images(
    both: tuple[ImageList, ImageList], *, classes: int | None, max_class_size: int | None
) -> tuple[ImageList, ImageList]:
    """Training and test images of the first `classes` classes of each, the first `max_class_size` of every class."""
    train, test = both
    if classes is not None:
        fewest = min(len(images.class_names) for images in both if len(images))
        if not 2 <= classes <= fewest:
            raise ValueError(f"expected 2 to {fewest} classes, got {classes}")
        train, test = train.select_classes(range(classes)), test.select_classes(range(classes))
    if max_class_size is not None:
        train, test = train.limit_class_size(max_class_size), test.limit_class_size(max_class_size)
    return train, test
