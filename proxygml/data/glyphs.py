"""Letters in sixteen typefaces: a dataset without download. A class is a character, its images are the typefaces.

matplotlib ships DejaVu Sans, Sans Mono and Serif and STIXGeneral, each in regular, bold, italic and bold italic.
A letter (Unicode category L without Lm) in twelve or more of these faces is a class. Letters with the same drawing
in any face are one class, the lowest code point: Latin A stays, Greek Alpha and Cyrillic A are left out. There are
about 1,220 classes with 16,600 images, half to train on and half to test on.
"""

import unicodedata
from collections import Counter
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features
from PIL import __version__ as pillow_version

from proxygml.data import ImageList
from proxygml.files import atomic_write, cache_folder, warn

FACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)
MIN_FACES = 12  # per class: the three DejaVu families in four styles
MIN_SIZE, MAX_SIZE = 8, 256  # pixels; all images at 256 take 1.1 GB

# Letters reach 1.12 em above the baseline (Ǘ), 0.39 em below (Ķ) and 1.4 em across (Ж): nothing is cut off.
EM = 0.64  # of the image's height
BASELINE = 0.74  # of the image's height, from the top

# Letters are drawn at this size or larger, then reduced: `size` does not change the classes, and hinting does not move
# the strokes of small letters onto whole pixels.
DRAWN_SIZE = 128
# Drawings are the same if they differ by less than this fraction of their norm: hinting changes equal outlines by that
# much, while even a dot changes ten times more.
SAME_DRAWING = 0.05
RENDERING_VERSION = 2  # in the cache's file name: increase it when the drawings, classes or arrays change
ORDER_SEED = 0


def load(*, size: int = 32) -> tuple[ImageList, ImageList]:
    """Training and test images of different characters: pixels (M, size, size), white on black.

    The first call renders for some seconds; later calls read the user's cache folder, or PROXYGML_CACHE.
    """
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise ValueError(f"expected a size of {MIN_SIZE} to {MAX_SIZE} pixels, got {size}: 32 is usual")
    pixels, code_points, faces = _read_or_render(size)  # (M, size, size), (M,), (M,)
    # Ordered by a hash of each code point: random-looking, and new characters in other releases of the typefaces do not
    # change the order of the others.
    order = sorted(np.unique(code_points).tolist(), key=lambda code: sha256(f"{ORDER_SEED} {code}".encode()).digest())
    half = len(order) // 2
    train, test = (_images_of(chosen, pixels, code_points, faces) for chosen in (order[:half], order[half:]))
    return train, test


def _images_of(chosen: list[int], pixels: np.ndarray, code_points: np.ndarray, faces: np.ndarray) -> ImageList:
    """The images of these code points, in the order of the classes."""
    class_names = tuple(f"U+{code_point:04X} {unicodedata.name(chr(code_point))}" for code_point in chosen)
    of_class = [np.flatnonzero(code_points == code_point) for code_point in chosen]  # 12 to 16 indices per class
    labels = np.repeat(np.arange(len(chosen)), [len(images) for images in of_class])  # (M,)
    images = np.concatenate(of_class)  # (M,)
    paths = [f"U+{code_points[image]:04X}/{FACES[faces[image]]}" for image in images]
    return ImageList(paths, labels, class_names, pixels=pixels[images])


