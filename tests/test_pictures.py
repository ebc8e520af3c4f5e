"""Pictures: that they are drawn from any legal log and space, and look as they say."""

from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from proxygml.pictures import RIGHT, WRONG, draw_curves, draw_map, draw_retrieval


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def share_of(colour: str, path: Path) -> float:
    """Share of the pixels that have about this colour."""
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
    return float((np.abs(pixels_of(path) - wanted).max(axis=-1) < 12).mean())


@pytest.mark.parametrize("scored", [(), ("held_out",), ("test",), ("held_out", "test")])
def test_curves_are_drawn_with_and_without_scores(tmp_path: Path, scored: tuple) -> None:
    entries = [
        {"epoch": n, "loss": 1 / n, **{split: {"recall@1": 0.5, "map_at_r": 0.3} for split in scored}} for n in (1, 2)
    ]
    draw_curves(entries, tmp_path / "curves.png")
    assert pixels_of(tmp_path / "curves.png").std() > 0


def test_right_neighbours_are_framed_green_and_wrong_ones_red(tmp_path: Path) -> None:
    vectors = np.repeat(np.eye(4), 4, axis=0) + np.arange(16)[:, None] * 1e-3
    labels = np.repeat(np.arange(4), 4)

    def grey(index: int) -> Image.Image:
        return Image.new("L", (16, 16), 100)

    draw_retrieval(grey, vectors, labels, tmp_path / "good.png")  # three of five neighbours are right
    draw_retrieval(grey, vectors, np.arange(16), tmp_path / "bad.png")  # no label comes twice
    assert share_of(RIGHT, tmp_path / "good.png") > 0.005
    assert share_of(RIGHT, tmp_path / "bad.png") == 0
    assert share_of(WRONG, tmp_path / "bad.png") > 0.005


@pytest.mark.parametrize("images", [4, 30])
def test_a_map_is_drawn_of_few_images_too(tmp_path: Path, images: int) -> None:
    vectors = np.random.default_rng(0).normal(size=(images, 5)).astype(np.float32)
    draw_map(vectors, np.arange(images) // 2, [f"class {n}" for n in range(images)], tmp_path / "map.png")
    assert pixels_of(tmp_path / "map.png").std() > 0


def test_names_of_classes_are_neither_formulas_nor_tags_nor_hidden(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", "$x^$", "_background", "a\x1b[31mb", r"$\frac{1}$"]
    vectors = np.random.default_rng(0).normal(size=(20, 4))
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # texts as texts
        draw_map(vectors, np.arange(20) % 5, names, tmp_path / "map.svg")
    drawn = (tmp_path / "map.svg").read_text()
    texts = {"".join(element.itertext()) for element in ElementTree.fromstring(drawn).iter() if "text" in element.tag}
    assert {names[0], names[1], names[2], "a\ufffd[31mb", names[4]} <= texts
    assert "<script" not in drawn
