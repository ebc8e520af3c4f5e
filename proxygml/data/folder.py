"""Images in folders, one folder per class: the way to bring your own."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from proxygml.data import ImageList
from proxygml.data.table import divide, image_list, split_classes

WHERE = "your own images, a folder for each class"
LICENCE = "yours"

ENDINGS = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def load(root: Path, *, test_fraction: float = 0.5, seed: int = 0) -> tuple[ImageList, ImageList]:
    """What to train on and what to test on, from the images below `root`.

    The class of an image is the path of the folder that directly holds it: root/birds/owl/1.jpg is of class
    birds/owl. `test_fraction` of the classes are for testing, chosen by `split_classes`. Where root/train and root/test
    both exist, they are the two lists instead, a class is the path below them, and the two may share classes.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}: expected one that holds a folder for each class")
    if all((root / split).is_dir() and _is_below(root / split, root) for split in ("train", "test")):
        others = [name for name in sorted(_folders_in(root)) if name not in ("train", "test")]
        if others:
            warnings.warn(f"{root}: left out the folders beside train and test: {_some(others)}", stacklevel=2)
        train, test = list_images(root, "train"), list_images(root, "test")
        return image_list(*train, root=root), image_list(*test, root=root)
    paths, classes = list_images(root)
    test_classes = split_classes(classes, test_fraction=test_fraction, seed=seed)
    return divide(paths, classes, [name in test_classes for name in classes], root=root)


def list_images(root: Path, start: str = "", *, loose: str | None = None) -> tuple[list[str], list[str]]:
    """Path relative to `root` of every image below root/start, sorted by class and name, and the class of each.

    A class is a folder's path below root/start. Hidden files and folders (those that begin with a dot), other endings
    than ENDINGS, links to folders and links that leave `root` are passed over; a warning counts such links, folders
    without an image, and images that lie in root/start itself and so have no class, unless `loose` is what to call it.
    """
    real_root = os.path.realpath(root)
    names_in: dict[str, list[str]] = {}  # class -> names of its images
    empty: list[str] = []
    links: list[str] = []
    waiting = [""]  # folders to visit, as paths below root/start
    while waiting:
        folder = waiting.pop()
        names: list[str] = []
        leaf = True
        with os.scandir(os.path.join(root, start, folder)) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                below = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(below)
                    leaf = False
                elif entry.is_symlink() and (entry.is_dir() or not _is_below(entry.path, real_root)):
                    links.append(below)
                elif entry.name.lower().endswith(ENDINGS):
                    names.append(entry.name)
        if names:
            names_in[folder] = sorted(names)
        elif leaf and folder:
            empty.append(folder)
    without_class = names_in.pop("", []) if loose is None else []
    for left_out, what in (
        (empty, "folders without an image"),
        (links, "links to folders or out of the root"),
        (without_class, "images that lie in no folder of a class"),
    ):
        if left_out:
            warnings.warn(
                f"{Path(root, start)}: left out {len(left_out)} {what}: {_some(sorted(left_out))}", stacklevel=3
            )
    if not names_in:
        raise ValueError(
            f"no images below {Path(root, start)}: expected a folder for each class with files that end in "
            f"{' '.join(ENDINGS)}"
        )
    paths: list[str] = []
    classes: list[str] = []
    prefix = f"{start}/" if start else ""
    for folder in sorted(names_in):
        paths += [f"{prefix}{folder}/{name}" if folder else f"{prefix}{name}" for name in names_in[folder]]
        classes += [folder or str(loose)] * len(names_in[folder])
    return paths, classes


def _folders_in(root: Path) -> Iterator[str]:
    with os.scandir(root) as entries:
        yield from (entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _is_below(path: str | Path, root: str | Path) -> bool:
    """Whether `path` still lies below `root` once all links are followed."""
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(root), ""))


def _some(names: list[str]) -> str:
    """The first three of them, for a message."""
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
