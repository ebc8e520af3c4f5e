"""ImageList: images with labels."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxygml.data import ImageList, load


def three_classes() -> ImageList:
    pixels = np.arange(5, dtype=np.uint8)[:, None, None] * np.ones((5, 4, 4), np.uint8)
    return ImageList(["a", "b", "c", "d", "e"], np.array([0, 1, 1, 2, 0]), ("x", "y", "z"), pixels=pixels)


def test_images_open_from_memory_or_from_files(tmp_path: Path) -> None:
    assert three_classes().open(3).getpixel((0, 0)) == 3
    Image.new("RGB", (3, 2), "red").save(tmp_path / "r.png")
    on_disk = ImageList(["r.png"], np.array([0]), ("red",), root=tmp_path)
    with on_disk.open(0) as image:
        assert image.size == (3, 2)


def test_select_classes() -> None:
    chosen = three_classes().select_classes([2, 0])
    assert chosen.paths == ["a", "d", "e"]
    assert chosen.labels.tolist() == [0, 1, 0]
    assert chosen.class_names == ("x", "z")
    assert chosen.open(1).getpixel((0, 0)) == 3


def test_select() -> None:
    chosen = three_classes().select(np.array([1, 3]))
    assert chosen.paths == ["b", "d"]
    assert chosen.labels.tolist() == [0, 1]
    assert chosen.class_names == ("y", "z")
    assert chosen.open(1).getpixel((0, 0)) == 3


def test_limit_class_size() -> None:
    images = ImageList(list("abcdefg"), np.array([1, 0, 1, 1, 0, 0, 0]), ("x", "y"))
    assert images.limit_class_size(2).paths == ["a", "b", "c", "e"]
    assert images.limit_class_size(2).labels.tolist() == [1, 0, 1, 0]
    assert images.limit_class_size(3).paths == ["a", "b", "c", "d", "e", "f"]
    assert images.limit_class_size(99).paths == images.paths


def test_load_with_max_class_size() -> None:
    whole, some = (load("glyphs", classes=5, max_class_size=most) for most in (None, 3))
    for all_images, first in zip(whole, some, strict=True):
        assert np.bincount(first.labels).tolist() == [3] * 5
        assert first.class_names == all_images.class_names
        assert set(first.paths) <= set(all_images.paths)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2, 2], "one label for each of 5 images, got 4"),
        ([0, 1, 3, 2, 2], "expected labels 0..2"),
        ([0, 0, 2, 2, 2], "with an image in each of the 3 classes, got 2 different labels"),
        ([-1, 0, 1, 2, 2], "expected labels 0..2"),
    ],
)
def test_invalid_labels(labels: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageList(["a", "b", "c", "d", "e"], np.array(labels), ("x", "y", "z"))


def test_unknown_dataset() -> None:
    with pytest.raises(ValueError, match=r"a dataset, got 'mnist'.*known: glyphs"):
        load("mnist")
