"""Letters in sixteen typefaces: classes, drawings and the cache file."""

import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import platformdirs
import pytest
from fontTools.ttLib import TTFont

from proxygml.data import ImageList, glyphs, load


@pytest.fixture(scope="module")
def halves(own_cache):
    return glyphs.load()


def characters(images: ImageList) -> list[str]:
    """The character of each class."""
    return [chr(int(name.split()[0].removeprefix("U+"), 16)) for name in images.class_names]


def drawing(images: ImageList, path: str) -> np.ndarray:
    return images.pixels[list(images.paths).index(path)]


def find(halves: tuple[ImageList, ImageList], character: str, face: str) -> np.ndarray:
    path = f"U+{ord(character):04X}/{face}"
    return next(drawing(half, path) for half in halves if path in half.paths)


def rows_with_ink(pixels: np.ndarray) -> np.ndarray:
    return np.flatnonzero(pixels.max(axis=1) > 127)


def recall_at_1(images: ImageList) -> float:
    """Recall@1 by the cosine of the raw pixels."""
    vectors = images.pixels.reshape(len(images), -1).astype(np.float32)  # (M, size * size)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T  # (M, M)
    np.fill_diagonal(cosines, -1)
    return float((images.labels[cosines.argmax(axis=1)] == images.labels).mean())


def test_counts(halves):
    train, test = halves
    classes = [len(half.class_names) for half in halves]
    assert 1200 <= sum(classes) <= 1280
    assert abs(classes[0] - classes[1]) <= 1
    assert 16_300 <= len(train) + len(test) <= 17_300
    for half in halves:
        assert half.pixels.shape == (len(half), 32, 32)
        assert half.pixels.dtype == np.uint8


def test_halves_are_disjoint(halves):
    train, test = halves
    assert not set(train.class_names) & set(test.class_names)
    assert not set(train.paths) & set(test.paths)
    assert len(set(train.paths)) == len(train)
    assert len(set(test.paths)) == len(test)


def test_labels_match_paths(halves):
    for half in halves:
        for path, label in zip(half.paths, half.labels, strict=True):
            assert half.class_names[label].split()[0] == path.split("/")[0]
    names = halves[0].class_names + halves[1].class_names
    assert "U+0041 LATIN CAPITAL LETTER A" in names


def test_a_class_has_an_image_in_every_face_that_has_it(halves):
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    listed = {}
    for face in glyphs.FACES:
        with TTFont(folder / f"{face}.ttf", lazy=True) as font:
            listed[face] = set(font.getBestCmap())
    for half in halves:
        drawn = {character: set() for character in characters(half)}
        for path in half.paths:
            code_point, face = path.split("/")
            drawn[chr(int(code_point.removeprefix("U+"), 16))].add(face)
        for character, faces in drawn.items():
            assert faces == {face for face in glyphs.FACES if ord(character) in listed[face]}, character
            assert len(faces) >= 12


def test_drawings_differ_between_classes(halves):
    seen = {}
    for half in halves:
        for path, pixels in zip(half.paths, half.pixels, strict=True):
            character, face = path.split("/")
            other = seen.setdefault((face, pixels.tobytes()), character)
            assert other == character, f"{character} and {other} look the same in {face}"


@pytest.mark.parametrize(
    ("kept", "left_out"),
    [("A", "\u0391\u0410"), ("o", "\u03bf\u043e"), ("\u00c5", "\u212b"), ("K", "\u039a\u212a"), ("\u03a9", "\u2126")],
    ids=["A", "o", "A-ring", "K", "Omega"],
)
def test_lowest_of_equal_characters_is_kept(halves, kept, left_out):
    everything = set(characters(halves[0]) + characters(halves[1]))
    assert kept in everything
    assert not set(left_out) & everything


def test_classes_are_letters(halves):
    everything = characters(halves[0]) + characters(halves[1])
    assert all(character.isalpha() for character in everything)
    assert not {"\u02b0", "\u02c8", "1", "+"} & set(everything)  # raised h, stress mark


def test_ink_stays_inside_the_border(halves):
    pixels = np.concatenate([half.pixels for half in halves])  # (M, 32, 32)
    assert (pixels.max(axis=(1, 2)) > 127).all()
    border = np.concatenate([pixels[:, 0], pixels[:, -1], pixels[:, :, 0], pixels[:, :, -1]], axis=1)
    assert (border.max(axis=1) > 0).mean() < 0.005


@pytest.mark.slow
def test_large_drawings_are_not_cut_off():
    for face in glyphs.FACES:
        font = glyphs._font(face, glyphs.DRAWN_SIZE)
        for code_point in sorted(set(glyphs._classes()) & glyphs._characters(face)):
            left, top, right, bottom = glyphs._draw(code_point, font).getbbox()
            assert min(left, top) > 0, (face, chr(code_point))
            assert max(right, bottom) < glyphs.DRAWN_SIZE, (face, chr(code_point))


