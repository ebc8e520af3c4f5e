"""Own images in folders: which class an image has, what is left out, and what is divided how."""

import os
import warnings

import pytest

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


def test_the_class_is_the_path_of_the_folder_that_directly_holds_the_image(tree):
    lists = folder.load(tree)
    assert all_classes(lists) == ["birds", "birds/emu", "birds/owl", "cat", "dog"]
    for images in lists:
        for path, label in zip(images.paths, images.labels, strict=True):
            assert path.rsplit("/", 1)[0] == images.class_names[label]


def test_no_class_is_on_both_sides_and_the_share_is_kept(tmp_path):
    for number in range(20):
        write_image(tmp_path / f"class{number}" / "a.png")
    for share, expected in ((0.5, 10), (0.25, 5), (0.01, 1), (0.99, 19)):
        train, test = folder.load(tmp_path, test_fraction=share)
        assert len(test.class_names) == expected
        assert set(train.class_names).isdisjoint(test.class_names)
        assert len(train) + len(test) == 20


def test_the_same_seed_divides_alike_and_another_one_otherwise(tmp_path):
    for number in range(20):
        write_image(tmp_path / f"class{number}" / "a.png")
    assert folder.load(tmp_path)[1].class_names == folder.load(tmp_path)[1].class_names
    assert folder.load(tmp_path)[1].class_names != folder.load(tmp_path, seed=1)[1].class_names


def test_images_are_listed_by_class_and_name_whatever_order_the_disk_has(tree):
    for images in folder.load(tree):
        assert images.paths == sorted(images.paths, key=lambda path: path.rsplit("/", 1))


def test_folders_train_and_test_are_taken_as_they_are(tmp_path):
    for path in ("train/cat/1.png", "train/dog/1.png", "test/cat/2.png", "test/deep/er/1.png"):
        write_image(tmp_path / path)
    train, test = folder.load(tmp_path, test_fraction=0.9)
    assert train.class_names == ("cat", "dog")
    assert test.class_names == ("cat", "deep/er")  # the two may share a class
    assert train.paths == ["train/cat/1.png", "train/dog/1.png"]
    with train.open(0) as image:
        assert image.size == (24, 16)


def test_a_third_folder_beside_train_and_test_is_left_out_with_a_warning(tmp_path):
    for path in ("train/cat/1.png", "test/dog/1.png", "val/emu/1.png"):
        write_image(tmp_path / path)
    with pytest.warns(UserWarning, match="left out the folders beside train and test: 'val'"):
        train, test = folder.load(tmp_path)
    assert (len(train), len(test)) == (1, 1)


def test_a_folder_train_alone_is_part_of_the_class(tmp_path):
    for path in ("train/cat/1.png", "train/dog/1.png"):
        write_image(tmp_path / path)
    assert all_classes(folder.load(tmp_path)) == ["train/cat", "train/dog"]


def test_hidden_files_and_other_endings_are_passed_over_in_silence(tree):
    for name in ("._1.jpg", ".hidden.jpg", "notes.txt", "Thumbs.db", "noending"):
        (tree / "cat" / name).touch()
    (tree / ".git").mkdir()
    (tree / ".git" / "1.jpg").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lists = folder.load(tree)
    assert sum(map(len, lists)) == 10


def test_endings_count_in_capitals_too(tmp_path):
    for name in ("a/1.JPG", "b/1.Png", "c/1.webp", "d/1.TIFF"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert all_classes(folder.load(tmp_path)) == ["a", "b", "c", "d"]


def test_empty_classes_are_counted_and_left_out(tree):
    for name in ("wolf", "<script>alert(1)<"):
        (tree / name).mkdir()
    (tree / "wolf" / "readme.txt").touch()
    with pytest.warns(UserWarning, match=r"left out 2 folders without an image: '<script>alert\(1\)<', 'wolf'"):
        lists = folder.load(tree)
    assert "wolf" not in all_classes(lists)


def test_images_without_a_class_are_counted_and_left_out(tree):
    (tree / "loose.jpg").touch()
    with pytest.warns(UserWarning, match=r"left out 1 images that lie in no folder of a class: 'loose.jpg'"):
        lists = folder.load(tree)
    assert sum(map(len, lists)) == 10


def test_images_without_a_class_may_be_given_one(tree):
    (tree / "loose.jpg").touch()
    paths, classes = folder.list_images(tree, loose="mine")
    assert dict(zip(paths, classes, strict=True))["loose.jpg"] == "mine"
    assert len(paths) == len(folder.list_images(tree / "..", tree.name, loose="mine")[0])


def test_links_are_followed_to_files_inside_the_root_only(tree, tmp_path):
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


def test_a_sibling_whose_name_begins_like_the_root_is_outside(tree):
    write_image(tree.parent / "photos-private" / "1.jpg")
    (tree / "cat" / "3.jpg").symlink_to(tree.parent / "photos-private" / "1.jpg")
    with pytest.warns(UserWarning, match="left out 1 links"):
        folder.load(tree)


def test_the_root_itself_may_be_a_link(tree, tmp_path):
    (tmp_path / "link").symlink_to(tree)
    assert all_classes(folder.load(tmp_path / "link")) == all_classes(folder.load(tree))


def test_train_and_test_that_lead_elsewhere_are_not_followed(tree, tmp_path):
    write_image(tmp_path / "elsewhere" / "x" / "1.jpg")
    (tree / "train").symlink_to(tmp_path / "elsewhere")
    (tree / "test").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="left out 2 links"):
        lists = folder.load(tree)
    assert len(all_classes(lists)) == 5


def test_names_of_any_script_are_kept(tmp_path):
    for name in ("Käuze", "猫", "<script>", "a b", "ligne\nbrisée"):
        write_image(tmp_path / name / "図 1.png")
    lists = folder.load(tmp_path)
    assert all_classes(lists) == sorted(["Käuze", "猫", "<script>", "a b", "ligne\nbrisée"])
    assert [problem for images in lists for problem in find_problems(images, decode=True)] == []


def test_a_name_that_is_no_valid_text_does_no_harm(tmp_path):
    try:
        for name in (b"\xff\xfe", b"plain"):
            os.makedirs(os.path.join(os.fsencode(tmp_path), name))
            (tmp_path / os.fsdecode(name) / "1.png").touch()
    except (OSError, UnicodeDecodeError):
        pytest.skip("needs a file system that takes any bytes as a name")
    assert all_classes(folder.load(tmp_path)) == sorted(["plain", os.fsdecode(b"\xff\xfe")])


def test_a_folder_without_images_says_what_was_expected(tmp_path):
    with pytest.raises(ValueError, match=r"no images below .*: expected a folder for each class .* \.jpg"):
        folder.load(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no folder .*nowhere: expected one that holds a folder for each class"
    ):
        folder.load(tmp_path / "nowhere")


def test_a_single_class_cannot_be_divided(tmp_path):
    write_image(tmp_path / "only" / "1.png")
    with pytest.raises(ValueError, match="expected at least 2 classes to divide into train and test, got 1"):
        folder.load(tmp_path)


@pytest.mark.parametrize("share", [0, 1, -0.5, 50])
def test_a_share_outside_0_to_1_is_refused(tree, share):
    with pytest.raises(ValueError, match=f"expected test_fraction between 0 and 1, got {share}"):
        folder.load(tree, test_fraction=share)
