"""Cars196 in both layouts."""

import numpy as np
import pytest

from proxygml.data import cars
from proxygml.data.check import compare_counts, find_problems
from tests.data.conftest import CARS, car_names, genuine, write_image, write_mat_annotations


def write_devkit(root, *, annotations="devkit"):
    """The same cars in the second layout; the first five are in cars_train, the others in cars_test."""
    parts = {"cars_train": CARS[:5], "cars_test": CARS[5:]}
    files = {"cars_train": "cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}
    for part, rows in parts.items():
        for name, _ in rows:
            write_image(root / part / f"{name}.jpg")
        write_mat_annotations(root / annotations / files[part], "fname", [(f"{name}.jpg", c) for name, c in rows])
    return root


def test_split_by_class(cars_tree):
    train, test = cars.load(cars_tree)
    assert train.class_names == ("Maker Model1 Sedan 2012", "Maker Model98 Sedan 2012")
    assert test.class_names == ("Maker Model99 Sedan 2012", "Maker Model196 Sedan 2012")
    assert train.paths == [f"car_ims/00000{number}.jpg" for number in (1, 3, 5, 6)]
    assert train.labels.tolist() == [0, 1, 0, 1]
    assert test.labels.tolist() == [0, 1, 0, 1, 1]
    assert find_problems(train) + find_problems(test) == []


@pytest.mark.parametrize("annotations", ["devkit", "."])
def test_devkit_gives_the_same_classes(cars_tree, tmp_path, annotations):
    root = write_devkit(tmp_path / "other", annotations=annotations)
    for one, other in zip(cars.load(cars_tree), cars.load(root), strict=True):
        assert one.labels.tolist() == other.labels.tolist()
        assert [path[-10:] for path in one.paths] == [path[-10:] for path in other.paths]
        assert find_problems(other) == []


def test_devkit_names_come_from_cars_meta(tmp_path):
    from scipy.io import savemat

    root = write_devkit(tmp_path)
    assert cars.load(root)[1].class_names == ("99", "196")
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": car_names()})
    assert cars.load(root)[1].class_names == ("Maker Model99 Sedan 2012", "Maker Model196 Sedan 2012")


@pytest.mark.parametrize("name", ["cars_train_annos.mat", "cars_test_annos_withlabels.mat"])
def test_missing_annotation_file(tmp_path, name):
    root = write_devkit(tmp_path)
    (root / "devkit" / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"no {name} in .*: unpack Cars196 there, see docs/datasets.md"):
        cars.load(root)


def test_annotations_without_classes(tmp_path):
    from scipy.io import savemat

    root = write_devkit(tmp_path)
    without = np.empty((1, 1), dtype=[("bbox_x1", object), ("fname", object)])
    without[0, 0] = (np.array([[1]]), np.array(["00001.jpg"]))
    savemat(root / "devkit" / "cars_test_annos_withlabels.mat", {"annotations": without})
    with pytest.raises(ValueError, match=r"expected annotations with the fields fname and class, got \['bbox_x1', 'fn"):
        cars.load(root)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (("car_ims/2.jpg", 0), r"cars_annos.mat, row 2: expected a class 1..196, got 0"),
        (("car_ims/2.jpg", 197), r"cars_annos.mat, row 2: expected a class 1..196, got 197"),
        (("../2.jpg", 99), r"cars_annos.mat, row 2: expected a path inside .* got '../2.jpg'"),
        (("/etc/passwd", 99), r"cars_annos.mat, row 2: expected a path inside .* got '/etc/passwd'"),
    ],
)
def test_bad_row(tmp_path, row, complaint):
    write_mat_annotations(tmp_path / "cars_annos.mat", "relative_im_path", [("car_ims/1.jpg", 1), row], names=True)
    with pytest.raises(ValueError, match=complaint):
        cars.load(tmp_path)


@pytest.mark.parametrize("kept", [0, 20, 200, -30])
def test_damaged_file(cars_tree, kept):
    whole = (cars_tree / "cars_annos.mat").read_bytes()
    (cars_tree / "cars_annos.mat").write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=r"cars_annos.mat"):
        cars.load(cars_tree)


def test_missing_class_names(tmp_path):
    write_mat_annotations(tmp_path / "cars_annos.mat", "relative_im_path", [("1.jpg", 1), ("2.jpg", 99)])
    with pytest.raises(ValueError, match=r"cars_annos.mat: expected class_names of 196 classes, got 0"):
        cars.load(tmp_path)


@pytest.mark.slow
def test_published_counts():
    train, test = cars.load(genuine("annotations/Cars196"))
    assert compare_counts(train, test, cars.PUBLISHED) == []
    assert train.class_names[0] == "AM General Hummer SUV 2000"
    assert test.class_names[-1] == "smart fortwo Convertible 2012"
    assert train.paths[0] == "car_ims/000001.jpg"
    sizes = np.bincount(np.concatenate([train.labels, test.labels + 98]))
    assert (sizes.min(), sizes.max()) == (48, 136)
