"""From an opened image to an array of one size: decode, turn, crop, mirror.

Without torch, so that exported networks can be run where it is not installed; DataLoader makes tensors of the arrays.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from PIL.Image import Transpose

from proxygml.data import ImageList

Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels of the source
TURNS = {  # what makes an image upright, by how the camera was held
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Augmentation:
    """How training images vary: the area and shape of a random crop, and whether mirror images are alike."""

    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True


class Crops:
    """Item i is image i as uint8 (3, size, size) in RGB, and its label.

    `open_image(i)` gives the image, decoded or not; one that cannot be read is an OSError with its name among `names`.
    With an augmentation, what is cut from image i depends on (seed, epoch, i) alone: neither the order nor the number
    of workers changes it.
    """

    def __init__(
        self,
        open_image: Callable[[int], Image.Image],
        labels: np.ndarray,
        *,
        size: int,
        test_crop: float = 224 / 256,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        epoch: int = 0,
        names: Sequence[str] | None = None,
    ) -> None:
        self.open_image = open_image
        self.labels = labels
        self.names = names
        self.size = size
        self.test_crop = test_crop
        self.augmentation = augmentation
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        try:
            with self.open_image(index) as image:
                pixels = self._cut(image, index)  # (size, size, 3)
        except Exception as error:  # on damaged bytes each format raises whatever its parser stumbles over
            called = f"image {index}" if self.names is None else self.names[index]
            said = " ".join(str(error).split()) or type(error).__name__
            raise OSError(f"{called} cannot be read any more: {said}") from error
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), int(self.labels[index])

    def _cut(self, image: Image.Image, index: int) -> np.ndarray:
        augmentation = self.augmentation
        if augmentation is None:
            return cut(image, lambda width, height: center_box(width, height, self.test_crop), self.size)
        random = np.random.default_rng((self.seed, self.epoch, index))
        pixels = cut(image, lambda width, height: random_box(width, height, augmentation, random), self.size)
        return pixels[:, ::-1] if augmentation.flip and random.random() < 0.5 else pixels


class FeatureCrops:
    """Item i is the features (2, F) of one crop of image i, and its label.

    That is the center crop or, with a seed, one of the random crops, drawn anew in every epoch.
    """

    def __init__(self, features: np.ndarray, labels: np.ndarray, *, seed: int | None = None, epoch: int = 0) -> None:
        self.features, self.labels = features, labels  # (M, 1 + crops, 2, F), (M,)
        self.chosen = np.zeros(len(labels), np.int64)  # (M,)
        if seed is not None:
            self.chosen = np.random.default_rng((seed, epoch)).integers(1, features.shape[1], len(labels))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.features[index, self.chosen[index]].astype(np.float32), int(self.labels[index])


def random_crops(
    images: ImageList, size: int, augmentation: Augmentation, *, seed: int, epoch: int
) -> Crops | FeatureCrops:
    """Images as a network sees them in an epoch of training: random crops, or precomputed features of random crops."""
    if images.features is not None:
        return FeatureCrops(images.features, images.labels, seed=seed, epoch=epoch)
    return Crops(
        images.open, images.labels, size=size, augmentation=augmentation, seed=seed, epoch=epoch, names=images.paths
    )


def center_crops(images: ImageList, size: int, test_crop: float) -> Crops | FeatureCrops:
    """Images as a trained network sees them: center crops, or precomputed features of center crops."""
    if images.features is not None:
        return FeatureCrops(images.features, images.labels)
    return Crops(images.open, images.labels, size=size, test_crop=test_crop, names=images.paths)


def cut(image: Image.Image, choose_box: Callable[[int, int], Box], size: int) -> np.ndarray:
    """The box that `choose_box(width, height)` gives, resized in one step: uint8 (size, size, 3) in RGB."""
    return resized(image, choose_box(*upright_size(image)), (size, size))


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height once the image is turned as its camera says."""
    if image.format == "TIFF":
        image.load()  # which turns it, and forgets that it did
    return image.size[::-1] if _turned(image) >= 5 else image.size


def resized(image: Image.Image, box: Box, size: tuple[int, int]) -> np.ndarray:
    """A box of the upright image at a size of (width, height): uint8 (height, width, 3) in RGB.

    Where the box is larger than what is wanted of it, a JPEG is decoded at half, a quarter or an eighth.
    """
    full_width, _ = upright_size(image)
    if image.format == "JPEG":
        share = max(size[0] / max(1.0, box[2] - box[0]), size[1] / max(1.0, box[3] - box[1]))
        image.draft("RGB", (math.ceil(image.width * share), math.ceil(image.height * share)))
    held = _turned(image)
    if held > 1:
        image = image.transpose(TURNS[held])
    left, upper, right, lower = (edge * image.width / full_width for edge in box)
    box = (left, upper, min(right, image.width), min(lower, image.height))
    return np.asarray(as_rgb(image).resize(size, Image.Resampling.BILINEAR, box=box))


def _turned(image: Image.Image) -> int:
    """How the camera was held: 1 upright, 2 to 4 mirrored or upside down, 5 to 8 on its side."""
    if image.format not in ("JPEG", "TIFF", "WEBP", "PNG", "MPO"):
        return 1
    try:
        held = image.getexif().get(0x0112, 1)
    except Exception:  # remarks on an image that are damaged say nothing of its pixels
        return 1
    return held if isinstance(held, int) and held in TURNS else 1


def as_rgb(image: Image.Image) -> Image.Image:
    """The first frame as 8-bit RGB, transparency on white, 16-bit greys scaled down."""
    if image.mode == "RGB":
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        gray = np.asarray(image, dtype=np.float64)
        return Image.fromarray((gray / (257 if gray.max() > 255 else 1)).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def center_box(width: int, height: int, share: float) -> Box:
    """The center square whose side is a share of the shorter side: Resize(256) and CenterCrop(224) for 224 / 256."""
    side = min(width, height) * share
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def random_box(width: int, height: int, augmentation: Augmentation, random: np.random.Generator) -> Box:
    """A crop of random area and shape, as torchvision's RandomResizedCrop defines it."""
    lowest, highest = np.log(augmentation.crop_ratio)
    for _ in range(10):
        area = width * height * random.uniform(*augmentation.crop_scale)
        ratio = math.exp(random.uniform(lowest, highest))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(random.integers(width - crop_width + 1))
            upper = int(random.integers(height - crop_height + 1))
            return left, upper, left + crop_width, upper + crop_height
    # Ten misses, as with a very long image: the largest center crop of an allowed shape.
    ratio = min(max(width / height, augmentation.crop_ratio[0]), augmentation.crop_ratio[1])
    crop_width, crop_height = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, upper = (width - crop_width) // 2, (height - crop_height) // 2
    return left, upper, left + crop_width, upper + crop_height
