"""Images that are read one by one from objects: paths, PIL images, arrays or tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from proxygml.data.decoding import open_image


class LazyImages:
    """Images that are read one by one: image i is `read(rows[i])`."""

    def __init__(self, read: Callable[[int], Any], rows: np.ndarray) -> None:
        self.read, self.rows = read, rows  # (M,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices: np.ndarray) -> "LazyImages":
        """Only these images."""
        return LazyImages(self.read, self.rows[indices])

    def open(self, index: int) -> Image.Image:
        """Image `index`."""
        item = self.read(int(self.rows[index]))
        return item.copy() if isinstance(item, Image.Image) else to_image(item)  # a crop may shrink what it decodes


def to_image(item: Any) -> Image.Image:
    """A path, PIL image, array or tensor as an image."""
    if isinstance(item, (str, Path)):
        return open_image(Path(item))
    return item if isinstance(item, Image.Image) else Image.fromarray(as_pixels(item))


def as_pixels(image: Any) -> np.ndarray:
    """An array or tensor of bytes, or of floats in 0..1, as uint8 (H, W) or (H, W, 3)."""
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        pixels = pixels.transpose(1, 2, 0)  # as tensors have it
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ValueError(f"expected images as (H, W), (H, W, 3) or (3, H, W), got an array {pixels.shape}")
    if pixels.dtype == np.uint8:
        return pixels
    low, high = (float(extreme) for extreme in (pixels.min(), pixels.max()))
    if pixels.dtype.kind == "f" and low >= 0 and high <= 1:
        return np.round(pixels * 255).astype(np.uint8)
    raise ValueError(
        f"expected images as uint8, or as floats in 0..1, got {pixels.dtype} in {low:.3g}..{high:.3g}: leave out "
        "transforms that normalize, the network does that"
    )
