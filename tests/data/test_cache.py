"""The cache of shrunk photos."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxygml.data import ImageList, cache
from proxygml.data.cache import Cache, shrink
from proxygml.data.images import Crops
from tests.data.test_decoding import gradient

PLENTY = 10**9
COPY = 32 * 48 * 3  # bytes of a copy of 32 pixels, without its header


def photos(root: Path, count: int = 3, size: tuple[int, int] = (240, 160)) -> ImageList:
    root.mkdir(exist_ok=True)
    for number in range(count):
        gradient(*size).save(root / f"{number}.jpg", quality=95)
    return ImageList([f"{number}.jpg" for number in range(count)], np.arange(count), tuple("abcdef"[:count]), root)


@pytest.fixture
def images(tmp_path: Path) -> ImageList:
    return photos(tmp_path / "photos")


@pytest.fixture
def copies(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", side=32)


def size_of(copies: Cache, images: ImageList, index: int) -> tuple[int, int]:
    with copies.open(images.file(index)) as image:
        return image.size


def test_copy_is_the_shrunk_photo(copies: Cache, images: ImageList) -> None:
    assert copies.fill(images, PLENTY) == []
    assert len(list(copies.folder.iterdir())) == 3
    copy = copies.open(images.file(0))
    assert copy.size == (48, 32)
    assert np.abs(np.asarray(copy, dtype=int) - np.asarray(gradient(48, 32))).max() <= 10


def test_crops_equal_crops_of_photos(copies: Cache, images: ImageList) -> None:
    copies.fill(images, PLENTY)
    ours, _ = Crops(replace(images, open_file=copies.open).open, images.labels, size=16)[1]
    theirs, _ = Crops(images.open, images.labels, size=16)[1]
    assert np.abs(ours.astype(int) - theirs).max() <= 10


def test_copy_is_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    gradient(240, 160).transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.jpg", quality=95, exif=exif)
    with Image.open(tmp_path / "turned.jpg") as photo:
        copy = shrink(photo, 32)
    assert copy.shape == (32, 48, 3)
    assert np.abs(copy.astype(int) - np.asarray(gradient(48, 32))).max() <= 10


def test_small_photo_has_no_copy(copies: Cache, tmp_path: Path) -> None:
    images = photos(tmp_path / "photos", size=(48, 32))
    assert copies.fill(images, PLENTY) == []
    assert list(copies.folder.iterdir()) == []
    assert size_of(copies, images, 0) == (48, 32)


def test_photo_is_decoded_once(copies: Cache, images: ImageList, monkeypatch: pytest.MonkeyPatch) -> None:
    copies.fill(images, PLENTY)
    monkeypatch.setattr(cache, "shrink", lambda *_: pytest.fail("it was decoded again"))
    assert copies.fill(images, PLENTY) == []


def test_changed_photo_gets_a_new_copy(copies: Cache, images: ImageList) -> None:
    copies.fill(images, PLENTY)
    old = copies.copy_path(images.file(1))
    Image.new("RGB", (240, 160), "white").save(images.root / "1.jpg")
    assert copies.copy_path(images.file(1)) != old
    assert size_of(copies, images, 1) == (240, 160)  # the photo itself: never the old copy
    copies.fill(images, PLENTY)
    assert np.asarray(copies.open(images.file(1))).min() > 250
    os.utime(images.root / "1.jpg", ns=(0, 0))
    assert size_of(copies, images, 1) == (240, 160)


def test_fill_reports_broken_photos(copies: Cache, images: ImageList) -> None:
    whole = (images.root / "1.jpg").read_bytes()
    (images.root / "1.jpg").write_bytes(whole[: len(whole) // 2])
    (images.root / "2.jpg").unlink()
    problems = copies.fill(images, PLENTY)
    assert [problem.index for problem in problems] == [1, 2]
    assert problems[0].reason.startswith("truncated")
    assert problems[1].reason.startswith("missing")


def test_damaged_copy_is_ignored(copies: Cache, images: ImageList) -> None:
    copies.fill(images, PLENTY)
    for damage in (b"", b"nonsense", copies.copy_path(images.file(0)).read_bytes()[:500]):
        copies.copy_path(images.file(0)).write_bytes(damage)
        assert size_of(copies, images, 0) == (240, 160)


def test_max_bytes(copies: Cache, images: ImageList) -> None:
    with pytest.warns(UserWarning, match="no space in .* for 1 of 3 images"):
        copies.fill(images, 2 * COPY + 500)
    assert sorted(size_of(copies, images, index) for index in range(3)) == [(48, 32), (48, 32), (240, 160)]


def test_full_disk(copies: Cache, images: ImageList, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.warns(UserWarning, match="no space in .* for 3 of 3 images"):
        assert copies.fill(images, PLENTY) == []
    assert list(copies.folder.iterdir()) == []
    assert size_of(copies, images, 0) == (240, 160)


def test_pickle(copies: Cache, images: ImageList) -> None:
    copies.fill(images, PLENTY)
    assert size_of(pickle.loads(pickle.dumps(copies)), images, 0) == (48, 32)
