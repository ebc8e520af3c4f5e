"""Images that are read one by one from an object, as arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image


class LazyImages:
    """Images that are read one by one: item i is `read(rows[i])` as uint8 (H, W) or (H, W, 3)."""

    def __init__(self, read: Callable[[int], Any], rows: np.ndarray) -> None:
        self.read, self.rows = read, rows  # (M,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """One image, or some of the images."""
        if isinstance(index, (int, np.integer)):
            return as_pixels(self.read(int(self.rows[index])))
        return LazyImages(self.read, self.rows[index])


def as_pixels(image: Any) -> np.ndarray:
    """An image as uint8 (H, W) or (H, W, 3): from a PIL image, or an array or tensor of bytes or of floats in 0..1."""
    if isinstance(image, Image.Image):
        return np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        pixels = pixels.transpose(1, 2, 0)  # as tensors have it
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ValueError(f"expected images as (H, W), (H, W, 3) or (3, H, W), got an array {pixels.shape}")
    if pixels.dtype == np.uint8:
        return pixels
    low, high = pixels.min(), pixels.max()
    if pixels.dtype.kind != "f" or not (low >= 0 and high <= 1):
        raise ValueError(
            f"expected images as uint8, or as floats in 0..1, got {pixels.dtype} in {low:.3g}..{high:.3g}: leave out "
            "transforms that normalize, the network does that"
        )
    return np.round(pixels * 255).astype(np.uint8)
