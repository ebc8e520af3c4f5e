"""Miniature CUB-200-2011, Cars196 and Stanford Online Products in their genuine formats, and the genuine files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

GENUINE = Path(__file__).parents[3] / "shared" / "data"


def genuine(name: str) -> Path:
    """The genuine file of that name; the test skips where it is absent."""
    path = GENUINE / name
    if not path.exists():
        pytest.skip(f"needs the genuine {name} in {GENUINE}")
    return path


def write_image(path: Path, *, mode: str = "RGB", size: tuple[int, int] = (24, 16), seed: int = 0) -> Path:
    """Write a small image of noise to `path`; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path)
    return path


def write_cub(root: Path) -> Path:
    """CUB_200_2011 with 14 images of 6 classes: gaps in both kinds of ids, lines in different orders, one gray."""
    names = {
        1: "001.Black_footed_Albatross",
        2: "002.Laysan_Albatross",
        100: "100.Brown_Pelican",
        101: "101.White_Pelican",
        102: "102.Western_Wood_Pewee",
        200: "200.Common_Yellowthroat",
    }
    images = {  # id -> class and name of the file, as they follow in images.txt
        7: (1, "Black_Footed_Albatross_0046_18.jpg"),
        2: (1, "Black_Footed_Albatross_0009_34.jpg"),
        3: (2, "Laysan_Albatross_0002_1027.jpg"),
        40: (2, "Laysan_Albatross_0001_545.jpg"),
        5: (100, "Brown_Pelican_0122_94022.jpg"),
        6: (100, "Brown_Pelican_0013_93734.jpg"),
        1: (100, "Brown_Pelican_0003_94253.jpg"),
        8: (101, "White_Pelican_0079_96422.jpg"),
        9: (101, "White_Pelican_0010_96823.jpg"),
        10: (102, "Western_Wood_Pewee_0058_98129.jpg"),
        11: (102, "Western_Wood_Pewee_0015_98205.jpg"),
        30: (200, "Common_Yellowthroat_0003_190521.jpg"),
        21: (200, "Common_Yellowthroat_0055_190967.jpg"),
        20: (200, "Common_Yellowthroat_0110_190592.jpg"),
    }
    folder = root / "CUB_200_2011"
    for number, (class_id, name) in images.items():
        write_image(folder / "images" / names[class_id] / name, mode="L" if number == 3 else "RGB", seed=number)
    (folder / "images" / names[1] / "._Black_Footed_Albatross_0046_18.jpg").write_bytes(b"\x00\x05\x16\x07")
    _write_lines(folder / "images.txt", (f"{number} {names[c]}/{name}" for number, (c, name) in images.items()))
    # By id, unlike images.txt: pairing the two line by line would give wrong classes.
    _write_lines(folder / "image_class_labels.txt", (f"{number} {images[number][0]}" for number in sorted(images)))
    _write_lines(folder / "classes.txt", (f"{class_id} {name}" for class_id, name in names.items()))
    _write_lines(folder / "train_test_split.txt", (f"{number} {number % 2}" for number in sorted(images)))
    return folder


def write_mat_annotations(path: Path, path_field: str, rows: list[tuple[str, int]], *, names: bool = False) -> None:
    """A file like cars_annos.mat: a struct array whose cells are (1,) text and (1, 1) uint8."""
    from scipy.io import savemat

    path.parent.mkdir(parents=True, exist_ok=True)
    fields = [path_field, "bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "test"]
    annotations = np.empty((1, len(rows)), dtype=[(field, object) for field in fields])
    for column, (image, class_id) in enumerate(rows):
        box = [np.array([[value]], dtype=np.uint8) for value in (1, 1, 20, 12)]
        cells = [np.array([image]), *box, np.array([[class_id]], dtype=np.uint8), np.array([[column % 2]], np.uint8)]
        annotations[0, column] = tuple(cells)
    contents = {"annotations": annotations}
    if names:
        contents["class_names"] = car_names()
    savemat(path, contents)


def car_names() -> np.ndarray:
    """(1, 196) made-up names, in cells as in the genuine file."""
    cells = np.empty((1, 196), dtype=object)
    for class_id in range(1, 197):
        cells[0, class_id - 1] = np.array([f"Maker Model{class_id} Sedan 2012"])
    return cells


CARS = [("000001", 1), ("000002", 99), ("000003", 98), ("000004", 196), ("000005", 1), ("000006", 98)]
CARS += [("000007", 99), ("000008", 196), ("000009", 196)]  # not sorted by class: the genuine file has an inversion


def write_cars(root: Path) -> Path:
    """Cars196 as cars_annos.mat with car_ims/: 9 images of the classes 1, 98, 99 and 196."""
    folder = root / "Cars196"
    for number, (name, _) in enumerate(CARS):
        write_image(folder / "car_ims" / f"{name}.jpg", seed=number)
    rows = [(f"car_ims/{name}.jpg", class_id) for name, class_id in CARS]
    write_mat_annotations(folder / "cars_annos.mat", "relative_im_path", rows, names=True)
    return folder


def write_sop(root: Path) -> Path:
    """Stanford_Online_Products with 3 classes to train on and 3 to test on, of 2 super-classes."""
    folder = root / "Stanford_Online_Products"
    number = 0
    for file, first_class in (("Ebay_train.txt", 1), ("Ebay_test.txt", 4)):
        lines = ["image_id class_id super_class_id path"]
        for class_id in range(first_class, first_class + 3):
            for view in range(2 + class_id % 2):
                number += 1
                kind = 1 + class_id % 2
                path = f"{('bicycle', 'cabinet')[kind - 1]}_final/11108512{class_id:04d}_{view}.JPG"
                write_image(folder / path, mode="L" if number == 2 else "RGB", seed=number)
                lines.append(f"{number} {class_id} {kind} {path}")
        _write_lines(folder / file, lines)
    return folder


def _write_lines(path: Path, lines) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture
def cub_tree(tmp_path: Path) -> Path:
    return write_cub(tmp_path)


@pytest.fixture
def cars_tree(tmp_path: Path) -> Path:
    return write_cars(tmp_path)


@pytest.fixture
def sop_tree(tmp_path: Path) -> Path:
    return write_sop(tmp_path)
