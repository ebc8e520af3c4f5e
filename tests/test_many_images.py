"""Very many images: training begins without a look at all of them, and one that cannot be read is told by name."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from proxygml import ingredients
from proxygml.cache import Cache
from proxygml.datasets import ImageList, open_image
from proxygml.images import Crops
from proxygml.loading import loaded
from proxygml.recipes import Recipe

MANY, SAMPLE = 40, 5
RECIPE = Recipe(image_size=8)


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageList:
    """As many images as are too many here, in four classes."""
    monkeypatch.setattr(ingredients, "MOST_CHECKED", MANY - 1)
    monkeypatch.setattr(ingredients, "SAMPLE", SAMPLE)
    for number in range(MANY):
        Image.new("RGB", (32, 32), (5 * number, 0, 0)).save(tmp_path / f"{number}.png")
    names = [f"{number}.png" for number in range(MANY)]
    return ImageList(names, np.arange(MANY) % 4, tuple("abcd"), root=tmp_path)


def told(images: ImageList, recipe: Recipe = RECIPE, cache: Cache | None = None, **how: bool) -> tuple[int, int]:
    """How many images are left, and how many were looked at."""
    seen = []
    kept, _ = ingredients.usable(images, recipe, cache, lambda done, total: seen.append(total), **how)
    return len(kept), seen[-1]


def test_of_many_images_only_some_are_decoded_before_training(many: ImageList) -> None:
    assert told(many, soon=True) == (MANY, SAMPLE)
    assert told(many.only(np.arange(MANY - 1)), soon=True) == (MANY - 1, MANY - 1)


def test_whoever_is_in_no_hurry_decodes_all(many: ImageList) -> None:
    assert told(many) == (MANY, MANY)


def test_whoever_skips_broken_images_decodes_all_to_find_them(many: ImageList) -> None:
    many.file(7).write_bytes(b"no image")
    assert told(many, RECIPE.changed({"skip_broken": True}), soon=True) == (MANY - 1, MANY)


def test_a_wrong_folder_shows_in_the_sample(many: ImageList, tmp_path: Path) -> None:
    for number in range(MANY):
        many.file(number).unlink()
    with pytest.raises(ValueError, match=r"5 of 5 images cannot be read, first .*missing: no such file"):
        told(many, soon=True)


def test_a_cache_too_small_for_many_photos_is_not_filled(many: ImageList, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", side=16)
    small = RECIPE.changed({"cache_gigabytes": (cache.least_bytes(MANY) - 1) / 2**30})
    with pytest.warns(UserWarning, match="40 photos have no room in .* GB: .* raise cache_gigabytes"):
        assert told(many, small, cache, soon=True) == (MANY, SAMPLE)
    assert not cache.folder.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the disk has little room left
        told(many, RECIPE, cache, soon=True)
    assert cache.folder.exists()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.write_bytes(b"no image"), "cannot identify"),
        (lambda file: file.write_bytes(file.read_bytes()[:60]), "truncated|broken|end of|not enough"),
    ],
    ids=["gone", "no image", "cut short"],
)
def test_an_image_that_cannot_be_read_in_training_is_told_in_one_line(
    many: ImageList, workers: int, damage: object, reason: str
) -> None:
    damage(many.file(3))
    crops = Crops(many.open, many.labels, size=8, names=many.paths)
    with pytest.raises(OSError, match=f"^3.png cannot be read any more: .*(?i:{reason})") as caught:
        list(loaded(DataLoader(crops, batch_size=10, num_workers=workers)))
    assert "\n" not in str(caught.value)


def test_an_image_is_opened_as_ever_where_nothing_is_wrong(many: ImageList) -> None:
    crops = Crops(many.open, many.labels, size=8, names=many.paths)
    batches = list(loaded(DataLoader(crops, batch_size=10)))
    assert [len(images) for images, _ in batches] == [10] * 4
    with open_image(many.file(3)) as image:
        assert image.getpixel((0, 0)) == (15, 0, 0)
    assert batches[0][0][3, 0].unique().tolist() == [15]
