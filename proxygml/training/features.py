"""The readable images of a run and, if only a head is trained, their features by the frozen network.

Features are computed once and cached on disk: training a head then takes minutes on a CPU.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from proxygml.data import ImageList
from proxygml.data.readable import describe_skipped, readable_images
from proxygml.display import Progress, counter
from proxygml.files import atomic_write, cache_folder, remove_temporaries
from proxygml.training import build
from proxygml.training.recipe import Recipe, is_class_name

BATCH = 64
Report = Callable[[int, int], None]


def prepare_images(images: ImageList, what: str, recipe: Recipe, model: build.Network, progress: Progress) -> ImageList:
    """The readable "training" or "test" images, with features if only the head is trained."""
    checked = counter(progress, f"checking {what} images")
    if recipe.feature_crops:
        crops = recipe.feature_crops if what == "training" else 0
        computed = counter(progress, f"features of {what} images")
        kept = with_features(images, recipe, model, crops, checked, computed)
    else:
        kept = readable_images(
            images,
            skip_broken=recipe.skip_broken,
            cache=build.training_cache(recipe) if what == "training" else None,
            max_bytes=int(recipe.cache_gigabytes * 2**30),
            sample=True,
            progress=checked,
        )
    if skipped := describe_skipped(images, kept):
        progress(f"skipped in {what}", 0, 0, skipped)
    return kept


def with_features(
    images: ImageList,
    recipe: Recipe,
    model: build.Network,
    crops: int,
    checked: Report,
    computed: Report,
) -> ImageList:
    """The readable images with features (1 + crops, 2, F) by `model`: of the center crop, then of random crops.

    An unreadable image is an error unless the recipe skips it. Features are read from the cache folder if possible.
    """
    path = cache_folder() / "features" / f"{_key(images, recipe, model, crops)}.npy"
    shape = (len(images), 1 + crops, 2, model.trunk.channels)
    features = _load(path, shape)
    if features is None:
        kept = readable_images(images, skip_broken=recipe.skip_broken, progress=checked)
        rows = np.flatnonzero(np.isin(np.asarray(images.paths), np.asarray(kept.paths)))
        remove_temporaries(path)
        with atomic_write(path) as draft:
            _compute(draft, kept, rows, shape, recipe, model, computed)
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    readable = np.flatnonzero(~np.isnan(features[:, 0, 0, 0]))
    if len(readable) < len(images):
        if not recipe.skip_broken:
            readable_images(images, progress=checked)  # raises the error
        images, features = images.select(readable), features[readable]
    return replace(images, features=features)


def _load(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The cached features; None if the file is missing, damaged or of another shape."""
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return features if (features.shape, features.dtype) == (shape, np.float16) else None


def _compute(
    path: Path,
    images: ImageList,
    rows: np.ndarray,
    shape: tuple[int, ...],
    recipe: Recipe,
    model: build.Network,
    progress: Report,
) -> None:
    """Write features of this shape as float16; rows of unreadable images are NaN."""
    total, crops = shape[0], shape[1] - 1
    views = [build.test_crops(recipe, images)]
    shared = replace(recipe, seed=0)  # all seeds of a run use the same features
    views += [build.training_crops(shared, images, epoch=view) for view in range(crops)]
    features = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
    if len(rows) < total:
        features[:] = np.nan
    done = 0
    for start in range(0, len(images), BATCH):
        batch = range(start, min(start + BATCH, len(images)))
        for view, seen in enumerate(views):
            pixels = torch.from_numpy(np.stack([seen[index][0] for index in batch]))  # (batch, 3, H, W)
            features[rows[batch.start : batch.stop], view] = _features(model, pixels).half().numpy()
            done += len(batch)
            progress(done, len(images) * len(views))
    features.flush()


@torch.no_grad()
def _features(model: build.Network, pixels: Tensor) -> Tensor:
    """Images (B, 3, H, W) -> features (B, 2, F)."""
    device = next(model.parameters()).device
    return torch.stack(model.eval().features(pixels.to(device)), dim=1).cpu()  # type: ignore[operator]


def _key(images: ImageList, recipe: Recipe, model: build.Network, crops: int) -> str:
    """A hash of images, crops and network, but not of the folder of the images."""
    digest = hashlib.sha256()
    seen = (recipe.backbone, recipe.test_side, recipe.test_crop)
    drawn = (crops, recipe.image_size, recipe.crop_scale, recipe.crop_ratio, recipe.flip) if crops else ()
    digest.update(repr((seen, drawn)).encode())
    if is_class_name(recipe.backbone):  # its code may change while its name and weights stay
        noise = np.random.default_rng(0).integers(0, 256, (1, 3, recipe.image_size, recipe.image_size), np.uint8)
        digest.update(_features(model, torch.from_numpy(noise)).numpy().tobytes())
    for name, tensor in model.trunk.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    if images.pixels is not None:
        for index in range(len(images)):
            digest.update(np.asarray(images.open(index)).tobytes())
    for index, path in enumerate(images.paths):
        digest.update(path.encode("utf-8", "surrogateescape") + b"\0")
        if images.pixels is None and images.file(index).is_file():
            status = images.file(index).stat()
            digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]
