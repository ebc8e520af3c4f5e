"""Omniglot from its folders of PNGs and from the packed npz."""

import numpy as np
import pytest
from PIL import Image

from proxygml.data import omniglot
from proxygml.data.check import compare_counts, find_problems
from tests.data.conftest import genuine


@pytest.fixture
def png_tree(tmp_path):
    for part, alphabet in (("background", "Alphabet_of_the_Magi"), ("evaluation", "Angelic")):
        for character in ("character01", "character02"):
            for person in range(1, 4):
                path = tmp_path / f"images_{part}" / alphabet / character / f"0001_{person:02d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("1", (105, 105), 1).save(path)
    return tmp_path


def packed(path, **changes):
    arrays = {
        "x_background": np.zeros((4, 28, 28), np.uint8),
        "y_background": np.array([0, 1, 1, 0], np.int16),
        "names_background": np.array(["Greek/character01", "Greek/character02"]),
        "x_evaluation": np.ones((2, 28, 28), np.uint8),
        "y_evaluation": np.array([0, 0], np.int16),
        "names_evaluation": np.array(["ULOG/character01"]),
    }
    arrays.update(changes)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_folders(png_tree):
    train, test = omniglot.load(png_tree)
    assert train.class_names == ("Alphabet_of_the_Magi/character01", "Alphabet_of_the_Magi/character02")
    assert test.class_names == ("Angelic/character01", "Angelic/character02")
    assert train.paths[0] == "images_background/Alphabet_of_the_Magi/character01/0001_01.png"
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert find_problems(train) == []


def test_packed_file(tmp_path):
    train, test = omniglot.load(packed(tmp_path / "omniglot28.npz"))
    assert train.paths == [f"Greek/character0{c}/0{k}" for c, k in ((1, 1), (2, 1), (2, 2), (1, 2))]
    assert train.labels.tolist() == [0, 1, 1, 0]
    assert test.class_names == ("ULOG/character01",)
    assert test.pixels.shape == (2, 28, 28)
    assert (np.asarray(test.open(0)) == 1).all()


def test_root_may_contain_the_packed_file(tmp_path):
    packed(tmp_path / "omniglot28.npz")
    assert len(omniglot.load(tmp_path)[0]) == 4


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no images_background and no omniglot28.npz in .*: unpack Omniglot"):
        omniglot.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"y_evaluation": None}, "got no y_evaluation"),
        ({"y_evaluation": np.array([0, 1])}, "expected y_evaluation to index the 1 names_evaluation"),
        ({"x_evaluation": np.zeros((2, 28, 28))}, "expected x_evaluation .* uint8"),
        ({"x_evaluation": np.zeros((3, 28, 28), np.uint8)}, r"got \(3, 28, 28\) uint8 and \(2,\)"),
        ({"names_evaluation": np.array([{}], dtype=object)}, "cannot read .* as an npz file"),
    ],
)
def test_invalid_packed_file(tmp_path, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        omniglot.load(packed(tmp_path / "omniglot28.npz", **changes))


def test_damaged_packed_file(tmp_path):
    path = packed(tmp_path / "omniglot28.npz")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"cannot read .*omniglot28.npz as an npz file, fetch it again"):
        omniglot.load(tmp_path)


def test_published_counts_and_colors():
    train, test = omniglot.load(genuine("omniglot28.npz"))
    assert compare_counts(train, test, omniglot.PUBLISHED) == []
    assert len(set(train.paths)) == len(train)
    corners = train.pixels[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert np.median(corners) == 0
    assert train.pixels.mean() < 64
    assert train.pixels.max() == 255
