"""Images in a table: columns, splits, and paths that must stay in the folder."""

import hashlib
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxygml.data import table
from proxygml.data.lists import path_below
from proxygml.data.splits import split_classes
from tests.data.conftest import write_image


def write(path, text):
    path.write_bytes(text.encode("utf-8"))
    return path


def test_split_column(tmp_path):
    file = write(
        tmp_path / "list.csv", "path,label,split\na.jpg,owl,train\nb.jpg,emu,train\nc.jpg,owl,test\nd.jpg,cat,Test\n"
    )
    train, test = table.load(file)
    assert (train.paths, train.labels.tolist(), train.class_names) == (["a.jpg", "b.jpg"], [1, 0], ("emu", "owl"))
    assert (test.paths, test.labels.tolist(), test.class_names) == (["c.jpg", "d.jpg"], [1, 0], ("cat", "owl"))
    assert train.root == tmp_path


def test_split_by_class(tmp_path):
    file = write(tmp_path / "list.csv", "path,label\n" + "".join(f"{n}.jpg,{n % 10}\n" for n in range(40)))
    train, test = table.load(file, test_fraction=0.3)
    assert (len(train.class_names), len(test.class_names)) == (7, 3)
    assert (len(train), len(test)) == (28, 12)
    assert set(train.class_names).isdisjoint(test.class_names)


def test_any_column_order(tmp_path):
    file = write(tmp_path / "list.csv", 'price, Label, PATH\n1,a,"x, y.jpg"\n2,b,z.jpg\n\n')
    lists = table.load(file)
    assert sorted(path for images in lists for path in images.paths) == ["x, y.jpg", "z.jpg"]


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    file = write(tmp_path / "list.csv", "\ufeffpath,label\r\na.jpg,one\r\nb.jpg,two\r\n")
    assert sorted(name for images in table.load(file) for name in images.class_names) == ["one", "two"]


def test_tsv(tmp_path):
    file = write(tmp_path / "list.tsv", "path\tlabel\na,b.jpg\tone\nc.jpg\ttwo\n")
    assert sorted(path for images in table.load(file) for path in images.paths) == ["a,b.jpg", "c.jpg"]


def test_root(tmp_path):
    for number in range(2):
        write_image(tmp_path / "photos" / f"{number}.png")
    file = write(tmp_path / "list.csv", "path,label\n0.png,a\n1.png,b\n")
    train, _ = table.load(file, root=tmp_path / "photos")
    with train.open(0) as image:
        assert image.size == (24, 16)


def test_any_label_and_path_is_kept(tmp_path):
    file = write(tmp_path / "list.csv", "path,label\n図/1\u2028.jpg,<script>alert(1)</script>\nb.jpg,Käuzchen\n")
    lists = table.load(file)
    assert {name for images in lists for name in images.class_names} == {"<script>alert(1)</script>", "Käuzchen"}
    assert {path for images in lists for path in images.paths} == {"図/1\u2028.jpg", "b.jpg"}


@pytest.mark.parametrize(
    "path", ["../secret.jpg", "a/../../secret.jpg", "a/../b.jpg", "/etc/passwd", "..", "..\\secret.jpg", "./../x.jpg"]
)
def test_path_outside_the_folder(tmp_path, path):
    file = write(tmp_path / "list.csv", f"path,label\na.jpg,one\n{path},two\n")
    with pytest.raises(ValueError, match=r"list.csv, row 3: expected a path inside .* without '\.\.', got"):
        table.load(file)


def test_absolute_path_becomes_relative(tmp_path):
    file = write(tmp_path / "list.csv", f"path,label\n{tmp_path}/x/a.jpg,one\n./b.jpg,two\nc..d.jpg,two\n")
    lists = table.load(file)
    assert sorted(path for images in lists for path in images.paths) == ["b.jpg", "c..d.jpg", "x/a.jpg"]


def test_sibling_with_the_folders_prefix_is_outside(tmp_path):
    file = write(tmp_path / "list.csv", f"path,label\n{tmp_path}-private/a.jpg,one\nb.jpg,two\n")
    with pytest.raises(ValueError, match=r"list.csv, row 2: expected a path inside"):
        table.load(file)


@settings(deadline=None, database=None)  # no failure on a busy machine, no files left behind
@given(st.text(alphabet=st.sampled_from("./\\:ab ~\0"), max_size=12))
def test_accepted_paths_stay_inside(path):
    root = Path("/data/photos")
    try:
        accepted = path_below(path, root, "row 1")
    except ValueError:
        return
    assert os.path.commonpath([root, os.path.normpath(os.path.join(root, accepted))]) == str(root)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("a.jpg\n", r"list.csv, row 2: expected 2 columns, got 1: \['a.jpg'\]"),
        ("a.jpg,one,two\n", "list.csv, row 2: expected 2 columns, got 3"),
        ("a.jpg,one\n,two\n", "list.csv, row 3: expected a path and a label, got path '' and label 'two'"),
        ("a.jpg,one\nb.jpg, \n", "list.csv, row 3: expected a path and a label, got path 'b.jpg' and label ''"),
        ("a.jpg,one\nb.jpg,two\n./a.jpg,two\n", "list.csv, row 4: 'a.jpg' is in an earlier row too, list every"),
        ("", "lists no images"),
        ("a.jpg,one\n", "expected at least 2 classes"),
        (f"a.jpg,{'x' * 200_000}\n", "list.csv, row 2: not valid CSV: field larger than field limit"),
    ],
)
def test_bad_row(tmp_path, rows, complaint):
    with pytest.raises(ValueError, match=complaint):
        table.load(write(tmp_path / "list.csv", "path,label\n" + rows))