@pytest.mark.parametrize("face", ["DejaVuSans", "DejaVuSerif-Bold", "STIXGeneral"])
def test_letters_share_baseline_and_scale(halves, face):
    small, capital, descending = (rows_with_ink(find(halves, character, face)) for character in "xHp")
    assert abs(small[-1] - capital[-1]) <= 1
    assert descending[-1] >= small[-1] + 3
    assert len(capital) >= len(small) + 3
    columns = np.flatnonzero(find(halves, "H", face).max(axis=0))
    assert abs(columns[0] - (31 - columns[-1])) <= 1


@pytest.mark.slow
def test_another_process_renders_the_same_bytes(tmp_path, halves):
    code = (
        "import sys; from proxygml.data import glyphs\n"
        "assert 'matplotlib' not in sys.modules, 'the import of glyphs alone must not import matplotlib'\n"
        "glyphs.load(); assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = os.environ | {"PROXYGML_CACHE": str(tmp_path), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    with np.load(glyphs._cache_path(32)) as ours, np.load(next(tmp_path.glob("glyphs-32-*.npz"))) as theirs:
        assert len(ours["code_points"]) == sum(map(len, halves))
        for name in ("pixels", "code_points", "faces"):
            assert ours[name].tobytes() == theirs[name].tobytes()


def test_images_are_the_same_at_every_size(halves):
    for half, small in zip(halves, glyphs.load(size=8), strict=True):
        assert small.paths == half.paths


def test_fewer_classes_are_the_first_classes(halves):
    for few, many, everything in zip(load("glyphs", classes=5), load("glyphs", classes=40), halves, strict=True):
        assert len(few.class_names) == 5
        assert few.class_names == many.class_names[:5]
        assert many.class_names == everything.class_names[:40]
        assert list(few.paths) == list(everything.paths[: len(few)])
        np.testing.assert_array_equal(few.pixels, everything.pixels[: len(few)])
        np.testing.assert_array_equal(few.labels, everything.labels[: len(few)])


@pytest.mark.parametrize("size", [0, 7, 257])
def test_size_out_of_range(size):
    with pytest.raises(ValueError, match=f"8 to 256 pixels, got {size}"):
        glyphs.load(size=size)


def test_number_of_classes(halves):
    most = min(len(half.class_names) for half in halves)
    for classes in (1, most + 1):
        with pytest.raises(ValueError, match=f"expected 2 to {most} classes, got {classes}"):
            load("glyphs", classes=classes)


def test_second_call_reads_the_cache(halves, monkeypatch):
    def refuse(size: int) -> None:
        raise AssertionError("rendered although a cache file is there")

    monkeypatch.setattr(glyphs, "_render", refuse)
    for again, before in zip(glyphs.load(), halves, strict=True):
        assert again.pixels.tobytes() == before.pixels.tobytes()


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: path.write_bytes(path.read_bytes().replace(path.read_bytes()[5000:5016], b"\0" * 16, 1)),
    "text": lambda path: path.write_text("not a zip file"),
    "pickled": lambda path: np.savez(path, pixels=np.array([{}]), code_points=[65], faces=[0]),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damaged_cache_is_repaired(damage, monkeypatch):
    before = glyphs.load(size=8)
    path, arrays = glyphs._cache_path(8), glyphs._read_or_render(8)
    DAMAGES[damage](path)
    monkeypatch.setattr(glyphs, "_render", lambda size: arrays)  # other tests check what it draws
    after = glyphs.load(size=8)
    for one, other in zip(before, after, strict=True):
        assert one.pixels.tobytes() == other.pixels.tobytes()
        assert one.class_names == other.class_names
    with np.load(path) as repaired:
        assert repaired["pixels"].tobytes() == arrays[0].tobytes()


def test_unwritable_folder_warns(tmp_path, monkeypatch):
    arrays = glyphs._read_or_render(8)
    monkeypatch.setattr(glyphs, "_render", lambda size: arrays)
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROXYGML_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="PROXYGML_CACHE") as caught:
        train, test = glyphs.load(size=8)
    assert [warning.filename for warning in caught] == [__file__]
    assert len(train) + len(test) == len(arrays[0])


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("PROXYGML_CACHE")
    assert glyphs._cache_path(32).parent == Path(platformdirs.user_cache_dir("proxygml"))
    monkeypatch.setenv("PROXYGML_CACHE", str(tmp_path))
    assert glyphs._cache_path(32).parent == tmp_path


@pytest.mark.slow
def test_recall_of_raw_pixels():
    _, test = load("glyphs", classes=300)
    assert 0.50 <= recall_at_1(test) <= 0.85
