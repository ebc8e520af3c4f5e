"""CUB-200-2011: photos of 200 species of birds; the first 100 to train on, the last 100 to test on."""

from pathlib import Path

from proxygml.data import ImageList
from proxygml.data.check import Counts
from proxygml.data.table import divide, path_below, read_lines, whole_number

WHERE = "Caltech-UCSD Birds-200-2011 (Wah et al., 2011), page of the Caltech Vision Lab, and CaltechDATA"
LICENCE = "for non-commercial research; read the terms on its page"
PUBLISHED = Counts(train_classes=100, train_images=5_864, test_classes=100, test_images=5_924)

LAST_TRAIN_CLASS, LAST_CLASS = 100, 200


def load(root: Path) -> tuple[ImageList, ImageList]:
    """What to train on (classes 1-100) and what to test on (101-200), in the order of images.txt.

    `root` is CUB_200_2011 or the folder that holds it. The split for classification that comes with the data,
    train_test_split.txt, has another purpose and is not read.
    """
    folder = _folder(Path(root))
    names = _read_names(folder / "classes.txt")
    class_of = _read_class_of(folder / "image_class_labels.txt")
    paths: dict[int, str] = {}  # image id -> path below images/
    for line, (image_id, path) in read_lines(folder / "images.txt", ("image_id", "path")):
        where = f"{folder / 'images.txt'}, line {line}"
        number = whole_number(image_id, where, low=1)
        if number in paths:
            raise ValueError(f"{where}: expected every image id once, got {number} again")
        if number not in class_of:
            raise ValueError(f"{where}: expected a class of image {number} in image_class_labels.txt, got none")
        if class_of[number] not in names:
            raise ValueError(f"{where}: expected a name of class {class_of[number]} in classes.txt, got none")
        paths[number] = path_below(path, folder / "images", where)
    unlisted = class_of.keys() - paths.keys()
    if unlisted:
        raise ValueError(
            f"{folder / 'images.txt'}: expected all {len(class_of)} images of image_class_labels.txt, "
            f"got {len(paths)}; image {min(unlisted)} is not there: unpack CUB_200_2011 again"
        )
    classes = [class_of[number] for number in paths]
    return divide(
        list(paths.values()),
        classes,
        [number > LAST_TRAIN_CLASS for number in classes],
        root=folder / "images",
        class_names=names,
    )


def _folder(root: Path) -> Path:
    """The folder with the text files: `root` or CUB_200_2011 in it."""
    folder = next((place for place in (root, root / "CUB_200_2011") if (place / "images.txt").is_file()), root)
    for name in ("images.txt", "image_class_labels.txt", "classes.txt"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no {name} in {folder}: unpack CUB_200_2011 there, see docs/datasets.md")
    return folder


def _read_names(path: Path) -> dict[int, str]:
    """Name of every class id."""
    names: dict[int, str] = {}
    for line, (class_id, name) in read_lines(path, ("class_id", "name")):
        number = whole_number(class_id, f"{path}, line {line}", low=1, high=LAST_CLASS)
        if number in names:
            raise ValueError(f"{path}, line {line}: expected every class id once, got {number} again")
        names[number] = name
    return names


def _read_class_of(path: Path) -> dict[int, int]:
    """Class id of every image id."""
    class_of: dict[int, int] = {}
    for line, (image_id, class_id) in read_lines(path, ("image_id", "class_id")):
        where = f"{path}, line {line}"
        number = whole_number(image_id, where, low=1)
        if number in class_of:
            raise ValueError(f"{where}: expected every image id once, got {number} again")
        class_of[number] = whole_number(class_id, where, low=1, high=LAST_CLASS)
    return class_of
