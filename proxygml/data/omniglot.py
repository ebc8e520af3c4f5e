"""Omniglot: 1,623 characters of 50 alphabets, each drawn by 20 people; 964 to train on, 659 others to test on."""

from pathlib import Path

import numpy as np

from proxygml.data import ImageList
from proxygml.data.check import Counts
from proxygml.data.folder import list_images
from proxygml.data.splits import image_list
from proxygml.files import check_texts, one_line, reject_zip_bomb

PUBLISHED = Counts(train_classes=964, train_images=19_280, test_classes=659, test_images=13_180)
PARTS = ("background", "evaluation")  # the authors' names for train and test; they share no alphabet
KINDS = ("x", "y", "names")
PACKED = "omniglot28.npz"


def load(root: Path) -> tuple[ImageList, ImageList]:
    """Training and test images; a class is alphabet/character.

    `root` contains images_background/ and images_evaluation/, or is omniglot28.npz or its folder. The two forms differ:
    the PNGs are black (0) on white (255), 105 x 105; the npz is white (255) on black (0), 28 x 28, in memory.
    """
    packed = root / PACKED if root.is_dir() else root
    folders = [root / f"images_{part}" for part in PARTS]
    if all(folder.is_dir() for folder in folders):
        train, test = (image_list(*list_images(root, folder.name), root=root) for folder in folders)
        return train, test
    if packed.is_file():
        return _read_packed(packed)
    missing = next(folder.name for folder in folders if not folder.is_dir())
    raise FileNotFoundError(f"no {missing} and no {PACKED} in {root}: unpack Omniglot there, see docs/datasets.md")


def _read_packed(file: Path) -> tuple[ImageList, ImageList]:
    """Both splits from x_<part> (M, H, W), y_<part> (M,) and names_<part> (C,)."""
    expected = [f"{kind}_{part}" for part in PARTS for kind in KINDS]
    try:
        # opened here because np.load leaves a broken zip open
        with file.open("rb") as opened:
            reject_zip_bomb(opened)
            with np.load(opened, allow_pickle=False) as stored:
                arrays = {name: np.asarray(stored[name]) for name in expected if name in stored}
    except Exception as error:  # damaged files raise many kinds of errors
        raise ValueError(f"cannot read {file} as an npz file, fetch it again: {one_line(error)}") from error
    for name in expected:
        if name not in arrays:
            raise ValueError(f"{file}: expected the arrays {', '.join(expected)}, got no {name}")
    train, test = (_packed_list(file, part, *(arrays[f"{kind}_{part}"] for kind in KINDS)) for part in PARTS)
    return train, test


def _packed_list(file: Path, part: str, pixels: np.ndarray, classes: np.ndarray, names: np.ndarray) -> ImageList:
    if pixels.ndim != 3 or pixels.dtype != np.uint8 or classes.shape != pixels.shape[:1] or 0 in pixels.shape[1:]:
        raise ValueError(
            f"{file}: expected x_{part} (M, H, W) uint8 and y_{part} (M,), got {pixels.shape} {pixels.dtype} "
            f"and {classes.shape}"
        )
    check_texts(f"names_{part} in {file}", names)
    if classes.dtype.kind not in "iu" or not len(classes):
        raise ValueError(f"{file}: expected y_{part} as whole numbers, got {len(classes)} of {classes.dtype}")
    if classes.min() < 0 or classes.max() >= len(names):
        got = f"{classes.min()}..{classes.max()}"
        raise ValueError(f"{file}: expected y_{part} to index the {len(names)} names_{part}, got {got}")
    drawings = [0] * len(names)  # of each class so far
    paths: list[str] = []
    for number in classes.tolist():
        drawings[number] += 1
        paths.append(f"{names[number]}/{drawings[number]:02d}")
    return image_list(paths, classes.tolist(), root=None, class_names=dict(enumerate(names.tolist())), pixels=pixels)
