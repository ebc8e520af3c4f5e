"""Cars196: photos of 196 models of cars; the first 98 to train on, the last 98 to test on."""

from pathlib import Path

from proxygml.data import ImageList, mat
from proxygml.data.check import Counts
from proxygml.data.table import divide, path_below
from proxygml.files import one_line

WHERE = "Stanford Cars, also Cars196 (Krause et al., 2013), page of the Stanford AI Lab"
LICENCE = "we found none stated: treat it as for non-commercial research"
PUBLISHED = Counts(train_classes=98, train_images=8_054, test_classes=98, test_images=8_131)

LAST_TRAIN_CLASS, LAST_CLASS = 98, 196


def load(root: Path) -> tuple[ImageList, ImageList]:
    """What to train on (classes 1-98) and what to test on (99-196), from either form in which the data is given out.

    That is cars_annos.mat with car_ims/, which is read where both are there, or cars_train_annos.mat and
    cars_test_annos_withlabels.mat with cars_train/ and cars_test/. Either split for classification is ignored.
    The annotation files may also lie in devkit/. Without cars_meta.mat the second form names classes by their id.
    """
    root = Path(root)
    whole = _annotation_file(root, "cars_annos.mat")
    if whole is not None:
        contents = _read_mat(whole)
        names = _class_names(whole, contents)
        paths, classes = _read_annotations(root, whole, contents, "relative_im_path", "")
    else:
        paths, classes, names = _read_devkit(root)
    return divide(paths, classes, [number > LAST_TRAIN_CLASS for number in classes], root=root, class_names=names)


def _read_devkit(root: Path) -> tuple[list[str], list[int], dict[int, str]]:
    """Path and class id of every image of the second form, and the name of every class id."""
    paths: list[str] = []
    classes: list[int] = []
    for name, folder in (("cars_train_annos.mat", "cars_train/"), ("cars_test_annos_withlabels.mat", "cars_test/")):
        file = _annotation_file(root, name)
        if file is None:
            raise FileNotFoundError(
                f"no cars_annos.mat and no {name} in {root}: unpack Cars196 there, see docs/datasets.md"
            )
        more_paths, more_classes = _read_annotations(root, file, _read_mat(file), "fname", folder)
        paths += more_paths
        classes += more_classes
    meta = _annotation_file(root, "cars_meta.mat")
    names = {number: str(number) for number in range(1, LAST_CLASS + 1)}
    return paths, classes, names if meta is None else _class_names(meta, _read_mat(meta))


def _annotation_file(root: Path, name: str) -> Path | None:
    return next((file for file in (root / name, root / "devkit" / name) if file.is_file()), None)


def _read_mat(file: Path) -> dict[str, mat.Value]:
    try:
        return mat.read(file)
    except Exception as error:  # bytes that are damaged may be anything
        raise ValueError(f"cannot read {file} as a MATLAB file, unpack it again: {one_line(error)}") from error


def _class_names(file: Path, contents: dict[str, mat.Value]) -> dict[int, str]:
    """Name of every class id; the ids count from 1."""
    names = contents.get("class_names", [])  # 196 cells
    if len(names) != LAST_CLASS or isinstance(names, dict):
        raise ValueError(f"{file}: expected class_names of {LAST_CLASS} classes, got {len(names)}")
    return {number: str(_only(name, f"{file}, class {number}")) for number, name in enumerate(names, start=1)}


def _read_annotations(
    root: Path, file: Path, contents: dict[str, mat.Value], path_field: str, folder: str
) -> tuple[list[str], list[int]]:
    """Path below `root` and class id of every row of the struct array `annotations`."""
    found = contents.get("annotations")  # M values of each field
    annotations = found if isinstance(found, dict) else {}
    if path_field not in annotations or "class" not in annotations:
        came = one_line(list(annotations), max_length=100)
        raise ValueError(f"{file}: expected annotations with the fields {path_field} and class, got {came}")
    paths: list[str] = []
    classes: list[int] = []
    for row, (path, number) in enumerate(zip(annotations[path_field], annotations["class"], strict=True), start=1):
        where = f"{file}, row {row}"
        number = _only(number, where)
        if not isinstance(number, (int, float)) or number not in range(1, LAST_CLASS + 1):
            raise ValueError(f"{where}: expected a class 1..{LAST_CLASS}, got {one_line(repr(number), max_length=100)}")
        paths.append(path_below(f"{folder}{_only(path, where)}", root, where))
        classes.append(int(number))
    if not paths:
        raise ValueError(f"{file}: expected a row for each image, got none: unpack Cars196 again")
    return paths, classes


def _only(cell: mat.Value, where: str) -> str | int | float:
    """The one value in a cell: MATLAB knows nothing but arrays."""
    if not isinstance(cell, list) or len(cell) != 1:
        raise ValueError(f"{where}: expected a single value, got {one_line(repr(cell), max_length=100)}")
    return cell[0]
