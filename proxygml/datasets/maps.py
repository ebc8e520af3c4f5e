"""Maps that the frozen stages of a network made of images once, so that only its later stages are run in training.

A folder with train.npz and test.npz, as `save` writes them: `maps` (M, 2, F, h, w) of each image and its mirror image,
`labels`, `paths` and `class_names`. A network takes them when its name says where it begins: efficientnet-lite0:5.
"""

from pathlib import Path

import numpy as np

from proxygml.datasets import ImageList
from proxygml.files import check_texts, one_line, refuse_swelling, written_whole

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
            refuse_swelling(file)
            arrays = np.load(file, allow_pickle=False)
            wanted = ("maps", "labels", "paths", "class_names")
            maps, labels, paths, names = (np.asarray(arrays[name]) for name in wanted)  # some may be bytes
    except Exception as error:  # on damaged bytes numpy and zipfile raise whatever they stumble over
        said = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"{path} does not hold maps ({said}): make them again") from error
    if maps.ndim != 5 or maps.shape[1] != 2 or maps.dtype.kind not in "fiu":
        raise ValueError(f"{path}: expected maps of shape (M, 2, F, h, w), got {maps.dtype} {maps.shape}")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: expected labels as a row of whole numbers, got {labels.dtype} {labels.shape}")
    check_texts(f"the paths in {path}", paths)
    check_texts(f"the class_names in {path}", names)
    return ImageList(paths.tolist(), labels, tuple(names.tolist()), pixels=maps)


def save(path: Path, images: ImageList, maps: np.ndarray) -> None:
    """Write the maps (M, 2, F, h, w) of images, whole or not at all."""
    paths, names = np.array(images.paths), np.array(images.class_names)
    with written_whole(path) as draft, draft.open("wb") as file:
        np.savez(file, maps=maps, labels=images.labels, paths=paths, class_names=names)
