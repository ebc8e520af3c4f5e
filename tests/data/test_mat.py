"""MATLAB 5 files, compared with scipy."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from proxygml.data import mat
from tests.data.conftest import genuine


@pytest.mark.parametrize("packed", [False, True])
def test_reads_what_scipy_writes(tmp_path: Path, packed: bool) -> None:
    rows = np.empty((1, 2), dtype=[("name", object), ("box", object)])
    rows[0, 0], rows[0, 1] = ("owl é 猫", np.arange(6).reshape(2, 3)), ("", np.array([[2.5]]))
    cells = np.empty((2, 2), object)
    cells[:] = [["a", np.array([[1, 2]], np.uint8)], [np.array(["x", "y"]), np.eye(2, dtype=np.float32)]]
    more = {"number": -7, "many": np.array(["ab", "cd", "ef"]), "nothing": np.empty((0, 0)), "complex": 1 + 2j}
    savemat(tmp_path / "a.mat", {"rows": rows, "cells": cells, **more}, do_compression=packed)
    found = mat.read(tmp_path / "a.mat")
    assert found["rows"] == {"name": [["owl é 猫"], []], "box": [[0, 3, 1, 4, 2, 5], [2.5]]}  # column by column
    assert found["cells"] == [["a"], ["x", "y"], [1, 2], [1, 0, 0, 1]]
    assert (found["number"], found["many"], found["nothing"], found["complex"]) == ([-7], ["ab", "cd", "ef"], [], [1])


@pytest.mark.slow
def test_published_annotations_equal_scipys() -> None:
    file = genuine("annotations/Cars196") / "cars_annos.mat"
    found, expected = mat.read(file), loadmat(file)
    assert found["class_names"] == [name.tolist() for name in expected["class_names"].ravel()]
    for field, values in found["annotations"].items():
        assert values == [value.ravel().tolist() for value in expected["annotations"][field].ravel()], field


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda whole: b"", "does not begin"),
        (lambda whole: whole[:150], "ends within|ends before"),
        (lambda whole: whole[:132] + b"\xff\xff\xff\x7f" + whole[136:], "ends before 2,147,483,647 bytes"),
    ],
)
def test_damaged_file(tmp_path: Path, damage, said: str) -> None:
    savemat(tmp_path / "a.mat", {"number": np.arange(9)})
    (tmp_path / "a.mat").write_bytes(damage((tmp_path / "a.mat").read_bytes()))
    with pytest.raises(ValueError, match=said):
        mat.read(tmp_path / "a.mat")


def test_large_and_deeply_nested_arrays(tmp_path: Path) -> None:
    both = {"one": np.zeros(2**20), "other": np.zeros(2**20)}  # each half as large as is read
    savemat(tmp_path / "large.mat", both, do_compression=True)
    with pytest.raises(ValueError, match="its arrays have more than 16,777,216 bytes"):
        mat.read(tmp_path / "large.mat")
    cell = np.ones(1)
    for _ in range(20):
        outer = np.empty((1, 1), object)
        outer[0, 0] = cell
        cell = outer
    savemat(tmp_path / "deep.mat", {"cell": cell})
    with pytest.raises(ValueError, match="more than 10 deep"):
        mat.read(tmp_path / "deep.mat")
