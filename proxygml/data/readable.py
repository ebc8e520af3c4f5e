"""The images of a list that can be decoded; decoding all of them first keeps a bad file from ending a run midway."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from proxygml.data import ImageList
from proxygml.data.cache import Cache
from proxygml.data.check import find_problems, without_problems
from proxygml.display import counted
from proxygml.files import warn

MAX_NAMED = 10  # skipped images whose paths are shown
MAX_CHECKED, SAMPLE = 100_000, 2_000  # with `sample`, decode this many images of a list longer than MAX_CHECKED


def readable_images(
    images: ImageList,
    *,
    skip_broken: bool = False,
    cache: Cache | None = None,
    max_bytes: int = 0,
    sample: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ImageList:
    """The images that can be decoded; unreadable images are an error unless they are skipped.

    Fills the cache, if there is one, up to `max_bytes`. With `sample`, only a random sample of a very long list is
    decoded: enough to detect a wrong folder or a damaged disk.
    """
    fits = cache is not None and cache.min_bytes(len(images)) <= max_bytes
    if sample and not fits and not skip_broken and len(images) > MAX_CHECKED:
        if cache is not None:
            warn(
                f"{len(images):,} photos do not fit in {max_bytes / 2**30:g} GB and are decoded in every epoch: "
                "raise cache_gigabytes",
            )
        sampled = images.select(np.sort(np.random.default_rng(0).permutation(len(images))[:SAMPLE]))
        without_problems(sampled, find_problems(sampled, progress=progress), skip=False)
        return images
    if cache is None:
        problems = find_problems(images, progress=progress)
    else:
        problems = cache.fill(images, max_bytes, progress)
        images = replace(images, open_file=cache.open)
    return without_problems(images, problems, skip=skip_broken)


def describe_skipped(images: ImageList, kept: ImageList) -> str:
    """How many images are not kept, and their paths; empty if all are."""
    skipped = sorted(set(images.paths) - set(kept.paths)) if len(kept) < len(images) else []
    if not skipped:
        return ""
    more = f" and {len(skipped) - MAX_NAMED} more" if len(skipped) > MAX_NAMED else ""
    return (
        f"{len(skipped)} of {counted(len(images), 'image')} that cannot be read: {', '.join(skipped[:MAX_NAMED])}{more}"
    )
