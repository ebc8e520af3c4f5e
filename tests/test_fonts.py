"""Names in figures: drawn with the fonts that are installed, escaped where none has a character, and never too wide."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.font_manager import FontEntry, fontManager

from proxygml import fonts
from proxygml.fonts import DEFAULT, drawable, fit
from proxygml.plots import draw_map

UNKNOWN = "\U0001fae0"  # a melting face, in no font here


def write_font(path: Path, family: str, characters: str) -> None:
    """A font whose characters are squares."""
    pen = TTGlyphPen(None)
    for move, point in zip(("moveTo", *3 * ["lineTo"]), [(0, 0), (0, 500), (500, 500), (500, 0)], strict=True):
        getattr(pen, move)(point)
    pen.closePath()
    square, names = pen.glyph(), [".notdef", *(f"uni{ord(each):04X}" for each in characters)]
    font = FontBuilder(1000)
    font.setupGlyphOrder(names)
    font.setupCharacterMap({ord(each): f"uni{ord(each):04X}" for each in characters})
    font.setupGlyf(dict.fromkeys(names, square))
    font.setupHorizontalMetrics(dict.fromkeys(names, (600, 0)))
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable({"familyName": family, "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(path)


@pytest.fixture
def only_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only matplotlib's own font is installed."""
    monkeypatch.setattr(fontManager, "ttflist", [font for font in fontManager.ttflist if font.name == DEFAULT])


@pytest.fixture
def more_fonts(only_default: None, tmp_path: Path) -> None:
    for family, characters in [("Some Kana", "かな"), ("Much Kanji", "日本語か"), ("Last Resort", "日本語ก")]:
        write_font(tmp_path / f"{family}.ttf", family, characters)
        fontManager.addfont(tmp_path / f"{family}.ttf")
    (tmp_path / "damaged.ttf").write_bytes(b"no font")
    fontManager.ttflist.append(FontEntry(fname=str(tmp_path / "damaged.ttf"), name="Damaged", style="normal"))


@pytest.mark.usefixtures("only_default")
def test_escapes_without_a_font() -> None:
    names = ["Eule", "Сова", "القط", "日本", "a\x1b[31m\n", "x\udcff", "$x^$", UNKNOWN]
    shown, families = drawable(names)
    assert shown == [*names[:3], r"\u65e5\u672c", r"a\x1b[31m\n", r"x\udcff", "$x^$", ":melting face:"]
    assert families == [DEFAULT]


@pytest.mark.usefixtures("more_fonts")
def test_the_fonts_with_most_characters_are_used(tmp_path: Path) -> None:
    names = ["日本語 かな owl", "日本語ก"]
    shown, families = drawable(names)
    assert shown == [names[0], r"日本語\u0e01"]
    assert families == [DEFAULT, "Much Kanji", "Some Kana"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # about a missing character, which becomes a box
        draw_map(np.eye(8), np.arange(8) % 2, names, tmp_path / "map.png")


@pytest.mark.parametrize(
    "name", ["001.Black_footed_Albatross", "W" * 80, "i" * 80, "a b", "", "birds/of prey/owl, barn"]
)
def test_names_fit(name: str) -> None:
    lines = fit(name, 6.5, 60, [DEFAULT]).split("\n")
    assert len(lines) <= 2
    font = fonts.get_font(fonts.findfont(DEFAULT))
    font.set_size(6.5, 72)
    for line in lines:
        font.set_text(line)
        assert font.get_width_height()[0] / 64 <= 60
    assert "…" in "".join(lines) or "".join(lines).replace(" ", "") == name.replace(" ", "")


def test_names_break_between_words() -> None:
    assert fit("Black_footed_Albatross", 6.5, 60, [DEFAULT]) == "Black_footed_\nAlbatross"
    assert fit(r"\u65e5\u672c\u306e\u732b", 6.5, 60, [DEFAULT]) == "\\u65e5\\u672c\n\\u306e\\u732b"
