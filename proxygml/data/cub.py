"""CUB-200-2011: photos of 200 species of birds; the first 100 to train on, the last 100 to test on."""

from pathlib import Path

from proxygml.data import ImageList
from proxygml.data.check import Counts
from proxygml.data.lists import dataset_folder, path_below, read_by_id, whole_number
from proxygml.data.splits import split_images

PUBLISHED = Counts(train_classes=100, train_images=5_864, test_classes=100, test_images=5_924)
LAST_TRAIN_CLASS, LAST_CLASS = 100, 200


def load(root: Path) -> tuple[ImageList, ImageList]:
    """Training images (classes 1-100) and test images (101-200), in the order of images.txt.

    `root` is CUB_200_2011 or its parent folder. train_test_split.txt is for classification and is not read.
    """
    folder = dataset_folder(root, "CUB_200_2011", ("images.txt", "image_class_labels.txt", "classes.txt"))
    names = read_by_id(folder / "classes.txt", ("class_id", "name"), high=LAST_CLASS)
    labels = read_by_id(folder / "image_class_labels.txt", ("image_id", "class_id"))
    images = read_by_id(folder / "images.txt", ("image_id", "path"))
    if unpaired := images.keys() ^ labels.keys():
        raise ValueError(
            f"{folder}: expected image {min(unpaired)} in images.txt and in image_class_labels.txt, got it in one: "
            "unpack CUB_200_2011 again"
        )
    paths, classes = [], []
    for image, (where, path) in images.items():
        number = whole_number(labels[image][1], labels[image][0], high=LAST_CLASS)
        if number not in names:
            raise ValueError(f"{where}: expected a name of class {number} in classes.txt, got none")
        paths.append(path_below(path, folder / "images", where))
        classes.append(number)
    return split_images(
        paths,
        classes,
        [number > LAST_TRAIN_CLASS for number in classes],
        root=folder / "images",
        class_names={number: name for number, (_, name) in names.items()},
    )
