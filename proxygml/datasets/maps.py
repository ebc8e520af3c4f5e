"""Maps that the frozen stages of a network made of images once, so that only its later stages are run in training.

A folder with train.npz and test.npz, as `save` writes them: `maps` (M, 2, F, h, w) of each image and its mirror image,
`labels`, `paths` and `class_names`. A network takes them when its name says where it begins: efficientnet-lite0:5.
"""

from pathlib import Path

import numpy as np

from proxygml.datasets import ImageList
from proxygml.files import written_whole

PARTS = ("train", "test")


def load(root: Path) -> tuple[ImageList, ImageList]:
    """What `save` wrote, for both halves."""
    train, test = (_load(root / f"{part}.npz") for part in PARTS)
    return train, test


def _load(path: Path) -> ImageList:
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}: expected a folder of maps, see docs/datasets.md")
    try:
        with path.open("rb") as file:  # numpy leaves a damaged file open
            arrays = np.load(file, allow_pickle=False)
            maps, labels, paths, names = (arrays[name] for name in ("maps", "labels", "paths", "class_names"))
    except Exception as error:  # on damaged bytes numpy and zipfile raise whatever they stumble over
        raise ValueError(f"{path} does not hold maps ({type(error).__name__}: {error}): make them again") from error
    if maps.ndim != 5 or maps.shape[1] != 2:
        raise ValueError(f"{path}: expected maps of shape (M, 2, F, h, w), got {maps.shape}")
    return ImageList(paths.tolist(), labels, tuple(names.tolist()), pixels=maps)


def save(path: Path, images: ImageList, maps: np.ndarray) -> None:
    """Write the maps (M, 2, F, h, w) of images, whole or not at all."""
    paths, names = np.array(images.paths), np.array(images.class_names)
    with written_whole(path) as draft, draft.open("wb") as file:
        np.savez(file, maps=maps, labels=images.labels, paths=paths, class_names=names)
