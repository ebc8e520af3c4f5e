"""Unreadable images, and very many images: sampled before training, reported by name during it."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from proxygml.data import ImageList, readable
from proxygml.data.cache import Cache
from proxygml.data.images import Crops
from proxygml.data.loading import load_batches

COUNT, SAMPLE = 40, 5


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageList:
    """One image more than MAX_CHECKED, in four classes."""
    monkeypatch.setattr(readable, "MAX_CHECKED", COUNT - 1)
    monkeypatch.setattr(readable, "SAMPLE", SAMPLE)
    names = [f"{number}.png" for number in range(COUNT)]
    for number, name in enumerate(names):
        Image.new("RGB", (32, 32), (5 * number, 0, 0)).save(tmp_path / name)
    return ImageList(names, np.arange(COUNT) % 4, tuple("abcd"), root=tmp_path)


def counts(images: ImageList, **options: object) -> tuple[int, int]:
    """How many images are kept, and how many were decoded."""
    totals = []
    kept = readable.readable_images(images, progress=lambda done, total: totals.append(total), **options)
    return len(kept), totals[-1]


def test_long_lists_are_sampled(images: ImageList) -> None:
    assert counts(images, sample=True) == (COUNT, SAMPLE)
    assert counts(images.select(np.arange(COUNT - 1)), sample=True) == (COUNT - 1, COUNT - 1)
    assert counts(images) == (COUNT, COUNT)


def test_skip_broken_decodes_all(images: ImageList) -> None:
    images.file(7).write_bytes(b"no image")
    assert counts(images, sample=True, skip_broken=True) == (COUNT - 1, COUNT)


def test_sample_detects_a_wrong_folder(images: ImageList) -> None:
    for number in range(COUNT):
        images.file(number).unlink()
    with pytest.raises(ValueError, match=r"5 of 5 images cannot be read, first .*missing: no such file"):
        counts(images, sample=True)


def test_small_cache_is_not_filled(images: ImageList, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", side=16)
    size = cache.min_bytes(COUNT)
    with pytest.warns(UserWarning, match="40 photos do not fit in .* GB .* raise cache_gigabytes"):
        assert counts(images, cache=cache, max_bytes=size - 1, sample=True) == (COUNT, SAMPLE)
    assert not cache.folder.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the disk may be almost full
        counts(images, cache=cache, max_bytes=size, sample=True)
    assert cache.folder.exists()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.write_bytes(b"no image"), "cannot identify"),
        (lambda file: file.write_bytes(file.read_bytes()[:60]), "truncated|broken|end of|not enough"),
    ],
    ids=["missing", "no image", "truncated"],
)
def test_read_error_in_training_names_the_image(images: ImageList, workers: int, damage: object, reason: str) -> None:
    damage(images.file(3))
    crops = Crops(images.open, images.labels, size=8, names=images.paths)
    with pytest.raises(OSError, match=f"^3.png cannot be read: .*(?i:{reason})") as caught:
        list(load_batches(DataLoader(crops, batch_size=10, num_workers=workers)))
    assert "\n" not in str(caught.value)
