"""Images in folders: classes, splits, and files that are left out."""

import os
import warnings

import pytest

from proxygml import data
from proxygml.data import folder
from proxygml.data.check import find_problems
from tests.data.conftest import write_image


@pytest.fixture
def tree(tmp_path):
    for name in ("cat", "dog", "birds/owl", "birds/emu", "birds"):
        for number in (2, 1):
            (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "photos" / name / f"{number}.jpg").touch()
    return tmp_path / "photos"


def all_classes(lists):
    return sorted(name for images in lists for name in images.class_names)


def test_class_is_the_path_of_the_folder(tree):
    lists = folder.load(tree)
    assert all_classes(lists) == ["birds", "birds/emu", "birds/owl", "cat", "dog"]
    for images in lists:
        for path, label in zip(images.paths, images.labels, strict=True):
            assert path.rsplit("/", 1)[0] == images.class_names[label]


def test_test_fraction(tmp_path):
    for number in range(20):
        write_image(tmp_path / f"class{number}" / "a.png")
    for fraction, expected in ((0.5, 10), (0.25, 5), (0.01, 1), (0.99, 18)):
        train, test = folder.load(tmp_path, test_fraction=fraction)
        assert len(test.class_names) == expected
        assert set(train.class_names).isdisjoint(test.class_names)
        assert len(train) + len(test) == 20


def test_images_are_sorted(tree):
    for images in folder.load(tree):
        assert images.paths == sorted(images.paths, key=lambda path: path.rsplit("/", 1))


def test_train_and_test_folders(tmp_path):
    for path in ("train/cat/1.png", "train/dog/1.png", "test/cat/2.png", "test/deep/er/1.png"):
        write_image(tmp_path / path)
    train, test = folder.load(tmp_path, test_fraction=0.9)
    assert train.class_names == ("cat", "dog")
    assert test.class_names == ("cat", "deep/er")  # the two may fraction a class
    assert train.paths == ["train/cat/1.png", "train/dog/1.png"]
    with train.open(0) as image:
        assert image.size == (24, 16)


def test_folder_beside_train_and_test(tmp_path):
    for path in ("train/cat/1.png", "test/dog/1.png", "val/emu/1.png"):
        write_image(tmp_path / path)
    with pytest.warns(UserWarning, match="left out the folders beside train and test: 'val'"):
        train, test = folder.load(tmp_path)
    assert (len(train), len(test)) == (1, 1)


def test_train_without_test_is_a_class(tmp_path):
    for path in ("train/cat/1.png", "train/dog/1.png"):
        write_image(tmp_path / path)
    assert all_classes(folder.load(tmp_path)) == ["train/cat", "train/dog"]


def test_hidden_and_other_files_are_ignored(tree):
    for name in ("._1.jpg", ".hidden.jpg", "notes.txt", "Thumbs.db", "noending"):
        (tree / "cat" / name).touch()
    (tree / ".git").mkdir()
    (tree / ".git" / "1.jpg").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lists = folder.load(tree)
    assert sum(map(len, lists)) == 10


