"""Plots: drawn from any valid log and embeddings, with the right colors and texts."""

from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from proxygml.evaluation import neighbors
from proxygml.plots import RIGHT, WRONG, draw_before_after, draw_curves, draw_map, draw_retrieval


def read_pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def fraction_of(color: str, path: Path) -> float:
    """Fraction of the pixels with about this color."""
    target = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)])
    return float((np.abs(read_pixels(path) - target).max(axis=-1) < 12).mean())


def test_curves_of_one_epoch_have_whole_numbers(tmp_path: Path) -> None:
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_curves([{"epoch": 0}, {"epoch": 1, "loss": 2.0}], tmp_path / "curves.svg")
    texts = texts_in(tmp_path / "curves.svg")
    assert "1" in texts
    assert "%" not in texts
    assert not [text for text in texts if "0.9" in text]
    draw_curves([{"epoch": 0}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("scored", [(), ("held_out",), ("held_out", "test")])
def test_curves_with_and_without_scores(tmp_path: Path, scored: tuple) -> None:
    entries = [
        {"epoch": n, "loss": 1 / n, **{split: {"recall@1": 0.5, "map_at_r": 0.3} for split in scored}} for n in (1, 2)
    ]
    draw_curves(entries, tmp_path / "curves.png")
    assert read_pixels(tmp_path / "curves.png").std() > 0


def texts_in(path: Path) -> list[str]:
    """The texts of an SVG, drawn with svg.fonttype none."""
    elements = ElementTree.fromstring(path.read_text()).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(element.itertext()) for element in elements]


def test_before_after_counts_what_training_mended_and_broke(tmp_path: Path) -> None:
    labels = np.array([0, 0, 1, 1, 2, 2, 2])
    before = np.array([[1, 2], [2, 0], [3, 0], [2, 0], [0, 5], [0, 4], [4, 5]])  # 1, 4 and 5 have a wrong first one
    after = np.array([[1, 2], [0, 2], [0, 3], [2, 0], [5, 0], [0, 4], [5, 4]])  # 2 and 5 have one
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_before_after(gray, before, after, labels, ["owl", "cat", "$x^$"], tmp_path / "drawn.svg")
        queries = labels > 1
        draw_before_after(gray, before[4:], after[4:], labels, "abc", tmp_path / "queries.svg", queries=queries)
    texts = texts_in(tmp_path / "drawn.svg")
    (title,) = (text for text in texts if text.startswith("Of 7 queries"))
    assert "mended the nearest neighbor of 2 and broke that of 1." in title
    assert [texts.count(kind) for kind in ("mended", "broken", "unchanged")] == [2, 1, 4]
    assert {"owl", "cat", "$x^$"} <= set(texts)
    (title,) = (text for text in texts_in(tmp_path / "queries.svg") if text.startswith("Of 3 queries"))
    assert "mended the nearest neighbor of 1 and broke that of 0." in title


def gray(index: int) -> Image.Image:
    return Image.new("L", (16, 16), 100)


@pytest.mark.slow
def test_retrieval_frames_are_green_or_red(tmp_path: Path) -> None:
    vectors = np.repeat(np.eye(2), 4, axis=0) + np.arange(8)[:, None] * 1e-3
    labels = np.repeat(np.arange(2), 4)
    nearest, names = neighbors(vectors, count=5)[0], [f"class {n}" for n in range(8)]
    draw_retrieval(gray, nearest, labels, names, tmp_path / "good.png")  # three of five neighbors match
    draw_retrieval(gray, nearest, np.arange(8), names, tmp_path / "bad.png")  # no two labels match
    assert fraction_of(RIGHT, tmp_path / "good.png") > 0.005
    assert fraction_of(RIGHT, tmp_path / "bad.png") == 0
    assert fraction_of(WRONG, tmp_path / "bad.png") > 0.005


@pytest.mark.parametrize("images", [4, 30])
@pytest.mark.slow
def test_map_of_few_images(tmp_path: Path, images: int) -> None:
    vectors = np.random.default_rng(0).normal(size=(images, 5)).astype(np.float32)
    draw_map(vectors, np.arange(images) // 2, [f"class {n}" for n in range(images)], tmp_path / "map.png")
    assert read_pixels(tmp_path / "map.png").std() > 0


def test_map_shows_class_names_literally(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", "$x^$", "_background", "a\x1b[31mb", r"$\frac{1}$"]
    vectors = np.random.default_rng(0).normal(size=(20, 4))
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # keeps text as text
        draw_map(vectors, np.arange(20) % 5, names, tmp_path / "map.svg")
    assert {names[0], names[1], names[2], r"a\x1b[31mb", names[4]} <= set(texts_in(tmp_path / "map.svg"))
    assert "<script" not in (tmp_path / "map.svg").read_text()
