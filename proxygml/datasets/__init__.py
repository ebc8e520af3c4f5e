"""Labelled images by name: `load("glyphs")` gives what to train on and what to test on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class ImageList:
    """Images with labels: image i is `paths[i]` of class `labels[i]`, which is called `class_names[labels[i]]`.

    Images live in files below `root`, or, where `pixels` is given, in memory; then `paths` only names them.
    """

    paths: Sequence[str]  # M of them
    labels: np.ndarray  # (M,) integers 0..C-1
    class_names: tuple[str, ...]  # C original names or ids, for reports
    root: Path | None = None
    pixels: np.ndarray | None = None  # (M, H, W) grey or (M, H, W, 3), uint8

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        if len(labels) != len(self.paths):
            raise ValueError(f"expected one label for each of {len(self.paths)} images, got {len(labels)}")
        if self.pixels is not None and len(self.pixels) != len(self.paths):
            raise ValueError(f"expected pixels for each of {len(self.paths)} images, got {len(self.pixels)}")
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
        """Image `index`, opened but, where it is a file, not yet decoded."""
        if self.pixels is not None:
            return Image.fromarray(self.pixels[index])
        return Image.open(Path(self.root or ".") / self.paths[index])

    def of_classes(self, classes: Sequence[int]) -> "ImageList":
        """The images of these classes alone, relabelled 0.. in the order in which the classes are given."""
        new_label = np.full(len(self.class_names), -1)
        new_label[np.asarray(classes, dtype=np.int64)] = np.arange(len(classes))
        chosen = np.flatnonzero(new_label[self.labels] >= 0)
        return ImageList(
            paths=[self.paths[i] for i in chosen],
            labels=new_label[self.labels[chosen]],
            class_names=tuple(self.class_names[c] for c in classes),
            root=self.root,
            pixels=None if self.pixels is None else self.pixels[chosen],
        )


def load(
    name: str, root: str | Path | None = None, *, size: int = 32, classes: int | None = None
) -> tuple[ImageList, ImageList]:
    """The training and the test images of a dataset, of classes that do not overlap.

    `size` is the side of drawn images (glyphs), in pixels; `classes` takes only that many classes of each.
    """
    if name == "glyphs":
        from proxygml.datasets import glyphs

        return glyphs.load(size=size, classes=classes)
    raise ValueError(f"expected a dataset among glyphs, got {name!r}")