def test_upper_case_suffixes(tmp_path):
    for name in ("a/1.JPG", "b/1.Png", "c/1.webp", "d/1.TIFF"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert all_classes(folder.load(tmp_path)) == ["a", "b", "c", "d"]


def test_empty_folders_warn(tree):
    for name in ("wolf", "<script>alert(1)<"):
        (tree / name).mkdir()
    (tree / "wolf" / "readme.txt").touch()
    with pytest.warns(UserWarning, match=r"left out 2 folders without an image: '<script>alert\(1\)<', 'wolf'"):
        lists = folder.load(tree)
    assert "wolf" not in all_classes(lists)


def test_images_without_class_warn(tree):
    (tree / "loose.jpg").touch()
    with pytest.warns(UserWarning, match=r"left out 1 images that are in no class folder: 'loose.jpg'"):
        lists = folder.load(tree)
    assert sum(map(len, lists)) == 10


def test_class_of_loose_images(tree):
    (tree / "loose.jpg").touch()
    paths, classes = folder.list_images(tree, loose="mine")
    assert dict(zip(paths, classes, strict=True))["loose.jpg"] == "mine"
    assert len(paths) == len(folder.list_images(tree / "..", tree.name, loose="mine")[0])


def test_links_out_of_the_root_are_left_out(tree, tmp_path):
    secret = write_image(tmp_path / "elsewhere" / "secret.jpg")
    (tree / "cat" / "inside.jpg").symlink_to(tree / "dog" / "1.jpg")
    (tree / "cat" / "outside.jpg").symlink_to(secret)
    (tree / "cat" / "relative.jpg").symlink_to("../../elsewhere/secret.jpg")
    (tree / "stolen").symlink_to(secret.parent)
    (tree / "cat" / "round").symlink_to(tree)  # would never end
    with pytest.warns(
        UserWarning, match=r"left out 4 links to folders or out of the root: 'cat/outside.jpg', 'cat/rel"
    ):
        lists = folder.load(tree)
    paths = [path for images in lists for path in images.paths]
    assert "cat/inside.jpg" in paths
    assert len(paths) == 11


def test_sibling_with_the_roots_prefix_is_outside(tree):
    write_image(tree.parent / "photos-private" / "1.jpg")
    (tree / "cat" / "3.jpg").symlink_to(tree.parent / "photos-private" / "1.jpg")
    with pytest.warns(UserWarning, match="left out 1 links"):
        folder.load(tree)


def test_root_may_be_a_link(tree, tmp_path):
    (tmp_path / "link").symlink_to(tree)
    assert all_classes(folder.load(tmp_path / "link")) == all_classes(folder.load(tree))


def test_links_named_train_and_test(tree, tmp_path):
    write_image(tmp_path / "elsewhere" / "x" / "1.jpg")
    (tree / "train").symlink_to(tmp_path / "elsewhere")
    (tree / "test").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="left out 2 links"):
        lists = folder.load(tree)
    assert len(all_classes(lists)) == 5


def test_any_class_name_is_kept(tmp_path):
    for name in ("Käuze", "猫", "<script>", "a b", "ligne\nbrisée"):
        write_image(tmp_path / name / "図 1.png")
    lists = folder.load(tmp_path)
    assert all_classes(lists) == sorted(["Käuze", "猫", "<script>", "a b", "ligne\nbrisée"])
    assert [problem for images in lists for problem in find_problems(images)] == []


def test_names_that_are_not_utf8(tmp_path):
    try:
        for name in (b"\xff\xfe", b"plain"):
            os.makedirs(os.path.join(os.fsencode(tmp_path), name))
            (tmp_path / os.fsdecode(name) / "1.png").touch()
    except (OSError, UnicodeDecodeError):
        pytest.skip("needs a file system that takes any bytes as a name")
    assert all_classes(folder.load(tmp_path)) == sorted(["plain", os.fsdecode(b"\xff\xfe")])


def test_no_images(tmp_path):
    with pytest.raises(ValueError, match=r"no images below .*: expected a folder for each class .* \.jpg"):
        folder.load(tmp_path)


def test_missing_folder(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no folder .*nowhere: expected a folder with one folder for each class"
    ):
        folder.load(tmp_path / "nowhere")


def test_single_class(tmp_path):
    write_image(tmp_path / "only" / "1.png")
    with pytest.raises(ValueError, match="expected at least 2 classes to divide into train and test, got 1"):
        folder.load(tmp_path)


def test_no_test_classes(tree):
    train, test = data.load("folder", tree, test_fraction=0, classes=2, max_class_size=2)
    assert (len(train.class_names), len(test)) == (2, 0)


@pytest.mark.parametrize("fraction", [1, -0.5, 50])
def test_invalid_test_fraction(tree, fraction):
    with pytest.raises(ValueError, match=f"expected test_fraction from 0 to below 1, got {fraction}"):
        folder.load(tree, test_fraction=fraction)
