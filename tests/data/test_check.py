"""Unreadable images and published counts."""

import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from proxygml.data import ImageList, cub
from proxygml.data.check import Counts, Problem, compare_counts, find_problems
from tests.data.conftest import write_image


def listed(root, *names):
    return ImageList(names, np.zeros(len(names), np.int64), ("class",), root=root)


def reason(root, name):
    (problem,) = find_problems(listed(root, name))
    assert (problem.index, problem.path) == (0, name)
    assert "\n" not in problem.reason
    return problem.reason


def write_png_header(path, width, height):
    """A PNG that promises so many pixels and has none."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


@pytest.mark.parametrize(
    ("name", "mode"),
    [("gray.jpg", "L"), ("print.jpg", "CMYK"), ("palette.png", "P"), ("bits.png", "1"), ("alpha.png", "RGBA")],
)
def test_every_mode_is_readable(tmp_path, name, mode):
    write_image(tmp_path / name, mode=mode)
    assert find_problems(listed(tmp_path, name)) == []


def test_16_bit_animated_and_rotated_images_are_readable(tmp_path):
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(tmp_path / "deep.png")
    frames = [Image.new("P", (8, 8), color) for color in range(3)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (8, 4)).save(tmp_path / "turned.jpg", exif=turned)
    assert find_problems(listed(tmp_path, "deep.png", "moving.gif", "turned.jpg")) == []


def test_missing_empty_and_other_files(tmp_path):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("<script>alert(1)</script>")
    (tmp_path / "folder.jpg").mkdir()
    assert reason(tmp_path, "gone.jpg") == "missing: no such file"
    assert reason(tmp_path, "empty.jpg") == "empty: the file has 0 bytes"
    assert reason(tmp_path, "text.jpg") == "unreadable: no known image format"
    assert reason(tmp_path, "folder.jpg") == "not a file"
    assert "embedded null" in reason(tmp_path, "a\0b.jpg")  # Python 3.13 puts a word before it


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    assert reason(tmp_path, "pipe.jpg") == "not a file"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a user who may not read everything")
def test_permission_denied(tmp_path):
    write_image(tmp_path / "private.jpg").chmod(0)
    assert reason(tmp_path, "private.jpg") == "not readable: permission denied"


@pytest.mark.parametrize("name", ["cut.jpg", "cut.png", "cut.webp", "cut.bmp", "cut.tif"])
def test_truncated_image(tmp_path, name):
    path = write_image(tmp_path / name, size=(64, 64))
    whole = path.read_bytes()
    assert find_problems(listed(tmp_path, name)) == []
    path.write_bytes(whole[: len(whole) * 2 // 3])
    assert reason(tmp_path, name).startswith(("truncated: ", "damaged: ", "unreadable: "))


@pytest.mark.parametrize("side", [15_000, 30_000])  # Pillow warns of the first and refuses the second
def test_decompression_bomb(tmp_path, side):
    write_png_header(tmp_path / "bomb.png", side, side)
    assert reason(tmp_path, "bomb.png") == "huge: more than 200 million pixels: make it smaller"


def test_order_and_progress(tmp_path):
    write_image(tmp_path / "good.png")
    names = ["gone.png" if number % 7 == 0 else "good.png" for number in range(1000)]
    calls = []
    problems = find_problems(listed(tmp_path, *names), progress=lambda *call: calls.append(call))
    assert [problem.index for problem in problems] == list(range(0, 1000, 7))
    assert problems[0] == Problem(0, "gone.png", "missing: no such file")
    assert calls == sorted(calls)
    assert calls[-1] == (1000, 1000)


def test_interruption(tmp_path):
    write_image(tmp_path / "good.png")
    images = listed(tmp_path, *["good.png"] * 20_000)
    opened = []

    class Counted(ImageList):
        def open(self, index):
            opened.append(index)
            return super().open(index)

    def interrupt(done, total):
        raise KeyboardInterrupt

    counted = Counted(images.paths, images.labels, images.class_names, root=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        find_problems(counted, progress=interrupt)
    assert len(opened) < 15_000


def test_images_in_memory(tmp_path):
    images = ImageList(["a", "b"], np.array([0, 0]), ("class",), pixels=np.zeros((2, 4, 4), np.uint8))
    calls = []
    assert find_problems(images, progress=lambda *call: calls.append(call)) == []
    assert calls == [(2, 2)]


def test_deleted_photo(cub_tree):
    train, _ = cub.load(cub_tree)
    (cub_tree / "images" / train.paths[3]).unlink()
    assert find_problems(train) == [Problem(3, train.paths[3], "missing: no such file")]


def test_compare_counts(cub_tree):
    train, test = cub.load(cub_tree)
    assert compare_counts(train, test, Counts(3, 7, 3, 7)) == []
    assert compare_counts(train, test, Counts(3, 8, 1_000, 7)) == [
        "train images: expected 8, found 7",
        "test classes: expected 1,000, found 3",
    ]


def test_nan_pixels_are_found(tmp_path):
    for name, value in (("good", 0.5), ("bad", np.nan)):
        Image.fromarray(np.full((4, 4), value, np.float32)).save(tmp_path / f"{name}.tiff")
    assert find_problems(listed(tmp_path, "good.tiff")) == []
    assert reason(tmp_path, "bad.tiff") == "damaged: some of its pixels are NaN"
