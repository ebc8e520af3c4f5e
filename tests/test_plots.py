"""Plots: drawn from any valid log and embeddings, with the right colors and texts."""

from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from proxygml.plots import RIGHT, WRONG, draw_curves, draw_map, draw_retrieval


def read_pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def fraction_of(color: str, path: Path) -> float:
    """Fraction of the pixels with about this color."""
    target = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)])
    return float((np.abs(read_pixels(path) - target).max(axis=-1) < 12).mean())


@pytest.mark.parametrize("scored", [(), ("held_out",), ("held_out", "test")])
def test_curves_with_and_without_scores(tmp_path: Path, scored: tuple) -> None:
    entries = [
        {"epoch": n, "loss": 1 / n, **{split: {"recall@1": 0.5, "map_at_r": 0.3} for split in scored}} for n in (1, 2)
    ]
    draw_curves(entries, tmp_path / "curves.png")
    assert read_pixels(tmp_path / "curves.png").std() > 0


@pytest.mark.slow
def test_retrieval_frames_are_green_or_red(tmp_path: Path) -> None:
    vectors = np.repeat(np.eye(2), 4, axis=0) + np.arange(8)[:, None] * 1e-3
    labels = np.repeat(np.arange(2), 4)

    def gray(index: int) -> Image.Image:
        return Image.new("L", (16, 16), 100)

    draw_retrieval(gray, vectors, labels, tmp_path / "good.png")  # three of five neighbors match
    draw_retrieval(gray, vectors, np.arange(8), tmp_path / "bad.png")  # no two labels match
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
    drawn = (tmp_path / "map.svg").read_text()
    texts = {"".join(element.itertext()) for element in ElementTree.fromstring(drawn).iter() if "text" in element.tag}
    assert {names[0], names[1], names[2], "a\ufffd[31mb", names[4]} <= texts
    assert "<script" not in drawn
