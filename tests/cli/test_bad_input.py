"""Damaged input for every reader: it is read, or refused in one line. `python -m fuzz` does the same for longer."""

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from fuzz.readers import LONGEST, READERS, complaint
from fuzz.seeds import BETWEEN, checkpoint, embeddings, npz, picture
from proxygml.data import ImageList, load
from proxygml.data.check import find_problems
from proxygml.data.images import Crops
from proxygml.embeddings import Embeddings
from proxygml.training.checkpoints import load_checkpoint
from proxygml.training.run import Run

SIGNS = [b"\xff" * 4, b"\0" * 8, b"\x7f\xff\xff\xff", b"-1", b"1e999", b"9" * 30, b"nan", b'"', b"[" * 50, b"/.."]
ODD = [None, True, -1, 0, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 9999, "\ud800", "a\nb", [], {}, [[{}]]]
quick = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("read")


@st.composite
def damage(draw: Callable, whole: bytes) -> bytes:
    """A file that was cut, or in which bytes were altered, lost, doubled or put."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(whole)))
        stop = min(len(whole), start + draw(st.sampled_from([1, 2, 4, 8, 64, 512])))
        before, part, after = whole[:start], whole[start:stop], whole[stop:]
        how = draw(st.sampled_from(["cut", "flip", "lose", "double", "put"]))
        if how == "cut":
            whole = before
        elif how == "flip":
            whole = before + bytes(byte ^ draw(st.sampled_from([1, 128, 255])) for byte in part[:1]) + part[1:] + after
        elif how == "lose":
            whole = before + after
        elif how == "double":
            whole = before + part + part + after
        else:
            whole = before + draw(st.sampled_from(SIGNS)) + after
    return whole


@pytest.mark.parametrize("name", READERS)
def test_valid_file_is_read(name: str, tmp_path: Path) -> None:
    for seed in READERS[name].seeds():
        READERS[name].write(seed, tmp_path)
        READERS[name].read(tmp_path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.slow
def test_damaged_file_is_read_or_one_line(name: str, folder: Path) -> None:
    seeds = READERS[name].seeds()

    @quick
    @given(st.sampled_from(seeds).flatmap(damage))
    def check(given_bytes: bytes) -> None:
        assert complaint(READERS[name], given_bytes, folder) is None

    check()


@st.composite
def altered(draw: Callable, value: object) -> object:
    """A JSON value with one part replaced by another."""
    if isinstance(value, (dict, list)) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        if draw(st.integers(0, 9)) == 0 and isinstance(value, dict):
            return {name: part for name, part in value.items() if name != key}
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[key] = draw(altered(value[key]))
        return copy
    return draw(st.sampled_from(ODD))


@pytest.mark.parametrize("name", ["recipe", "results", "run"])
@pytest.mark.slow
def test_odd_json_value_is_read_or_one_line(name: str, folder: Path) -> None:
    first, *rest = READERS[name].seeds()[0].split(BETWEEN)

    @settings(quick, max_examples=150)
    @given(altered(json.loads(first)))
    def check(value: object) -> None:
        text = BETWEEN.join([json.dumps(value).encode(), *rest])
        assert complaint(READERS[name], text, folder) is None

    check()


ARRAYS = [
    *(np.array(5), np.zeros(4), np.zeros((4, 0)), np.zeros((0, 3)), np.zeros((4, 3), ">f8"), np.zeros((4, 3), complex)),
    *(np.array(["a", "b", "c", "d"]), np.array([b"a", b"b", b"c", b"d"]), np.array(["", "", "", ""]), np.array("text")),
    *(np.array([0, 1, 1, 0], "m8[s]"), np.array([0, 1, 1, 0], "M8[s]"), np.array([True, False, True, False])),
    *(np.array([0, -1, 2**40, 5]), np.array([0, 2**64 - 1, 1, 1], np.uint64), np.array([0, 1, np.nan, np.inf])),
    np.array([2**31, 5, 6, 2**32 - 1], "u4").view("U1"),
    *(np.zeros(4, [("a", "f4")]), np.zeros(4, "V0"), np.zeros((4, 2, 2), "U0"), np.zeros((4, 2, 1, 1, 1), "U3")),
]


@pytest.mark.parametrize("name", ["embeddings", "omniglot"])
def test_odd_array_is_read_or_one_line(name: str, folder: Path) -> None:
    whole = READERS[name].seeds()[0][1:]
    with np.load(io.BytesIO(whole)) as stored:
        right = dict(stored)
    for place in right:
        for odd in ARRAYS:
            given_bytes = b"R" + npz(right | {place: odd})
            assert complaint(READERS[name], given_bytes, folder) is None, (place, odd)


@pytest.mark.parametrize("name", ["recipe", "results", "run"])
def test_deeply_nested_json_is_refused(name: str, tmp_path: Path) -> None:
    READERS[name].write(b"[" * 10**5, tmp_path)
    with pytest.raises(ValueError, match="nested too deeply"):
        READERS[name].read(tmp_path)


def npy_header(shape: str) -> bytes:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize("shape", ["(1000000000000, 128)", "(4611686018427387904, 4)", "(-1, 3)", "(1099511627776, 0)"])
def test_array_of_terabytes_is_refused(shape: str, tmp_path: Path) -> None:
    given_bytes = b"M" + BETWEEN.join([npy_header(shape), *embeddings()[1][1:].split(BETWEEN)[1:]])
    READERS["embeddings"].write(given_bytes, tmp_path)
    with pytest.raises(ValueError, match=r"vectors\.npz does not contain embeddings: "):
        Embeddings.load(tmp_path / "vectors.npz")


def zip_bomb(whole: bytes) -> bytes:
    """The same archive, which says that its first member unpacks to a terabyte."""
    file = io.BytesIO(whole)
    with zipfile.ZipFile(file, "a") as packed:
        packed.writestr("more", b"")
        packed.filelist[0].file_size = 2**40
    return file.getvalue()


def test_zip_bombs_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "vectors.npz").write_bytes(zip_bomb(embeddings()[0][1:]))
    with pytest.raises(ValueError, match=r"vectors\.npz .* unpacks to 1,099,511,.*: it is not opened"):
        Embeddings.load(tmp_path / "vectors.npz")
    (tmp_path / "last.pt").write_bytes(zip_bomb(checkpoint()))
    with pytest.raises(ValueError, match=r"last\.pt .* unpacks to more: it is not opened"):
        load_checkpoint(tmp_path / "last.pt")


def test_checkpoint_with_other_content_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "last.pt")
    with pytest.raises(ValueError, match="expected values by name, got list"):
        load_checkpoint(tmp_path / "last.pt")
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="expected the weights of a run, got another safetensors file"):
        Run(tmp_path).load_best()


@pytest.mark.parametrize(("name", "lines"), [("table.csv", "path,label\n"), ("Ebay_train.txt", "")])
def test_line_of_many_megabytes_is_refused(name: str, lines: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(lines + 20_000_000 * "a" + " b")
    (tmp_path / "Ebay_test.txt").write_text("")
    with pytest.raises(ValueError) as refused:
        load(*(("table", tmp_path / name) if name == "table.csv" else ("sop", tmp_path)))
    assert len(str(refused.value)) < LONGEST


def test_image_of_billions_of_pixels_is_a_problem(tmp_path: Path) -> None:
    parts = [b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(bytes(9))]
    chunks = b"".join(struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    (problem,) = find_problems(ImageList(["huge.png"], np.zeros(1), ("any",), tmp_path))
    assert problem.reason.startswith("huge: ")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged metadata
@pytest.mark.parametrize(
    "held",  # type, count and value of a field of EXIF
    [b"\0\2\0\0\0\0026\0\0\0", b"\0\3\0\0\0\1\0\x63\0\0", b"\0\7\0\0\0\1\6\0\0\0", b""],
    ids=["text", "99", "a byte", "nothing"],
)
def test_invalid_exif_is_ignored(held: bytes, tmp_path: Path) -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12" + held + bytes(4)
    for name, more in (("plain.jpg", {}), ("odd.jpg", {"exif": exif})):
        (tmp_path / name).write_bytes(picture("JPEG", **more))
    images = ImageList(["plain.jpg", "odd.jpg"], np.zeros(2), ("any",), tmp_path)
    assert find_problems(images) == []
    crops = Crops(images.open, images.labels, size=16)
    assert np.array_equal(crops[0][0], crops[1][0])


@pytest.mark.parametrize("held", range(1, 9))
def test_tiff_is_rotated_once(held: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = held
    turned = {"exif": exif.tobytes()}
    (tmp_path / "a.tiff").write_bytes(picture("TIFF", **turned))
    (tmp_path / "a.png").write_bytes(picture("PNG", **turned))
    images = ImageList(["a.tiff", "a.png"], np.zeros(2), ("any",), tmp_path)
    crops = Crops(images.open, images.labels, size=16)
    # Pillow turns a TIFF before it is resized, which rounds in another order.
    np.testing.assert_allclose(crops[0][0].astype(int), crops[1][0], atol=1)


class Greedy:
    """Allocates a hundred gigabytes when it is unpickled."""

    def __reduce__(self) -> tuple:
        return bytearray, (10**11,)


def test_checkpoint_that_allocates_memory_is_not_opened(tmp_path: Path) -> None:
    torch.save({"model": Greedy(), "loss": {}}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="contains more than weights and plain values"):
        load_checkpoint(tmp_path / "last.pt")


@pytest.mark.slow
def test_fuzzer_counts_its_inputs(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason='the fuzzer needs atheris: pip install "proxygml[fuzz]"')
    command = [sys.executable, "-m", "fuzz", "--runs", "200", "--target", "recipe", "--out", "fuzz.json"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "fuzz.json").read_text())
    assert kept["failures"] == 0
    assert kept["runs"] == kept["targets"]["recipe"]["runs"] >= 200
    assert f"1 readers, {kept['runs']} inputs, 0 failures" in done.stdout
