"""Check a dataset: images that cannot be read, and counts that differ from the published ones."""

import os
import stat
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from proxygml.data import ImageList, open_image
from proxygml.display import counted
from proxygml.files import one_line

CHUNK = 128  # images per task: few enough for a smooth progress bar
Keep = Callable[[int, Image.Image], None]  # decodes image `index`


@dataclass(frozen=True)
class Counts:
    """Published numbers of classes and images of a benchmark."""

    train_classes: int
    train_images: int
    test_classes: int
    test_images: int


@dataclass(frozen=True)
class Problem:
    """Image `index` of a list cannot be used; `reason` is one line."""

    index: int
    path: str
    reason: str


def find_problems(
    images: ImageList,
    *,
    keep: Keep | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """The images that are missing, empty, unreadable, truncated or too large, in the order of the list.

    Every pixel is decoded, by `keep(index, image)` if given, from several threads. `progress(done, total)` is called in
    the caller's thread.
    """
    problems: list[Problem] = []
    if images.pixels is not None:  # already decoded
        if progress is not None:
            progress(len(images), len(images))
        return problems

    def check(chunk: range) -> list[Problem]:
        reasons = ((index, _reason(images, index, keep)) for index in chunk)
        return [Problem(index, images.paths[index], reason) for index, reason in reasons if reason is not None]

    chunks = [range(start, min(start + CHUNK, len(images))) for start in range(0, len(images), CHUNK)]
    Image.init()  # registers the formats once, before several threads do
    # Threads: Pillow decodes without the GIL, so photos take half the time on two cores, and reads from a cold disk
    # overlap. Processes would have to import the package first.
    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.simplefilter("ignore")  # about metadata
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for chunk, found in zip(chunks, pool.map(check, chunks), strict=True):
            problems += found
            if progress is not None:
                progress(chunk.stop, len(images))
    return problems


def without_problems(images: ImageList, problems: list[Problem], *, skip: bool) -> ImageList:
    """The images that can be used; unless `skip`, an error if some cannot."""
    if not problems:
        return images
    if not skip:
        first = problems[0]
        raise ValueError(
            f"{len(problems)} of {counted(len(images), 'image')} cannot be read, first {first.path}: {first.reason}. "
            "List all with `proxygml datasets check`, or leave them out with --skip-broken"
        )
    if len(problems) == len(images):
        raise ValueError(f"expected images that can be used, got {counted(len(images), 'unreadable image')}")
    return images.select(np.setdiff1d(np.arange(len(images)), [problem.index for problem in problems]))


def compare_counts(train: ImageList, test: ImageList, published: Counts) -> list[str]:
    """One line for each count that differs from the published one."""
    counts = vars(Counts(len(train.class_names), len(train), len(test.class_names), len(test)))
    return [
        f"{name.replace('_', ' ')}: expected {expected:,}, found {counts[name]:,}"
        for name, expected in vars(published).items()
        if counts[name] != expected
    ]


def _reason(images: ImageList, index: int, keep: Keep | None) -> str | None:
    """Why image `index` cannot be used, in one line, or None."""
    try:
        if images.open_file is open_image:  # otherwise it may be part of a file
            status = os.stat(os.path.join(images.root or ".", images.paths[index]))
            if not stat.S_ISREG(status.st_mode):
                return "not a file"  # opening a pipe would block
            if status.st_size == 0:
                return "empty: the file has 0 bytes"
        with images.open(index) as image:
            if keep is not None:
                keep(index, image)
            else:
                image.draft(None, (1, 1))  # still reads every byte of a JPEG, with less arithmetic
                image.load()
            if image.mode == "F" and np.isnan(np.asarray(image)).any():
                return "damaged: some of its pixels are NaN"
    except FileNotFoundError:
        return "missing: no such file"
    except PermissionError:
        return "not readable: permission denied"
    except UnidentifiedImageError:
        return "unreadable: no known image format"
    except Image.DecompressionBombError as error:
        return f"huge: {error}"
    except Exception as error:  # damaged bytes make each format raise other errors
        return f"{'truncated' if 'truncated' in str(error).lower() else 'damaged'}: {one_line(error)}"
    return None
