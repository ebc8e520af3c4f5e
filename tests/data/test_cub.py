"""CUB-200-2011: joined by id, split by class, and errors that name file and line."""

import tarfile
from pathlib import Path

import pytest

from proxygml.data import cub
from proxygml.data.check import compare_counts, find_problems
from tests.data.conftest import genuine


def test_split_by_class(cub_tree):
    train, test = cub.load(cub_tree)
    assert train.class_names == ("001.Black_footed_Albatross", "002.Laysan_Albatross", "100.Brown_Pelican")
    assert test.class_names == ("101.White_Pelican", "102.Western_Wood_Pewee", "200.Common_Yellowthroat")
    assert (len(train), len(test)) == (7, 7)
    assert set(train.class_names).isdisjoint(test.class_names)


def test_labels_are_joined_by_image_id(cub_tree):
    for images in cub.load(cub_tree):
        for path, label in zip(images.paths, images.labels, strict=True):
            assert path.startswith(images.class_names[label] + "/")  # the folder carries the class's name


def test_root_may_be_the_parent_folder(cub_tree):
    assert cub.load(cub_tree.parent)[0].paths == cub.load(cub_tree)[0].paths
    assert cub.load(cub_tree.parent)[0].root == cub_tree / "images"


def test_every_image_opens(cub_tree):
    for images in cub.load(cub_tree):
        assert find_problems(images) == []
        assert not any("._" in path for path in images.paths)


@pytest.mark.parametrize("name", ["images.txt", "image_class_labels.txt", "classes.txt"])
def test_missing_file(cub_tree, name):
    (cub_tree / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"no {name} in .*: unpack CUB_200_2011 there, see docs/datasets.md"):
        cub.load(cub_tree)


@pytest.mark.parametrize(
    ("name", "line", "complaint"),
    [
        ("images.txt", "99", "images.txt, line 15: expected <image_id> <path>, got '99'"),
        ("images.txt", "x 001.A/1.jpg", "images.txt, line 15: expected a whole number of at least 1, got 'x'"),
        ("images.txt", "99 001.A/1.jpg", "expected image 99 in images.txt and in image_class_labels.txt"),
        ("images.txt", "7 001.A/1.jpg", "images.txt, line 15: expected every image id once, got 7 again"),
        ("image_class_labels.txt", "7 2", "image_class_labels.txt, line 15: expected every image id once, got 7 again"),
        ("image_class_labels.txt", "98 2", "expected image 98 in images.txt and in image_class_labels.txt"),
        ("classes.txt", "2 again", "classes.txt, line 7: expected every class id once, got 2 again"),
        ("classes.txt", "٣ three", "classes.txt, line 7: expected a whole number 1..200"),
    ],
)
def test_bad_line(cub_tree, name, line, complaint):
    with (cub_tree / name).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=complaint):
        cub.load(cub_tree)


@pytest.mark.parametrize("number", [0, 201])
def test_class_out_of_range(cub_tree, number):
    labels = cub_tree / "image_class_labels.txt"
    labels.write_text(labels.read_text().replace("40 2\n", f"40 {number}\n"))
    with pytest.raises(ValueError, match=f"labels.txt, line 14: expected a whole number 1..200, got '{number}'"):
        cub.load(cub_tree)


def test_path_outside_the_folder(cub_tree):
    text = (cub_tree / "images.txt").read_text()
    (cub_tree / "images.txt").write_text(text.replace("002.Laysan_Albatross/", "../../", 1))
    with pytest.raises(ValueError, match=r"images.txt, line 3: expected a path inside"):
        cub.load(cub_tree)


def test_missing_class_name(cub_tree):
    text = (cub_tree / "classes.txt").read_text()
    (cub_tree / "classes.txt").write_text(text.replace("200 200.Common_Yellowthroat\n", ""))
    with pytest.raises(ValueError, match=r"images.txt, line 12: expected a name of class 200 in classes.txt, got none"):
        cub.load(cub_tree)


def test_no_test_class(cub_tree):
    for name, kept in (("images.txt", 7), ("image_class_labels.txt", 14)):
        lines = (cub_tree / name).read_text().splitlines()[:kept]
        if name == "image_class_labels.txt":
            lines = [line for line in lines if int(line.split()[1]) <= 100]
        (cub_tree / name).write_text("\n".join(lines))
    with pytest.raises(ValueError, match="expected training images and test images, got 7 and 0"):
        cub.load(cub_tree)


def test_windows_line_ends_and_empty_lines(cub_tree):
    before = cub.load(cub_tree)[0].paths
    text = (cub_tree / "images.txt").read_text()
    (cub_tree / "images.txt").write_bytes(text.replace("\n", "\r\n").encode() + b"\r\n")
    assert cub.load(cub_tree)[0].paths == before


def test_any_class_name_is_kept(cub_tree):
    names = (cub_tree / "classes.txt").read_text()
    strange = "001.<script>alert(1)<_script> Rotkehlchen 駒鳥"
    (cub_tree / "classes.txt").write_text(names.replace("001.Black_footed_Albatross", strange), encoding="utf-8")
    assert cub.load(cub_tree)[0].class_names[0] == strange


@pytest.mark.slow
def test_published_counts(tmp_path):
    archive = genuine("CUB_200_2011_short256.tar")
    with tarfile.open(archive) as tar:
        for name in ("images.txt", "image_class_labels.txt", "classes.txt"):
            (tmp_path / name).write_bytes(tar.extractfile(f"CUB_200_2011/{name}").read())
        photos = {Path(name).relative_to("CUB_200_2011/images").as_posix() for name in tar.getnames() if ".jpg" in name}
    train, test = cub.load(tmp_path)
    assert compare_counts(train, test, cub.PUBLISHED) == []
    assert set(train.paths) | set(test.paths) == photos
    for images in (train, test):
        assert all(p.startswith(images.class_names[k] + "/") for p, k in zip(images.paths, images.labels, strict=True))
