"""Splits by class: training and test images, and classes held out to choose the best epoch."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TypeVar

import numpy as np

from proxygml.data import ImageList
from proxygml.data.lazy import LazyImages

MIN_HELD_OUT = 10  # classes; fewer choose the best epoch by chance
Class = TypeVar("Class", str, int)  # a name or an id


def image_list(
    paths: Sequence[str],
    classes: Sequence[Class],
    *,
    root: Path | None,
    class_names: Mapping[Class, str] | None = None,
    pixels: np.ndarray | LazyImages | None = None,
) -> ImageList:
    """Image i is `paths[i]` of class `classes[i]`; the labels 0..C-1 follow the sorted classes.

    `class_names` maps ids to names; without it, a class is its own name.
    """
    present = sorted(set(classes))
    labels = {name: label for label, name in enumerate(present)}
    return ImageList(
        paths=paths,
        labels=np.fromiter((labels[name] for name in classes), dtype=np.int64, count=len(classes)),  # (M,)
        class_names=tuple(str(name) if class_names is None else class_names[name] for name in present),
        root=root,
        pixels=pixels,
    )


def split_images(
    paths: Sequence[str],
    classes: Sequence[Class],
    is_test: Sequence[bool],
    *,
    root: Path,
    class_names: Mapping[Class, str] | None = None,
    no_test: bool = False,
) -> tuple[ImageList, ImageList]:
    """Training images and test images, each made by `image_list`; `no_test` allows none to test on."""
    tests = sum(is_test)
    if tests == len(paths) or not (tests or no_test):
        raise ValueError(
            f"{root}: expected training images and test images, got {len(paths) - tests} and {tests}: "
            "the list is truncated or has only one split"
        )
    train, test = (
        image_list(list(compress(paths, chosen)), list(compress(classes, chosen)), root=root, class_names=class_names)
        for chosen in (np.logical_not(is_test), is_test)
    )
    return train, test


def split_by_class(
    paths: Sequence[str], classes: Sequence[str], test_fraction: float, *, root: Path
) -> tuple[ImageList, ImageList]:
    """Training images and test images; those of `split_classes` are for testing."""
    test_classes = split_classes(classes, test_fraction)
    return split_images(paths, classes, [name in test_classes for name in classes], root=root, no_test=True)


def split_classes(names: Iterable[str], test_fraction: float) -> set[str]:
    """The test classes: `test_fraction` of them, at least one, leaving two for training if there are three; none for 0.

    They are the first by a hash of the name, so a new class moves at most one other to the other side.
    """
    names = set(names)
    if not 0 <= test_fraction < 1:
        raise ValueError(
            f"expected test_fraction from 0 to below 1, got {test_fraction}: 0.5 tests on half the classes"
        )
    if test_fraction == 0:
        return set()
    if len(names) < 2:
        raise ValueError(f"expected at least 2 classes to divide into train and test, got {len(names)}")
    count = max(min(round(test_fraction * len(names)), len(names) - 2), 1)

    def digest(name: str) -> bytes:
        return hashlib.sha256(f"0/{name}".encode("utf-8", "surrogatepass")).digest()  # names need not be UTF-8

    return set(sorted(names, key=digest)[:count])


def hold_out(images: ImageList, fraction: float) -> tuple[ImageList, ImageList | None]:
    """Images of the training classes and of the held-out classes; None, and all trained, if those are too few."""
    classes = len(images.class_names)
    if classes < 2:
        raise ValueError(
            "expected at least two classes to train on, got one: add classes, or test on none (--test-fraction 0)"
        )
    count = round(fraction * classes)
    if count < MIN_HELD_OUT:
        return images, None
    if classes - count < 2:
        raise ValueError(f"held_out {fraction} leaves {classes - count} of {classes} classes to train on: lower it")
    order = np.random.default_rng(0).permutation(classes)  # the same classes for every seed, so that seeds compare
    return images.select_classes(order[count:]), images.select_classes(order[:count])
