"""Stanford Online Products: photos of 22,634 articles, 11,318 to train on and 11,316 others to test on."""

from pathlib import Path

from proxygml.data import ImageList
from proxygml.data.check import Counts
from proxygml.data.lists import dataset_folder, path_below, read_lines, whole_number
from proxygml.data.splits import image_list

PUBLISHED = Counts(train_classes=11_318, train_images=59_551, test_classes=11_316, test_images=60_502)
LISTS = ("Ebay_train.txt", "Ebay_test.txt")
COLUMNS = ("image_id", "class_id", "super_class_id", "path")


def load(root: Path) -> tuple[ImageList, ImageList]:
    """Training images (Ebay_train.txt) and test images (Ebay_test.txt); class names are the class ids.

    `root` is Stanford_Online_Products or its parent folder.
    """
    folder = dataset_folder(root, "Stanford_Online_Products", LISTS)
    train, test = (_read_list(folder / name) for name in LISTS)
    return train, test


def _read_list(path: Path) -> ImageList:
    paths, classes = [], []
    for where, (_, class_id, _, image) in read_lines(path, COLUMNS, header=True):
        classes.append(whole_number(class_id, where))
        paths.append(path_below(image, path.parent, where))
    if not paths:
        raise ValueError(f"{path}: expected a line for each image, got none: unpack Stanford_Online_Products again")
    return image_list(paths, classes, root=path.parent)
