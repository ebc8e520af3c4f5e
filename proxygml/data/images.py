"""Crops of images for training and evaluation, as arrays of one size, or their precomputed features."""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from PIL import Image

from proxygml.data import ImageList
from proxygml.data.decoding import Box, center_box, resize
from proxygml.files import one_line


@dataclass(frozen=True)
class Augmentation:
    """Random crops of training images: fraction of the area, aspect ratio, and horizontal flips."""

    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True


@dataclass(eq=False)
class Crops:
    """Item i is image i as uint8 (3, size, size) in RGB, and its label.

    `open_image(i)` returns the image; if it cannot be read, an OSError has `names[i]`. With an augmentation, the crop
    depends only on (seed, epoch, i), not on the order or the number of workers.
    """

    open_image: Callable[[int], Image.Image]
    labels: np.ndarray  # (M,)
    _: KW_ONLY
    size: int
    test_crop: float = 224 / 256
    augmentation: Augmentation | None = None
    seed: int = 0
    epoch: int = 0
    names: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        try:
            with self.open_image(index) as image:
                pixels = self._crop(image, index)  # (size, size, 3)
        except Exception as error:  # damaged bytes make each format raise other errors
            name = f"image {index}" if self.names is None else self.names[index]
            raise OSError(f"{name} cannot be read: {one_line(error)}") from error
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), int(self.labels[index])

    def _crop(self, image: Image.Image, index: int) -> np.ndarray:
        size = (self.size, self.size)
        if self.augmentation is None:
            return resize(image, center_box(*image.size, self.test_crop), size)
        rng = np.random.default_rng((self.seed, self.epoch, index))
        pixels = resize(image, random_box(*image.size, self.augmentation, rng), size)
        return pixels[:, ::-1] if self.augmentation.flip and rng.random() < 0.5 else pixels


class FeatureCrops:
    """Item i is the features (2, F) of one crop of image i, and its label.

    It is the center crop or, with a seed, one of the random crops, drawn in every epoch.
    """

    def __init__(self, features: np.ndarray, labels: np.ndarray, *, seed: int | None = None, epoch: int = 0) -> None:
        self.features, self.labels = features, labels  # (M, 1 + crops, 2, F), (M,)
        self.crops = np.zeros(len(labels), np.int64)  # (M,)
        if seed is not None:
            self.crops = np.random.default_rng((seed, epoch)).integers(1, features.shape[1], len(labels))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.features[index, self.crops[index]].astype(np.float32), int(self.labels[index])


def random_crops(
    images: ImageList, size: int, augmentation: Augmentation, *, seed: int, epoch: int
) -> Crops | FeatureCrops:
    """Items of a training epoch: random crops, or precomputed features of random crops."""
    if images.features is not None:
        return FeatureCrops(images.features, images.labels, seed=seed, epoch=epoch)
    return Crops(
        images.open, images.labels, size=size, augmentation=augmentation, seed=seed, epoch=epoch, names=images.paths
    )


def center_crops(images: ImageList, size: int, test_crop: float) -> Crops | FeatureCrops:
    """Items for evaluation: center crops, or precomputed features of center crops."""
    if images.features is not None:
        return FeatureCrops(images.features, images.labels)
    return Crops(images.open, images.labels, size=size, test_crop=test_crop, names=images.paths)


def random_box(width: int, height: int, augmentation: Augmentation, rng: np.random.Generator) -> Box:
    """A crop of random area and aspect ratio, as defined by torchvision's RandomResizedCrop."""
    lowest, highest = np.log(augmentation.crop_ratio)
    for _ in range(10):
        area = width * height * rng.uniform(*augmentation.crop_scale)
        ratio = math.exp(rng.uniform(lowest, highest))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(rng.integers(width - crop_width + 1))
            upper = int(rng.integers(height - crop_height + 1))
            return left, upper, left + crop_width, upper + crop_height
    # No crop fits, as in a very long image: use the largest center crop of an allowed aspect ratio.
    ratio = min(max(width / height, augmentation.crop_ratio[0]), augmentation.crop_ratio[1])
    crop_width, crop_height = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, upper = (width - crop_width) // 2, (height - crop_height) // 2
    return left, upper, left + crop_width, upper + crop_height
