"""Is the data whole: images that cannot be read, and counts that differ from the published ones."""

import os
import stat
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from proxygml.data import ImageList, open_image

MOST_PIXELS = 89_478_485  # a quarter of a gigabyte as RGB: where Pillow itself begins to warn of a bomb
Keep = Callable[[int, Image.Image], None]  # reads image `index`, which was opened
CHUNK = 128  # images for one task: few enough for a lively progress bar, many enough to cost nothing


@dataclass(frozen=True)
class Counts:
    """How many classes and images a benchmark has, as published."""

    train_classes: int
    train_images: int
    test_classes: int
    test_images: int


@dataclass(frozen=True)
class Problem:
    """Image `index` of a list, `path`, cannot be used; `reason` says why in one line."""

    index: int
    path: str
    reason: str


def find_problems(
    images: ImageList,
    *,
    decode: bool,
    keep: Keep | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Every image that is missing, empty, unreadable, cut short or too large, in the order of the list.

    Without `decode` only the headers are read, which is quick and finds all of this but damage further inside. With it
    every pixel is, by `keep(index, image)` where that is given: several threads call it. `progress` is called now and
    then, in the caller's thread, with the images done and their number.
    """
    problems: list[Problem] = []
    if images.pixels is None:  # what lies in memory is already decoded
        chunks = [range(start, min(start + CHUNK, len(images))) for start in range(0, len(images), CHUNK)]
        Image.init()  # registers all formats at once, before several threads would each begin to
        # Threads: Pillow decodes without Python's lock, which for photos of full size took half the time of a loop on
        # two cores, and they wait for a cold disk together. Processes gain more on small files in the cache, seconds
        # at most, which they lose again where each has to import the package first.
        with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
            warnings.simplefilter("ignore")  # remarks on metadata say nothing about the pixels
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            for chunk, found in zip(
                chunks, pool.map(lambda chunk: _problems_among(images, chunk, decode, keep), chunks), strict=True
            ):
                problems += found
                if progress is not None:
                    progress(chunk.stop, len(images))
    elif progress is not None:
        progress(len(images), len(images))
    return problems


def without_problems(images: ImageList, problems: list[Problem], *, skip: bool) -> ImageList:
    """The images without those that cannot be used, which are an error unless they are to be skipped."""
    if problems and not skip:
        first = problems[0]
        raise ValueError(
            f"{len(problems)} of {len(images)} images cannot be read, first {first.path}: {first.reason}. "
            "List all with `proxygml datasets check`, or leave them out with --skip-broken"
        )
    return images.without([problem.index for problem in problems]) if problems else images


def compare_counts(train: ImageList, test: ImageList, published: Counts) -> list[str]:
    """One line for each of the four published counts from which the lists deviate."""
    found = Counts(len(train.class_names), len(train), len(test.class_names), len(test))
    return [
        f"{name.replace('_', ' ')}: expected {expected:,}, found {vars(found)[name]:,}"
        for name, expected in vars(published).items()
        if vars(found)[name] != expected
    ]


def _problems_among(images: ImageList, indices: Iterable[int], decode: bool, keep: Keep | None) -> list[Problem]:
    found = []
    for index in indices:
        reason = _reason(images, index, decode, keep)
        if reason is not None:
            found.append(Problem(index, images.paths[index], reason))
    return found


def _reason(images: ImageList, index: int, decode: bool, keep: Keep | None) -> str | None:
    """Why image `index` cannot be used, in one line, or None."""
    try:
        if images.open_file is open_image:  # otherwise it is no file of its own
            status = os.stat(os.path.join(images.root or ".", images.paths[index]))
            if not stat.S_ISREG(status.st_mode):
                return "not a file"  # opening a pipe would wait for ever
            if status.st_size == 0:
                return "empty: the file has 0 bytes"
        with images.open(index) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                return f"huge: {width} x {height} pixels, at most {MOST_PIXELS:,} are read"
            if decode and keep is not None:
                keep(index, image)
            elif decode:
                # The smallest scale still reads every byte of a JPEG, but spares most of the arithmetic.
                image.draft(None, (1, 1))
                image.load()
    except FileNotFoundError:
        return "missing: no such file"
    except PermissionError:
        return "not readable: permission denied"
    except UnidentifiedImageError:
        return "unreadable: no known image format"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        return f"huge: {_one_line(error)}"
    except Exception as error:  # on damaged bytes each format raises whatever its parser stumbles over
        kind = "truncated" if "truncated" in str(error).lower() else "damaged"
        return f"{kind}: {_one_line(error)}"
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
