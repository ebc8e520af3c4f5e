"""Stanford Online Products."""

import numpy as np
import pytest

from proxygml.data import sop
from proxygml.data.check import compare_counts, find_problems
from tests.data.conftest import genuine


def test_labels_and_names(sop_tree):
    train, test = sop.load(sop_tree)
    assert train.class_names == ("1", "2", "3")
    assert test.class_names == ("4", "5", "6")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert test.labels.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert find_problems(train) + find_problems(test) == []


def test_root_may_be_the_parent_folder(sop_tree):
    assert sop.load(sop_tree.parent)[1].root == sop_tree


@pytest.mark.parametrize("name", ["Ebay_train.txt", "Ebay_test.txt"])
def test_missing_list(sop_tree, name):
    (sop_tree / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"no {name} in .*: unpack Stanford_Online_Products there, see docs"):
        sop.load(sop_tree)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("9 3 1", "Ebay_train.txt, line 10: expected <image_id> <class_id> <super_class_id> <path>, got '9 3 1'"),
        ("9 x 1 a.JPG", "Ebay_train.txt, line 10: expected a whole number of at least 1, got 'x'"),
        ("9 -3 1 a.JPG", "Ebay_train.txt, line 10: expected a whole number of at least 1, got '-3'"),
        ("9 3 1 ../a.JPG", "Ebay_train.txt, line 10: expected a path inside"),
    ],
)
def test_bad_line(sop_tree, line, complaint):
    with (sop_tree / "Ebay_train.txt").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=complaint):
        sop.load(sop_tree)


def test_other_header(sop_tree):
    (sop_tree / "Ebay_test.txt").write_text("1 1 1 bicycle_final/1.JPG\n")
    with pytest.raises(ValueError, match=r"Ebay_test.txt, line 1: expected the header 'image_id class_id"):
        sop.load(sop_tree)


def test_empty_list(sop_tree):
    (sop_tree / "Ebay_test.txt").write_text("image_id class_id super_class_id path\n")
    with pytest.raises(ValueError, match=r"Ebay_test.txt: expected a line for each image, got none"):
        sop.load(sop_tree)


def test_any_path_is_kept(sop_tree):
    with (sop_tree / "Ebay_train.txt").open("a", encoding="utf-8") as file:
        file.write("9 3 1 sofa_final/Stühle <b>\u2028 椅子.JPG\n")
    assert sop.load(sop_tree)[0].paths[-1] == "sofa_final/Stühle <b>\u2028 椅子.JPG"


def test_published_counts():
    train, test = sop.load(genuine("annotations/Stanford_Online_Products"))
    assert compare_counts(train, test, sop.PUBLISHED) == []
    assert (train.class_names[0], train.class_names[-1]) == ("1", "11318")
    assert (test.class_names[0], test.class_names[-1]) == ("11319", "22634")
    sizes = np.bincount(train.labels)
    assert (sizes.min(), sizes.max()) == (2, 12)
