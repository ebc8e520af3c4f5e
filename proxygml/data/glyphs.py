"""Letters in sixteen typefaces: the data set that needs no download. A class is a character, its images are its faces.

matplotlib ships DejaVu Sans, Sans Mono and Serif and STIXGeneral, each in regular, bold, italic and bold italic.
A letter (Unicode category L without Lm) that twelve or more of these faces have becomes a class. Letters whose drawings
coincide in any face make one class, that of the lowest code point: of Latin A, Greek Alpha and Cyrillic A, Latin A
stays and the others are left out. About 1,220 classes with 16,600 images remain, half to train on and half to test on.
"""

import unicodedata
import warnings
from collections import Counter
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features
from PIL import __version__ as pillow_version

from proxygml.data import ImageList
from proxygml.files import atomic_write, cache_folder

FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-Oblique",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "DejaVuSerif-BoldItalic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
)
FACES_PER_CLASS = 12  # at least: the three DejaVu families in four styles
SMALLEST, LARGEST = 8, 256  # pixels; all images at 256 fill 1.1 GB

# Letters reach 1.12 em above the baseline (Ǘ), 0.39 em below (Ķ) and 1.4 em across (Ж): nothing is cut off.
EM = 0.64  # of the image's height
BASELINE = 0.74  # of the image's height, from the top

# Drawn at this size at least, then made smaller: whether drawings coincide does not hang on `size`, and no hinting
# moves the strokes of small letters onto whole pixels, another way in every face.
DRAWN_SIZE = 128
# Drawings that differ by less than this share of their length are one: hinting makes that much of a difference between
# letters of the same outline, while even a dot makes ten times more.
SAME_DRAWING = 0.05
RENDERING = 2  # part of the cache's name: count up when the drawings, the classes or the file's arrays change
ORDER_SEED = 0


def load(*, size: int = 32, classes: int | None = None) -> tuple[ImageList, ImageList]:
    """Images to train on and images to test on, of different characters: pixels (M, size, size), white on black.

    `classes` takes the first so many of each half, so that a smaller choice is a part of a larger one; None takes all.
    The first call renders for some seconds; later ones read from the user's cache folder, or from PROXYGML_CACHE.
    """
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(f"expected a size of {SMALLEST} to {LARGEST} pixels, got {size}: 32 is usual")
    if classes is not None and classes < 2:
        raise ValueError(f"expected at least 2 classes in each half, got {classes}: take more, or None for all")
    pixels, code_points, faces = _read_or_render(size)  # (M, size, size), (M,), (M,)
    order = _fixed_order(np.unique(code_points).tolist())
    half = len(order) // 2
    if classes is not None and classes > half:
        raise ValueError(f"expected at most {half} classes in each half, got {classes}: take fewer, or None for all")
    train = _images_of(order[:half][:classes], pixels, code_points, faces)
    test = _images_of(order[half:][:classes], pixels, code_points, faces)
    return train, test


def _images_of(chosen: list[int], pixels: np.ndarray, code_points: np.ndarray, faces: np.ndarray) -> ImageList:
    """The images of the chosen code points; the first of them is class 0."""
    class_names = tuple(f"U+{code_point:04X} {unicodedata.name(chr(code_point))}" for code_point in chosen)
    of_class = [np.flatnonzero(code_points == code_point) for code_point in chosen]  # 12 to 16 indices for each class
    labels = np.repeat(np.arange(len(chosen)), [len(images) for images in of_class])  # (M,) of these classes
    images = np.concatenate(of_class)  # (M,)
    paths = [f"U+{code_points[image]:04X}/{FACES[faces[image]]}" for image in images]
    return ImageList(paths, labels, class_names, pixels=pixels[images])


def _fixed_order(code_points: list[int]) -> list[int]:
    """The code points in an order that looks random and never changes.

    The place of each comes from its own hash: the order does not hang on a random generator's version, and a character
    more or less in another release of the typefaces leaves the order of the others as it was.
    """
    return sorted(code_points, key=lambda code_point: sha256(f"{ORDER_SEED} {code_point}".encode()).digest())