def _read_or_render(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of `_render`, from the cache file if it is intact, else rendered and cached."""
    path = _cache_path(size)
    # A missing or damaged file is written again. It is opened here because np.load leaves a broken zip open.
    with suppress(Exception), path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        return stored["pixels"], stored["code_points"], stored["faces"]
    pixels, code_points, faces = _render(size)
    try:
        with atomic_write(path) as temporary:
            np.savez_compressed(temporary, pixels=pixels, code_points=code_points, faces=faces)
    except OSError as error:
        warn(
            f"expected a writable folder, got {path.parent} ({error}): the glyphs are rendered at each call; "
            "set PROXYGML_CACHE to another folder",
        )
    return pixels, code_points, faces


def _cache_path(size: int) -> Path:
    """One file for each size and each version of the libraries that affect the drawings."""
    from matplotlib import __version__ as matplotlib_version

    versions = (
        f"v{RENDERING_VERSION}-matplotlib{matplotlib_version}-pillow{pillow_version}"
        f"-freetype{features.version('freetype2')}-unicode{unicodedata.unidata_version}"
    )
    return cache_folder() / f"glyphs-{size}-{versions}.npz"


def _render(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels (M, size, size), code points (M,) and indices into FACES (M,) of all images, face by face."""
    code_points = _classes()
    drawings = []
    for index, face in enumerate(FACES):
        present = _characters(face)
        font = _font(face, max(size, DRAWN_SIZE))
        for code_point in code_points:
            if code_point in present:
                drawing = _draw(code_point, font).resize((size, size), Image.Resampling.BOX)  # ink per pixel
                drawings.append((np.asarray(drawing), code_point, index))
    pixels, of_character, of_face = zip(*drawings, strict=True)
    return np.stack(pixels), np.array(of_character, dtype=np.int32), np.array(of_face, dtype=np.int8)


@cache  # the same for every size
def _classes() -> tuple[int, ...]:
    """Code points of the classes, ascending: one of each group of letters with the same drawing in any face."""
    from scipy.sparse.csgraph import connected_components

    counts = Counter(code_point for face in FACES for code_point in _characters(face) if _is_letter(code_point))
    letters = sorted(code_point for code_point, count in counts.items() if count >= MIN_FACES)
    same = np.zeros((len(letters), len(letters)), dtype=bool)
    blank = np.zeros(len(letters), dtype=bool)
    for face in FACES:
        font = _font(face, DRAWN_SIZE)
        drawn = [place for place, code_point in enumerate(letters) if code_point in _characters(face)]
        drawings = [_draw(letters[place], font).resize((32, 32), Image.Resampling.BOX) for place in drawn]
        ink = np.stack([np.asarray(drawing, dtype=np.float32).ravel() for drawing in drawings])  # (drawn, 1024)
        amount = (ink**2).sum(axis=1)  # (drawn,)
        blank[drawn] |= amount == 0
        difference = amount[:, None] + amount - 2 * ink @ ink.T  # (drawn, drawn), squared
        same[np.ix_(drawn, drawn)] |= np.triu(difference < SAME_DRAWING**2 * np.maximum(amount[:, None], amount), k=1)
    _, groups = connected_components(same, directed=False)  # (letters,)
    lowest = np.sort(np.unique(groups, return_index=True)[1])
    return tuple(letters[place] for place in lowest if not blank[place])


def _is_letter(code_point: int) -> bool:
    category = unicodedata.category(chr(code_point))
    return category.startswith("L") and category != "Lm"  # Lm: modifiers, such as a raised h


def _draw(code_point: int, font: ImageFont.FreeTypeFont) -> Image.Image:
    """The character, white on black, in a square: on the common baseline, horizontally centered."""
    size = round(font.size / EM)
    image = Image.new("L", (size, size))
    left, _, right, _ = font.getbbox(chr(code_point), anchor="ls")
    position = ((size - left - right) // 2, round(BASELINE * size))
    ImageDraw.Draw(image).text(position, chr(code_point), fill=255, font=font, anchor="ls")
    return image


def _font(face: str, image_size: int) -> ImageFont.FreeTypeFont:
    # basic layout: the other one needs a library that not every Pillow has
    return ImageFont.truetype(_file(face), EM * image_size, layout_engine=ImageFont.Layout.BASIC)


@cache
def _characters(face: str) -> frozenset[int]:
    """Code points in the table of the face; others would be drawn as an empty box."""
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(_file(face)).get_charmap())


def _file(face: str) -> str:
    from matplotlib import get_data_path

    path = Path(get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    if not path.exists():
        raise FileNotFoundError(f"no typeface {path}: install matplotlib from PyPI or conda, which include it")
    return str(path)
