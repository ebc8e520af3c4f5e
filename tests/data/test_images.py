"""Decoding and cropping of images."""

import io
import math

import numpy as np
import pytest
from PIL import Image

from proxygml.data.images import Augmentation, Crops, as_rgb, center_box, random_box, resize, upright_size


def gradient(width: int, height: int) -> Image.Image:
    """Red increases to the right, green increases downwards."""
    across = np.broadcast_to(np.linspace(0, 255, width)[None, :], (height, width))
    down = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    return Image.fromarray(np.stack([across, down, np.full_like(across, 128)], axis=-1).astype(np.uint8))


def stored(image: Image.Image, kind: str, **options: object) -> Image.Image:
    """The image after a trip through a file, opened and not decoded."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Image.open(file)


def test_center_crop_is_resize_256_and_crop_224() -> None:
    assert center_box(256, 256, 224 / 256) == (16, 16, 240, 240)
    assert center_box(512, 256, 224 / 256) == (144, 16, 368, 240)
    image = gradient(300, 200)
    ours = resize(image, center_box(300, 200, 224 / 256), (224, 224))
    whole = image.resize((384, 256), Image.Resampling.BILINEAR)
    reference = np.asarray(whole.crop((80, 16, 304, 240)))
    assert ours.shape == (224, 224, 3)
    assert np.abs(ours.astype(int) - reference).max() <= 3  # one step of rounding instead of two


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


def test_jpeg_is_decoded_at_a_reduced_scale() -> None:
    image = gradient(1600, 1200)
    box = (200.0, 100.0, 1400.0, 1000.0)
    small = resize(stored(image, "JPEG", quality=95), box, (64, 64))
    whole = resize(image, box, (64, 64))
    assert np.abs(small.astype(int) - whole).max() <= 6
    opened = stored(image, "JPEG")
    resize(opened, box, (64, 64))
    assert opened.width < 1600  # it was decoded at a smaller scale


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int) -> None:
    upright = gradient(60, 40)
    turn = {
        1: lambda x: x,
        2: lambda x: x.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda x: x.transpose(Image.Transpose.ROTATE_180),
        4: lambda x: x.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda x: x.transpose(Image.Transpose.TRANSPOSE),
        6: lambda x: x.transpose(Image.Transpose.ROTATE_90),
        7: lambda x: x.transpose(Image.Transpose.TRANSVERSE),
        8: lambda x: x.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo = stored(turn(upright), "JPEG", quality=98, exif=exif)
    assert upright_size(photo) == (60, 40)
    result = resize(photo, (0, 0, 60, 40), (32, 32))
    expected = resize(upright, (0, 0, 60, 40), (32, 32))
    assert np.abs(result.astype(int) - expected).mean() < 4


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16", "I", "F", "YCbCr", "HSV"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    color = gradient(20, 10)
    grey16 = (np.asarray(color.convert("L"), dtype=np.uint16) * 257).astype(np.uint16)
    image = {
        "I;16": lambda: Image.fromarray(grey16),
        "I": lambda: Image.fromarray(grey16.astype(np.int32)),
        "F": lambda: Image.fromarray(np.asarray(color.convert("L"), dtype=np.float32)),
        "LA": lambda: color.convert("L").convert("LA"),
    }.get(mode, lambda: color.convert(mode))()
    result = as_rgb(image)
    assert result.mode == "RGB"
    if mode in ("L", "LA", "I;16", "I", "F"):
        np.testing.assert_allclose(np.asarray(result)[..., 0], np.asarray(color.convert("L")), atol=1)


def test_transparency_and_animation() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert as_rgb(clear).getpixel((0, 0)) == (255, 255, 255)
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    animated = stored(first, "GIF", save_all=True, append_images=[second])
    red, _, blue = resize(animated, (0, 0, 8, 8), (4, 4))[0, 0]
    assert red > 200 > 50 > blue


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
