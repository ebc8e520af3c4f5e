"""Images that are passed as objects: an ImageList, a map-style Dataset, arrays or a pandas frame, whole or by split."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from proxygml.data import ImageList
from proxygml.data.lazy import LazyImages
from proxygml.data.splits import image_list, split_classes
from proxygml.files import did_you_mean

SPLITS = ("train", "test", "query", "gallery")
EXPECTED = "an ImageList, a Dataset of (image, label), arrays (images, labels), or a frame with path and label"


def _read_item(dataset: Any, row: int) -> Any:
    """The image of an item (image, label)."""
    return dataset[row][0]


def _read_either(first: Any, second: Any, row: int) -> Any:
    """An image of two sequences, one after the other."""
    return first[row] if row < len(first) else second[row - len(first)]


def load_objects(
    data: Any, *, test_fraction: float, progress: Callable[[int, int], None] | None = None
) -> tuple[ImageList, ImageList]:
    """Training and test images of an object.

    A mapping has the splits `train` and `test`, or `train`, `query` and `gallery`. A frame may have a column `split`
    with these words. Everything else is divided by class.
    """
    if hasattr(data, "columns") and "split" in data.columns:
        data = {split: data[data["split"] == split] for split in data["split"].unique()}
    if isinstance(data, Mapping):
        return _by_split({name: as_image_list(each, progress) for name, each in data.items()})
    images = as_image_list(data, progress)
    test_classes = split_classes(images.class_names, test_fraction)
    chosen = np.array([name in test_classes for name in images.class_names])
    return images.select_classes(np.flatnonzero(~chosen)), images.select_classes(np.flatnonzero(chosen))


def _by_split(splits: Mapping[str, ImageList]) -> tuple[ImageList, ImageList]:
    for name in splits:
        if name not in SPLITS:
            raise ValueError(f"expected data by split ({', '.join(SPLITS)}), got {name!r}{did_you_mean(name, SPLITS)}")
    given = set(splits) - {"train"}
    if "train" not in splits or given not in ({"test"}, {"query", "gallery"}, set()):
        raise ValueError(f"expected train with test, or with query and gallery, got {', '.join(splits)}")
    train = splits["train"]
    if not given:
        return train, train.select(np.empty(0, np.int64))
    if "test" in given:
        return train, splits["test"]
    return train, join_query_gallery(splits["query"], splits["gallery"])


def join_query_gallery(query: ImageList, gallery: ImageList) -> ImageList:
    """Test images of which the first, the queries, are searched for among the others."""
    parts = (query, gallery)
    classes = [part.class_names[label] for part in parts for label in part.labels]
    if query.pixels is not None and gallery.pixels is not None:
        paths = [
            f"{name}/{path}" for name, part in zip(("query", "gallery"), parts, strict=True) for path in part.paths
        ]
        read = partial(_read_either, query.pixels, gallery.pixels)
        joined = image_list(paths, classes, root=None, pixels=LazyImages(read, np.arange(len(paths))))
    else:
        paths = [os.path.abspath(part.file(row)) for part in parts for row in range(len(part))]
        joined = image_list(paths, classes, root=None)
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
    pixels = LazyImages(partial(_read_item, data), np.arange(len(labels)))
    _ = pixels[0]  # an image that no network can take is reported now
    return _numbered(labels, pixels)


def _labels_of(dataset: Any, progress: Callable[[int, int], None] | None) -> list:
    """The labels of a Dataset: its `targets`, as in torchvision, or read from every item."""
    targets = getattr(dataset, "targets", None)
    if targets is not None and len(targets) == len(dataset):
        return [_plain(target) for target in targets]
    labels = []
    for row in range(len(dataset)):
        item = dataset[row]
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise ValueError(f"expected items (image, label) of a Dataset, got {type(item).__name__} as item {row}")
        labels.append(_plain(item[1]))
        if progress is not None:
            progress(row + 1, len(dataset))
    return labels


def _from_arrays(images: Any, labels: Any) -> ImageList:
    """Arrays: images (M, H, W), (M, H, W, 3) or (M, 3, H, W), labels (M,)."""
    if len(images) != len(labels):
        raise ValueError(f"expected one label for each of {len(images)} images, got {len(labels)}")
    if np.ndim(images[0]) < 2 and not isinstance(images[0], Image.Image):
        raise ValueError("expected images, got vectors: ProxyGMLEmbedding trains on vectors")
    read = images.__getitem__
    return _numbered([_plain(label) for label in labels], LazyImages(read, np.arange(len(images))))


def _from_frame(frame: Any) -> ImageList:
    """A frame with a path and a label in every row."""
    if missing := {"path", "label"} - set(frame.columns):
        raise ValueError(f"expected a frame with columns path and label, it lacks {', '.join(sorted(missing))}")
    paths = [os.path.abspath(os.fspath(path)) for path in frame["path"]]
    if len(set(paths)) < len(paths):
        raise ValueError("expected every path once: an image is its own nearest neighbor")
    return image_list(paths, [_plain(label) for label in frame["label"]], root=None)


def _numbered(labels: list, pixels: LazyImages) -> ImageList:
    names = [f"{row:0{len(str(len(labels)))}d}" for row in range(len(labels))]
    return image_list(names, labels, root=None, pixels=pixels)


def _plain(label: Any) -> Any:
    """A label as a Python number or name: int or str."""
    label = label.item() if hasattr(label, "item") else label
    if isinstance(label, str) or (isinstance(label, int) and not isinstance(label, bool)):
        return label
    raise ValueError(f"expected labels as whole numbers or names, got {label!r}")
