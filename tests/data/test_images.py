"""Crops of images."""

import math

import numpy as np
import pytest

from proxygml.data.images import Augmentation, Crops, random_box
from tests.data.test_decoding import gradient


def test_area_and_ratio_of_random_crops() -> None:
    rng = np.random.default_rng(0)
    boxes = [random_box(400, 400, Augmentation(), rng) for _ in range(2000)]
    areas = [(right - left) * (lower - upper) / (400 * 400) for left, upper, right, lower in boxes]
    ratios = [(right - left) / (lower - upper) for left, upper, right, lower in boxes]
    assert 0.078 < min(areas) < 0.1
    assert 0.9 < max(areas) <= 1
    assert 0.73 < min(ratios) < 0.78
    assert 1.28 < max(ratios) < 1.37
    assert abs(np.mean(np.log(ratios))) < 0.02  # shapes are drawn on a logarithmic scale
    assert min(left for left, *_ in boxes) == 0
    assert max(right for *_, right, _ in boxes) == 400


@pytest.mark.parametrize("size", [(2000, 3), (3, 2000), (1, 1)])
def test_random_crop_of_a_very_long_image(size: tuple[int, int]) -> None:
    left, upper, right, lower = random_box(*size, Augmentation(), np.random.default_rng(0))
    assert 0 <= left < right <= size[0]
    assert 0 <= upper < lower <= size[1]


class TestCrops:
    def crops(self, **options: object) -> Crops:
        images = [gradient(40, 40), gradient(50, 30)]
        return Crops(lambda index: images[index], np.array([3, 1]), size=16, **options)

    def test_item(self) -> None:
        pixels, label = self.crops()[0]
        assert pixels.shape == (3, 16, 16)
        assert pixels.dtype == np.uint8
        assert label == 3
        assert pixels[0, 0, -1] > pixels[0, 0, 0]  # red grows to the right
        assert pixels[1, -1, 0] > pixels[1, 0, 0]  # green grows downwards

    def test_random_crops_depend_on_seed_epoch_and_index(self) -> None:
        def item(seed: int, epoch: int, index: int) -> bytes:
            return self.crops(augmentation=Augmentation(), seed=seed, epoch=epoch)[index][0].tobytes()

        assert item(0, 0, 0) == item(0, 0, 0)
        assert len({item(*at) for at in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}) == 4

    def test_flip(self) -> None:
        def mirrored(flip: bool) -> float:
            whole = Augmentation(crop_scale=(1, 1), crop_ratio=(1, 1), flip=flip)
            items = [self.crops(augmentation=whole, epoch=epoch)[0][0] for epoch in range(300)]
            return float(np.mean([bool(item[0, 0, 0] > item[0, 0, -1]) for item in items]))

        assert math.isclose(mirrored(True), 0.5, abs_tol=0.1)
        assert mirrored(False) == 0
