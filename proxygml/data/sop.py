"""Stanford Online Products: photos of 22,634 articles, 11,318 to train on and 11,316 others to test on."""

from pathlib import Path

from proxygml.data import ImageList
from proxygml.data.check import Counts
from proxygml.data.table import image_list, path_below, read_lines, whole_number

WHERE = "Stanford Online Products (Oh Song et al., CVPR 2016), page of the Stanford CVGL lab"
LICENCE = "we found none stated: treat it as for non-commercial research"
PUBLISHED = Counts(train_classes=11_318, train_images=59_551, test_classes=11_316, test_images=60_502)

COLUMNS = ("image_id", "class_id", "super_class_id", "path")


def load(root: Path) -> tuple[ImageList, ImageList]:
    """What to train on (Ebay_train.txt) and what to test on (Ebay_test.txt); a class is called by its class_id.

    `root` is Stanford_Online_Products or the folder that holds it.
    """
    root = Path(root)
    folder = next(
        (place for place in (root, root / "Stanford_Online_Products") if (place / "Ebay_train.txt").is_file()), root
    )
    for name in ("Ebay_train.txt", "Ebay_test.txt"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"no {name} in {folder}: unpack Stanford_Online_Products there, see docs/datasets.md"
            )
    return _read_list(folder / "Ebay_train.txt"), _read_list(folder / "Ebay_test.txt")


def _read_list(path: Path) -> ImageList:
    paths, classes = [], []
    file = str(path)  # once, not for each of 60,000 lines
    for line, (_, class_id, _, image) in read_lines(path, COLUMNS, header=True):
        where = f"{file}, line {line}"
        classes.append(whole_number(class_id, where, low=1))
        paths.append(path_below(image, path.parent, where))
    if not paths:
        raise ValueError(f"{path}: expected a line for each image, got none: unpack Stanford_Online_Products again")
    return image_list(paths, classes, root=path.parent)
