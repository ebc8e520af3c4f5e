"""Cars196: photos of 196 models of cars; the first 98 to train on, the last 98 to test on."""

from pathlib import Path

from proxygml.data import ImageList, mat
from proxygml.data.check import Counts
from proxygml.data.lists import path_below
from proxygml.data.splits import split_images
from proxygml.files import one_line

PUBLISHED = Counts(train_classes=98, train_images=8_054, test_classes=98, test_images=8_131)
LAST_TRAIN_CLASS, LAST_CLASS = 98, 196


def load(root: Path) -> tuple[ImageList, ImageList]:
    """Training images (classes 1-98) and test images (99-196), from either published layout.

    The layouts are cars_annos.mat with car_ims/ (preferred), or cars_train_annos.mat and
    cars_test_annos_withlabels.mat with cars_train/ and cars_test/. Their splits for classification are ignored.
    Annotation files may be in devkit/. Without cars_meta.mat, the names in the second layout are the class ids.
    """
    annotations = _find(root, "cars_annos.mat")
    if annotations is not None:
        contents = _read_mat(annotations)
        names = _class_names(annotations, contents)
        rows = _read_annotations(root, annotations, contents, "relative_im_path")
    else:
        rows = []
        for name, folder in (("cars_train_annos.mat", "cars_train/"), ("cars_test_annos_withlabels.mat", "cars_test/")):
            file = _find(root, name)
            if file is None:
                raise FileNotFoundError(
                    f"no cars_annos.mat and no {name} in {root}: unpack Cars196 there, see docs/datasets.md"
                )
            rows += _read_annotations(root, file, _read_mat(file), "fname", folder)
        meta = _find(root, "cars_meta.mat")
        names = (
            _class_names(meta, _read_mat(meta))
            if meta
            else {number: str(number) for number in range(1, LAST_CLASS + 1)}
        )
    paths, classes = zip(*rows, strict=True)
    return split_images(paths, classes, [number > LAST_TRAIN_CLASS for number in classes], root=root, class_names=names)


def _find(root: Path, name: str) -> Path | None:
    return next((file for file in (root / name, root / "devkit" / name) if file.is_file()), None)


def _read_mat(file: Path) -> dict[str, mat.Value]:
    try:
        return mat.read(file)
    except Exception as error:  # damaged bytes can raise any error
        raise ValueError(f"cannot read {file} as a MATLAB file, unpack it again: {one_line(error)}") from error


def _class_names(file: Path, contents: dict[str, mat.Value]) -> dict[int, str]:
    """id -> name, ids from 1."""
    names = contents.get("class_names", [])  # 196 cells
    if len(names) != LAST_CLASS or isinstance(names, dict):
        raise ValueError(f"{file}: expected class_names of {LAST_CLASS} classes, got {len(names)}")
    return {number: str(_single(name, f"{file}, class {number}")) for number, name in enumerate(names, start=1)}


def _read_annotations(
    root: Path, file: Path, contents: dict[str, mat.Value], path_field: str, folder: str = ""
) -> list[tuple[str, int]]:
    """Path below `root` and class id of every image."""
    annotations = contents.get("annotations")  # field -> M values
    if not isinstance(annotations, dict) or not {path_field, "class"} <= annotations.keys():
        fields = one_line(list(annotations or ()), max_length=100)
        raise ValueError(f"{file}: expected annotations with the fields {path_field} and class, got {fields}")
    rows = []
    for row, (path, cell) in enumerate(zip(annotations[path_field], annotations["class"], strict=True), start=1):
        where = f"{file}, row {row}"
        number = _single(cell, where)
        if not isinstance(number, (int, float)) or number not in range(1, LAST_CLASS + 1):
            raise ValueError(f"{where}: expected a class 1..{LAST_CLASS}, got {one_line(repr(number), max_length=100)}")
        rows.append((path_below(f"{folder}{_single(path, where)}", root, where), int(number)))
    if not rows:
        raise ValueError(f"{file}: expected a row for each image, got none: unpack Cars196 again")
    return rows


def _single(cell: mat.Value, where: str) -> str | int | float:
    """The value of a cell with one element; in MATLAB everything is an array."""
    if not isinstance(cell, list) or len(cell) != 1:
        raise ValueError(f"{where}: expected a single value, got {one_line(repr(cell), max_length=100)}")
    return cell[0]
