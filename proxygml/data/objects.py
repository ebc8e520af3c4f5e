"""Images that are passed as objects: an ImageList, a map-style Dataset, arrays or a pandas frame, whole or by split."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from proxygml.data import ImageList
from proxygml.data.folder import images_below
from proxygml.data.lazy import LazyImages
from proxygml.data.splits import image_list, split_classes
from proxygml.files import did_you_mean, one_line, warn

SPLITS = ("train", "test", "query", "gallery")
EXPECTED = "an ImageList, a Dataset of (image, label), (images, labels), or a frame with path and label"


def _read_item(dataset: Any, row: int) -> Any:
    """The image of an item (image, label)."""
    return dataset[row][0]


def _open_either(first: ImageList, second: ImageList, row: int) -> Image.Image:
    """An image of two lists, one after the other."""
    return first.open(row) if row < len(first) else second.open(row - len(first))


def load_objects(
    data: Any, *, test_fraction: float, progress: Callable[[int, int], None] | None = None
) -> tuple[ImageList, ImageList]:
    """Training and test images of an object.

    A mapping has the splits `train` and `test`, or `train`, `query` and `gallery`. A frame may have a column `split`
    with these words. Everything else is divided by class.
    """
    if isinstance(data, (str, Path)):
        raise ValueError(f"expected {EXPECTED}, got a path: name it in the recipe, Recipe.preset('photos', data=...)")
    splits = by_split(data, progress)
    if isinstance(splits, ImageList):
        test_classes = split_classes(splits.class_names, test_fraction)
        chosen = np.array([name in test_classes for name in splits.class_names])
        return splits.select_classes(np.flatnonzero(~chosen)), splits.select_classes(np.flatnonzero(chosen))
    if "train" not in splits:
        raise ValueError(f"expected train with test, or with query and gallery, got {', '.join(splits)}")
    train = splits.pop("train")
    return train, join_splits(splits) if splits else train.select(np.empty(0, np.int64))


def labeled_images(data: Any) -> ImageList:
    """All images of an object or below a folder, or paths, which have no labels.

    Those of a split `query` are searched for in `gallery`.
    """
    if isinstance(data, (str, Path)):
        return images_below(Path(data))
    if isinstance(data, Sequence) and data and all(isinstance(each, (str, Path)) for each in data):
        return _from_paths(data, [""] * len(data))
    splits = by_split(data)
    return splits if isinstance(splits, ImageList) else join_splits(splits)


def by_split(data: Any, progress: Callable[[int, int], None] | None = None) -> ImageList | dict[str, ImageList]:
    """The images of an object, by split if it has splits."""
    if hasattr(data, "columns") and "split" in data.columns:
        data = {str(split): data[data["split"] == split] for split in data["split"].unique()}
    if not isinstance(data, Mapping):
        return as_image_list(data, progress)
    for name in data:
        if name not in SPLITS:
            raise ValueError(f"expected data by split ({', '.join(SPLITS)}), got {name!r}{did_you_mean(name, SPLITS)}")
    return {name: as_image_list(each, progress) for name, each in data.items()}


def join_splits(splits: dict[str, ImageList]) -> ImageList:
    """The images of a split, or of query and gallery: then the queries are searched for among the others."""
    if splits.keys() == {"query", "gallery"}:
        return join_query_gallery(splits["query"], splits["gallery"])
    if len(splits) > 1 or splits.keys() & {"query", "gallery"}:
        raise ValueError(f"expected train with test, or with query and gallery, got {', '.join(splits)}")
    (images,) = splits.values()
    return images


def join_query_gallery(query: ImageList, gallery: ImageList) -> ImageList:
    """Images of which the first, the queries, are searched for among the others."""
    parts = {"query": query, "gallery": gallery}
    in_query, in_gallery = ({part.class_names[label] for label in part.labels} for part in parts.values())
    if lone := sorted(in_query - in_gallery):
        what = f"{len(lone)} of {len(in_query)} query classes are not in the gallery, first {lone[0]}"
        warn(f"{what}: each of their images counts as a miss")
    classes = [part.class_names[label] for part in parts.values() for label in part.labels]
    if all(part.has_files for part in parts.values()):
        paths = [os.path.abspath(part.file(row)) for part in parts.values() for row in range(len(part))]
        joined = _from_paths(paths, classes)
    else:
        names = [f"{name}/{path}" for name, part in parts.items() for path in part.paths]
        pixels = LazyImages(partial(_open_either, query, gallery), np.arange(len(names)))
        joined = image_list(names, classes, root=None, pixels=pixels)
    return replace(joined, queries=np.arange(len(joined)) < len(query))


def as_image_list(data: Any, progress: Callable[[int, int], None] | None = None) -> ImageList:
    """Images with labels from any of the kinds of objects; labels may be numbers with gaps, or names."""
    if isinstance(data, ImageList):
        return data
    if hasattr(data, "columns"):
        return _from_frame(data)
    if isinstance(data, tuple) and len(data) == 2:
        return _from_arrays(*data)
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ValueError(f"expected {EXPECTED}, got {type(data).__name__}")
    labels = _labels_of(data, progress)
    if not len(labels):
        raise ValueError("expected images, got an empty dataset")
    return _numbered(labels, partial(_read_item, data))


def _labels_of(dataset: Any, progress: Callable[[int, int], None] | None) -> Sequence[Any]:
    """The labels of a Dataset: its `targets`, as in torchvision, or read from every item."""
    targets = getattr(dataset, "targets", None)
    if targets is not None and len(targets) == len(dataset):
        return targets
    labels = []
    for row in range(len(dataset)):
        try:
            item = dataset[row]
        except Exception as error:  # of any code
            what = f"item {row} of {type(dataset).__name__} cannot be read"
            raise ValueError(f"{what}: {type(error).__name__}: {one_line(error)}") from error
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise ValueError(f"expected items (image, label) of a Dataset, got {type(item).__name__} as item {row}")
        labels.append(item[1])
        if progress is not None:
            progress(row + 1, len(dataset))
    return labels


def _from_arrays(images: Any, labels: Any) -> ImageList:
    """Images (M, H, W), (M, H, W, 3) or (M, 3, H, W), or M paths, with labels (M,)."""
    if len(images) != len(labels):
        raise ValueError(f"expected one label for each of {len(images)} images, got {len(labels)}")
    if not len(images):
        raise ValueError("expected images, got none")
    if isinstance(images[0], (str, Path)):
        return _from_paths(images, _plain(labels))
    if np.ndim(images[0]) < 2 and not isinstance(images[0], Image.Image):
        raise ValueError("expected images, got vectors: ProxyGMLEmbedding trains on vectors")
    return _numbered(labels, images.__getitem__)


def _from_frame(frame: Any) -> ImageList:
    """A frame with a path and a label in every row."""
    if missing := {"path", "label"} - set(frame.columns):
        raise ValueError(f"expected a frame with columns path and label, it lacks {', '.join(sorted(missing))}")
    return _from_paths(frame["path"], _plain(frame["label"]))


def _from_paths(paths: Iterable[str | Path], labels: list) -> ImageList:
    absolute = [os.path.abspath(path) for path in paths]
    if len(set(absolute)) < len(absolute):
        raise ValueError("expected every path once: an image is its own nearest neighbor")
    return image_list(absolute, labels, root=None)


def _numbered(labels: Iterable[Any], read: Callable[[int], Any]) -> ImageList:
    """Images that are read by their row number, which is also their name."""
    labels = _plain(labels)
    pixels = LazyImages(read, np.arange(len(labels)))
    pixels.open(0).close()  # an image that no network can take is reported now
    names = [f"{row:0{len(str(len(labels)))}d}" for row in range(len(labels))]
    return image_list(names, labels, root=None, pixels=pixels)


def _plain(labels: Iterable[Any]) -> list:
    """Labels as Python numbers or as texts."""
    plain = [label.item() if hasattr(label, "item") and getattr(label, "ndim", 0) == 0 else label for label in labels]
    for kind in (int, str):
        if all(isinstance(label, kind) and not isinstance(label, bool) for label in plain):
            return plain
    kinds = {type(label): label for label in reversed(plain)}  # the first label of each type
    got = " and ".join(repr(label) for label in reversed(kinds.values()))
    raise ValueError(f"expected labels as whole numbers or as names, got {got}")