def _read_or_render(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `_render` gives, from the cache file where there is a sound one; else rendered, and kept there."""
    path = _cache_path(size)
    with suppress(Exception):  # whatever a missing, cut or foreign file raises: the drawings can be made again
        return _read(path, size)
    pixels, code_points, faces = _render(size)
    try:
        with atomic_write(path) as temporary:
            np.savez_compressed(temporary, pixels=pixels, code_points=code_points, faces=faces)
    except OSError as error:
        _warn_once(path.parent, str(error))
    return pixels, code_points, faces


def _read(path: Path, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `_render` gave when the file was written."""
    # Opened here because np.load leaves a broken zip open.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        pixels, code_points, faces = stored["pixels"], stored["code_points"], stored["faces"]
    images = len(code_points)
    if pixels.shape != (images, size, size) or pixels.dtype != np.uint8 or faces.shape != (images,):
        raise ValueError(f"expected {images} drawings of {size} x {size} in {path}, got {pixels.shape}")
    return pixels, code_points, faces


def _cache_path(size: int) -> Path:
    """One file for each size and for each version of what decides about the drawings."""
    from matplotlib import __version__ as matplotlib_version

    versions = (
        f"v{RENDERING}-matplotlib{matplotlib_version}-pillow{pillow_version}"
        f"-freetype{features.version('freetype2')}-unicode{unicodedata.unidata_version}"
    )
    return cache_folder() / f"glyphs-{size}-{versions}.npz"


@cache  # once for each folder
def _warn_once(folder: Path, reason: str) -> None:
    warnings.warn(
        f"expected a folder that can be written, got {folder} ({reason}): the glyphs are rendered anew at each call; "
        "set PROXYGML_CACHE to another folder",
        stacklevel=4,  # whoever calls load
    )


def _render(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels (M, size, size), code points (M,) and indices into FACES (M,) of all images, face by face."""
    code_points = _classes()
    drawings = []
    for index, face in enumerate(FACES):
        present = _characters(face)
        font = _font(face, max(size, DRAWN_SIZE))
        for code_point in code_points:
            if code_point in present:
                drawing = _draw(code_point, font).resize((size, size), Image.Resampling.BOX)  # share of ink in a pixel
                drawings.append((np.asarray(drawing), code_point, index))
    pixels, of_character, of_face = zip(*drawings, strict=True)
    return np.stack(pixels), np.array(of_character, dtype=np.int32), np.array(of_face, dtype=np.int8)


@cache  # the same for every size
def _classes() -> tuple[int, ...]:
    """Code points that become classes, ascending: one of each group of letters whose drawings coincide in any face."""
    counts = Counter(code_point for face in FACES for code_point in _characters(face) if _is_letter(code_point))
    letters = sorted(code_point for code_point, count in counts.items() if count >= FACES_PER_CLASS)
    lowest = {code_point: code_point for code_point in letters}  # a step towards the lowest of the group

    def lowest_of_group(code_point: int) -> int:
        while lowest[code_point] != code_point:
            code_point = lowest[code_point]
        return code_point

    blank = set()
    for face in FACES:
        font = _font(face, DRAWN_SIZE)
        drawn = [code_point for code_point in letters if code_point in _characters(face)]
        drawings = [_draw(code_point, font).resize((32, 32), Image.Resampling.BOX) for code_point in drawn]
        ink = np.stack([np.asarray(drawing, dtype=np.float32).ravel() for drawing in drawings])  # (letters, 1024)
        amount = (ink**2).sum(axis=1)  # (letters,)
        blank |= {drawn[place] for place in np.flatnonzero(amount == 0)}
        difference = amount[:, None] + amount - 2 * ink @ ink.T  # (letters, letters), squared
        alike = np.triu(difference < SAME_DRAWING**2 * np.maximum(amount[:, None], amount), k=1)
        for place, other in np.argwhere(alike):
            one, another = lowest_of_group(drawn[place]), lowest_of_group(drawn[other])
            lowest[max(one, another)] = min(one, another)
    return tuple(letter for letter in letters if lowest[letter] == letter and letter not in blank)


def _is_letter(code_point: int) -> bool:
    category = unicodedata.category(chr(code_point))
    return category.startswith("L") and category != "Lm"  # Lm: modifiers, such as a raised h


def _draw(code_point: int, font: ImageFont.FreeTypeFont) -> Image.Image:
    """The character, white on black, in a square: on the common baseline, its ink centered from left to right."""
    size = round(font.size / EM)
    image = Image.new("L", (size, size))
    left, _, right, _ = font.getbbox(chr(code_point), anchor="ls")
    position = ((size - left - right) // 2, round(BASELINE * size))
    ImageDraw.Draw(image).text(position, chr(code_point), fill=255, font=font, anchor="ls")
    return image


def _font(face: str, image_size: int) -> ImageFont.FreeTypeFont:
    # Basic layout: the other one needs a library that not every Pillow brings.
    return ImageFont.truetype(_file(face), EM * image_size, layout_engine=ImageFont.Layout.BASIC)


@cache
def _characters(face: str) -> frozenset[int]:
    """Code points in the face's own table: what it lacks it would draw as an empty box."""
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(_file(face)).get_charmap())


def _file(face: str) -> str:
    from matplotlib import get_data_path

    path = Path(get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    if not path.exists():
        raise FileNotFoundError(f"no typeface {path}: install matplotlib from PyPI or conda, which ship it")
    return str(path)
