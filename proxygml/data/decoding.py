"""Decode image files: one way for training, embedding, indexes, the page and exported networks.

`proxygml export` copies this file next to the network, so it needs only numpy and Pillow.
"""

import math
import stat
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose

# The first bytes decide, not the name. Other formats run programs: EPS starts Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "MPO", "TIFF", "GIF", "BMP", "PPM", "AVIF", "JPEG2000")
MAX_PIXELS = 200_000_000  # the largest photos of phones; up to 1.6 GB in memory, a JPEG less
Image.MAX_IMAGE_PIXELS = MAX_PIXELS  # Pillow warns above it; its own limit is 89 million
ORIENTATION = 0x0112  # EXIF tag
ROTATIONS = {  # to upright
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
Box = tuple[float, float, float, float]  # left, upper, right, lower in pixels


def open_image(file: str | Path | IO[bytes]) -> Image.Image:
    """The image in a file of one of FORMATS, opened but not yet decoded."""
    if isinstance(file, Path) and not stat.S_ISREG(file.stat().st_mode):
        raise OSError(f"{file} is not a regular file")  # opening a pipe would block
    try:
        image = Image.open(file, formats=_formats())
        if image.format == "PPM" and image.tile[0][0] == "ppm_plain":  # Pillow takes 30 s for 1 MB of comments
            image.close()
            raise UnidentifiedImageError("PPM as text is not read: save it as PNG")
        if math.prod(image.size) <= MAX_PIXELS:
            return image
        image.close()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        pass
    raise Image.DecompressionBombError(f"more than {MAX_PIXELS // 10**6} million pixels: make it smaller")


@lru_cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # some builds of Pillow lack AVIF


def center_box(width: int, height: int, fraction: float) -> Box:
    """The center square with a fraction of the shorter side: 224 / 256 is Resize(256) and CenterCrop(224)."""
    side = min(width, height) * fraction
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def resize(image: Image.Image, box: Box, size: tuple[int, int]) -> np.ndarray:
    """A box of an opened image, resized to (width, height), then turned upright: uint8 (height, width, 3) in RGB.

    Box and size are those of the image as stored, before the rotation by its EXIF orientation. If the box is larger
    than `size`, a JPEG that is not yet decoded is decoded at 1/2, 1/4 or 1/8 of its size.
    """
    width, height = image.size
    scale = max(size[0] / max(1.0, box[2] - box[0]), size[1] / max(1.0, box[3] - box[1]))
    image.draft(None, (math.ceil(width * scale), math.ceil(height * scale)))
    across, down = image.width / width, image.height / height
    box = (box[0] * across, box[1] * down, min(box[2] * across, image.width), min(box[3] * down, image.height))
    small = _to_rgb(_to_resizable(image).resize(size, Image.Resampling.BILINEAR, box=box), image)
    try:
        rotation = ROTATIONS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # the pixels may be intact although the metadata is damaged
        rotation = None
    return np.asarray(small if rotation is None else small.transpose(rotation))


def _to_resizable(image: Image.Image) -> Image.Image:
    """The first frame as RGB, RGBA or LA; 16-bit, 32-bit and float images unchanged."""
    mode = "RGBA" if image.has_transparency_data else "RGB"
    return image if image.mode in (mode, "LA", "I", "F") or image.mode.startswith("I;16") else image.convert(mode)


def _to_rgb(small: Image.Image, image: Image.Image) -> Image.Image:
    """A resized image as 8-bit RGB, with transparency on white.

    Integers of 16 or 32 bits go up to 65,535; floats up to 1, 255 or 65,535, whichever is the first not exceeded.
    """
    if small.mode == "RGB":
        return small
    if small.mode in ("RGBA", "LA"):
        return Image.alpha_composite(Image.new("RGBA", small.size, "white"), small.convert("RGBA")).convert("RGB")
    gray, top = np.asarray(small, np.float32), 65535
    if small.mode == "F":
        highest = np.fmax(image.getextrema()[1], np.fmax.reduce(gray, axis=None))  # NaN only in an image of NaN
        top = next((limit for limit in (1, 255) if highest <= limit), top)
    gray = np.nan_to_num(gray) * (255 / top)
    return Image.fromarray(gray.round().clip(0, 255).astype(np.uint8)).convert("RGB")
