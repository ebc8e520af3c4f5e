"""Your own images in folders, one folder per class."""

import os
from pathlib import Path

from proxygml.data import ImageList
from proxygml.data.splits import image_list, split_by_class
from proxygml.files import warn

SUFFIXES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SHEETS = ("audit.png", "clusters.png")  # pictures by `proxygml audit` and `proxygml cluster`, beside their tables


def load(root: Path, *, test_fraction: float = 0.5) -> tuple[ImageList, ImageList]:
    """Training and test images below `root`.

    The class of an image is the path of its folder: root/birds/owl/1.jpg has class birds/owl. `split_classes` selects
    `test_fraction` of the classes for testing. If root/train and root/test both exist, they are the two splits, a
    class is the path below them, and both may contain the same classes.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}: expected a folder with one folder for each class")
    if all((root / split).is_dir() and _is_below(root / split, root) for split in ("train", "test")):
        others = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        others = [name for name in others if name not in ("train", "test")]
        if others:
            warn(f"{root}: left out the folders beside train and test: {_first(others)}")
        train, test = (image_list(*list_images(root, split), root=root) for split in ("train", "test"))
        return train, test
    return split_by_class(*list_images(root), test_fraction, root=root)


def images_below(folder: Path) -> ImageList:
    """All images below a folder, at any depth; the class is the path of the parent folder.

    Images directly in the folder have the class of its name or, if there are no others, none.
    """
    paths, classes = list_images(folder, loose=folder.resolve().name)
    if not any("/" in path for path in paths):
        classes = [""] * len(paths)
    return image_list(paths, classes, root=folder)


def list_images(root: Path, start: str = "", *, loose: str | None = None) -> tuple[list[str], list[str]]:
    """Paths relative to `root` of the images below root/start, sorted by class and name, and their classes.

    A class is a folder's path below root/start. Hidden files and folders, suffixes not in SUFFIXES, SHEETS, links to
    folders and links out of `root` are left out; a warning counts these links, folders without an image, and images
    directly in root/start, which have no class, unless `loose` names one for them.
    """
    real_root = os.path.realpath(root)
    names_in: dict[str, list[str]] = {}  # class -> file names
    empty: list[str] = []
    links: list[str] = []
    pending = [""]  # folders to visit, relative to root/start
    while pending:
        folder = pending.pop()
        names: list[str] = []
        leaf = True
        with os.scandir(os.path.join(root, start, folder)) as entries:
            for entry in entries:
                if entry.name.startswith(".") or (not folder and entry.name in SHEETS):
                    continue
                below = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    pending.append(below)
                    leaf = False
                elif entry.is_symlink() and (entry.is_dir() or not _is_below(entry.path, real_root)):
                    links.append(below)
                elif entry.name.lower().endswith(SUFFIXES):
                    names.append(entry.name)
        if names:
            names_in[folder] = sorted(names)
        elif leaf and folder:
            empty.append(folder)
    without_class = names_in.pop("", []) if loose is None else []
    for left_out, what in (
        (empty, "folders without an image"),
        (links, "links to folders or out of the root"),
        (without_class, "images that are in no class folder"),
    ):
        if left_out:
            message = f"{Path(root, start)}: left out {len(left_out)} {what}: {_first(sorted(left_out))}"
            warn(message)
    if not names_in:
        raise ValueError(
            f"no images below {Path(root, start)}: expected a folder for each class with files that end in "
            f"{' '.join(SUFFIXES)}"
        )
    paths: list[str] = []
    classes: list[str] = []
    prefix = f"{start}/" if start else ""
    for folder in sorted(names_in):
        paths += [f"{prefix}{folder}/{name}" if folder else f"{prefix}{name}" for name in names_in[folder]]
        classes += [folder or str(loose)] * len(names_in[folder])
    return paths, classes


def _is_below(path: str | Path, root: str | Path) -> bool:
    """Whether `path` is below `root` after all links are followed."""
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(root), ""))


def _first(names: list[str]) -> str:
    """The first three names, for a message."""
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