def test_unknown_split(tmp_path):
    file = write(tmp_path / "list.csv", "path,label,split\na.jpg,one,train\nb.jpg,two,val\n")
    with pytest.raises(ValueError, match=r"list.csv, row 3: expected split train or test, got 'val'"):
        table.load(file)


def test_no_test_image(tmp_path):
    file = write(tmp_path / "list.csv", "path,label,split\na.jpg,one,train\nb.jpg,two,train\n")
    with pytest.raises(ValueError, match="expected training images and test images, got 2 and 0"):
        table.load(file)


@pytest.mark.parametrize("header", ["file,label", "path;label", "path,label,label", ""])
def test_bad_header(tmp_path, header):
    with pytest.raises(ValueError, match=r"list.csv: expected the columns path, label and optionally split, got"):
        table.load(write(tmp_path / "list.csv", header + "\n"))


def test_not_utf8(tmp_path):
    (tmp_path / "list.csv").write_bytes("path,label\na.jpg,Käuzchen\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"list.csv: expected UTF-8 text, got other bytes at 18: save it as UTF-8"):
        table.load(tmp_path / "list.csv")


def test_missing_table(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no table .*list.csv: expected a CSV or parquet file"):
        table.load(tmp_path / "list.csv")


def test_images_are_not_accessed(tmp_path, monkeypatch):
    rows = "".join(f"{number % 99}/{number}.jpg,{number // 20}\n" for number in range(20_000))
    file = write(tmp_path / "list.csv", "path,label\n" + rows)
    looked = []
    for name in ("stat", "lstat"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *path, call=call, **more: looked.append(path) or call(*path, **more))
    train, test = table.load(file)
    assert (len(train), len(test)) == (10_000, 10_000)
    assert 0 < len(looked) < 10  # at the table itself


@pytest.fixture
def write_parquet(tmp_path, monkeypatch):
    """Writes columns to a parquet file; two rows are read at a time."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    monkeypatch.setattr(table, "BATCH", 2)

    def write(columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / "list.parquet", compression="zstd")
        return tmp_path / "list.parquet"

    return write


def test_parquet(write_parquet):
    columns = {"label": [7, 8, 7], "path": ["a.jpg", "b.jpg", "c.jpg"], "split": ["train", "test", "train"]}
    train, test = table.load(write_parquet(columns | {"more": [0.5, 0.5, 0.5]}))
    assert (train.paths, train.class_names) == (["a.jpg", "c.jpg"], ("7",))
    assert (test.paths, test.class_names) == (["b.jpg"], ("8",))


@pytest.mark.parametrize("labels", [["one", "two", None], [1.0, 2.0, float("nan")]])
def test_missing_label_in_parquet(write_parquet, labels):
    with pytest.raises(ValueError, match=r"list.parquet, row 3: expected a path and a label, got path 'c.jpg'"):
        table.load(write_parquet({"path": ["a.jpg", "b.jpg", "c.jpg"], "label": labels}))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "list.parquet").touch()
    with pytest.raises(ImportError, match=r"list.parquet needs pyarrow: pip install pyarrow, or save the table as CSV"):
        table.load(tmp_path / "list.parquet")


def test_test_classes_are_the_first_by_hash():
    names = [f"class {number}" for number in range(9)]
    by_hash = sorted((hashlib.sha256(f"0/{name}".encode()).hexdigest(), name) for name in names)
    assert split_classes(names, 1 / 3) == {name for _, name in by_hash[:3]}


@pytest.mark.parametrize(("classes", "fraction", "tested"), [(2, 0.5, 1), (3, 0.5, 1), (3, 0.99, 1), (8, 0.99, 6)])
def test_two_classes_are_left_to_train_on(classes, fraction, tested):
    assert len(split_classes(map(str, range(classes)), fraction)) == tested


def test_new_class_moves_at_most_one_other(tmp_path):
    names = [f"class {number}" for number in range(100)]
    before = split_classes(names, 0.5)
    after = split_classes([*names, "new"], 0.5)
    assert len((before ^ after) - {"new"}) <= 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"path": ["a" * 3000] * 20_000, "label": [1] * 20_000}, "list.parquet, row 2: .* is in an earlier row"),
        ({"path": ["a", "b"], "label": ["c" * 50_000_000, "d"]}, "it unpacks to 50,[0-9,]* bytes: it is not opened"),
        ({"path": ["a", "b"], "label": [[1], [2]]}, "expected texts or numbers in label, got list<"),
    ],
)
def test_parquet_bomb_is_refused(write_parquet, monkeypatch, columns, message):
    monkeypatch.setattr(table, "BATCH", 128)
    with pytest.raises(ValueError, match=message):
        table.load(write_parquet(columns))
