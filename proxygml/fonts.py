"""Names in figures: an installed font for every script, escapes for characters that none has, lines that fit."""

import re
import unicodedata
from collections.abc import Sequence

from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.ft2font import FT2Font

DEFAULT = "DejaVu Sans"  # comes with matplotlib
NO_GLYPHS = ("lastresort", "blank")  # of fonts that draw boxes or nothing for every character
JOINERS = "\u200c\u200d"  # not printable, but change how their neighbors look


def drawable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names without characters that no installed font has, and the font families that have the others.

    Symbols are replaced by their Unicode names, others escaped as in Python, as are control characters.
    """
    missing = {character for name in names for character in name if character.isprintable() or character in JOINERS}
    drawn, families = _in_font(findfont(DEFAULT), missing), [DEFAULT]
    missing -= drawn
    fonts = _installed_fonts() if missing else {}
    while missing:
        coverage = {family: _in_font(path, missing) for family, path in fonts.items()}
        best = max(coverage, key=lambda family: (len(coverage[family]), "Sans" in family), default=DEFAULT)
        if not coverage.get(best):
            break
        families.append(best)
        drawn |= coverage[best]
        missing -= coverage[best]
    escaped = ["".join(each if each in drawn else _escape(each) for each in name) for name in names]
    return escaped, families


def fit(name: str, size: float, width: float, families: list[str]) -> str:
    """A name in one line or two, shortened to a width in points."""
    font = get_font([findfont(family) for family in families])
    font.set_size(size, 72)
    if _width(name, font) <= width:
        return name
    middle = len(name) // 2
    breaks = [at for at in range(1, len(name)) if re.match(r"[\s_/.,-]", name[at - 1]) or name[at] == "\\"]
    at = min(breaks, key=lambda end: abs(end - middle), default=middle)
    return "\n".join(_shorten(line.strip(), width, font) for line in (name[:at], name[at:]))


def _shorten(line: str, width: float, font: FT2Font) -> str:
    shortened = line
    while (wide := _width(shortened, font)) > width and line:
        line = line[: min(int(len(line) * width / wide), len(line) - 1)]
        shortened = line + "…"
    return shortened


def _width(text: str, font: FT2Font) -> float:
    """Width of a text in points."""
    font.set_text(text)
    return font.get_width_height()[0] / 64


def _installed_fonts() -> dict[str, str]:
    """The file of every upright font with outlines in one color, by family."""
    fonts: dict[str, str] = {}
    for entry in sorted(fontManager.ttflist, key=lambda entry: (entry.name, entry.weight != 400)):
        if entry.style == "normal" and not any(word in entry.name.lower().replace(" ", "") for word in NO_GLYPHS):
            fonts.setdefault(entry.name, entry.fname)
    return fonts


def _in_font(path: str, characters: set[str]) -> set[str]:
    """Those characters that a font can draw; none if it is damaged, or of bitmaps, as some of emoji are."""
    try:
        font = get_font(path)
    except (OSError, RuntimeError):
        return set()
    return {each for each in characters if font.get_char_index(ord(each))} if font.scalable else set()


def _escape(character: str) -> str:
    if unicodedata.category(character) in ("So", "Sk") and (name := unicodedata.name(character, "")):
        return f":{name.lower()}:"
    return character.encode("unicode_escape").decode()
