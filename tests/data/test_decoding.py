"""Decoding: one result for every format, mode and orientation."""

import io
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from proxygml.data import decoding
from proxygml.data.decoding import center_box, open_image, resize


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


def test_jpeg_is_decoded_at_a_reduced_scale() -> None:
    image = gradient(1600, 1200)
    box = (200.0, 100.0, 1400.0, 1000.0)
    small = resize(stored(image, "JPEG", quality=95), box, (64, 64))
    whole = resize(image, box, (64, 64))
    assert np.abs(small.astype(int) - whole).max() <= 6
    opened = stored(image, "JPEG")
    resize(opened, box, (64, 64))
    assert opened.width < 1600  # it was decoded at a smaller scale


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int, kind: str) -> None:
    upright = gradient(320, 200)
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
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this build of Pillow lacks AVIF")
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo = stored(turn(upright), kind, quality=98, exif=exif)
    result = resize(photo, (0, 0, *photo.size), (32, 20) if orientation < 5 or kind == "TIFF" else (20, 32))
    assert np.abs(result.astype(int) - np.asarray(upright.resize((32, 20), Image.Resampling.BILINEAR))).mean() < 4


def resized(image: Image.Image) -> np.ndarray:
    return resize(image, (0, 0, *image.size), image.size)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16", "I", "F", "YCbCr", "HSV"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    color = gradient(20, 10)
    grey = np.asarray(color.convert("L"))
    image = {
        "I;16": lambda: Image.fromarray(grey.astype(np.uint16) * 257),
        "I": lambda: Image.fromarray(grey.astype(np.int32) * 257),
        "F": lambda: Image.fromarray(grey.astype(np.float32)),
        "LA": lambda: color.convert("L").convert("LA"),
    }.get(mode, lambda: color.convert(mode))()
    result = resized(image)
    assert (result.shape, result.dtype) == ((10, 20, 3), np.uint8)
    if mode in ("L", "LA", "I;16", "I", "F"):
        np.testing.assert_allclose(result[..., 0], grey, atol=1)
    elif mode in ("RGBA", "CMYK", "YCbCr"):
        np.testing.assert_allclose(result, np.asarray(color), atol=3)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bits_are_scaled_alike_however_dark_the_image_is(kind: str) -> None:
    for brightest in (200, 255, 256, 65535):
        deep = np.linspace(0, brightest, 200).reshape(10, 20).astype(np.uint16)
        result = resized(stored(Image.fromarray(deep), kind))
        np.testing.assert_allclose(result[..., 0], deep / 257, atol=0.51)


@pytest.mark.parametrize("top", [1, 255, 65535])
def test_float_tiff_of_any_usual_range(top: int) -> None:
    values = np.linspace(0, top, 200, dtype=np.float32).reshape(10, 20)
    values[0, 0] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = resized(stored(Image.fromarray(values), "TIFF"))
    np.testing.assert_allclose(result[1:, 1:, 0], values[1:, 1:] * 255 / top, atol=0.51)
    assert result[0, 0, 0] == 0


def test_transparency_is_white_and_an_animation_its_first_frame() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert resized(clear).min() == 255
    named = Image.new("RGB", (4, 4), (9, 9, 9))
    named.info["transparency"] = (9, 9, 9)
    assert resized(named).min() == 255
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    red, _, blue = resized(stored(first, "GIF", save_all=True, append_images=[second]))[0, 0]
    assert red > 200 > 50 > blue


@pytest.mark.slow
def test_photo_of_100_megapixels_is_read(tmp_path: Path) -> None:
    Image.new("RGB", (12_000, 9_000), "red").save(tmp_path / "photo.jpg")
    with open_image(tmp_path / "photo.jpg") as photo:
        assert resize(photo, center_box(*photo.size, 0.875), (8, 8))[0, 0, 0] > 250
        assert photo.size == (1500, 1125)  # a few megabytes


def test_larger_photos_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("L", (30, 20)).save(tmp_path / "photo.png")
    for pillow, limit in ((100, 10**6), (None, 599), (500, 599)):  # Pillow's own error, none, its warning
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow)
        monkeypatch.setattr(decoding, "MAX_PIXELS", limit)
        with pytest.raises(Image.DecompressionBombError, match=r"^more than \d+ million pixels: make it smaller$"):
            open_image(tmp_path / "photo.png")


def test_decoder_imports_only_numpy_and_pillow() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print('torch' in sys.modules, 'proxygml' in sys.modules)"
    command = [sys.executable, "-c", code, decoding.__file__]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]


def test_ppm_as_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ppm").write_text("P3 2 1 255\n1 2 3 4 5 6\n")
    with pytest.raises(OSError, match="PPM as text is not read"):
        open_image(tmp_path / "a.ppm")
