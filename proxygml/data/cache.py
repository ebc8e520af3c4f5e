"""A folder of large photos, decoded and shrunk once to small arrays that are memory-mapped for each crop.

The name of a copy is a hash of the photo's path, size and time and of the size of the copy. So a changed photo gets a
new copy, several runs can share a folder, and a run continues with the copies of an interrupted one.
"""

import hashlib
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from proxygml.data import ImageList, open_image
from proxygml.data.check import Problem, find_problems
from proxygml.data.decoding import resize
from proxygml.files import atomic_write, warn

SPARE_BYTES = 2**30  # of the disk stay free


@dataclass(frozen=True)
class Cache:
    """Copies of photos in `folder`, with a shorter side of `side` pixels; smaller photos have no copy."""

    folder: Path
    side: int

    def open(self, photo: Path) -> Image.Image:
        """The copy of a photo, or else the photo itself: an `open_file` for an ImageList."""
        try:
            return Image.fromarray(np.load(self.copy_path(photo), mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError):  # missing or damaged
            return open_image(photo)

    def copy_path(self, photo: Path) -> Path:
        """Path of the copy of a photo, which may not exist."""
        status = photo.stat()
        key = f"{photo.absolute()}\n{status.st_size}\n{status.st_mtime_ns}\n{self.side}"
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"

    def min_bytes(self, photos: int) -> int:
        """Size of the copies if all photos are square, a lower bound."""
        return 3 * self.side**2 * photos

    def fill(
        self, images: ImageList, max_bytes: int, progress: Callable[[int, int], None] | None = None
    ) -> list[Problem]:
        """Make the missing copies and return the unreadable images, as `find_problems` does.

        Photos whose copies do not fit in a folder of `max_bytes` are decoded in every epoch, as without a cache.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"expected a folder for the cache, got {self.folder}, which is or is below a file"
            ) from error
        existing = {path.name: path.stat().st_size for path in self.folder.glob("*.npy")}
        left = min(max_bytes - sum(existing.values()), shutil.disk_usage(self.folder).free - SPARE_BYTES)
        refused, lock = 0, threading.Lock()  # several threads decode

        def keep(index: int, image: Image.Image) -> None:
            nonlocal left, refused
            copy = self.copy_path(images.file(index))
            small = None if copy.name in existing else shrink(image, self.side)
            if small is None:
                return
            with lock:
                fits = small.nbytes <= left
                left -= small.nbytes if fits else 0
                refused += not fits
            if fits:
                try:
                    with atomic_write(copy) as path:
                        np.save(path, small)
                except OSError:  # a full disk does not make the image unreadable
                    refused += 1

        problems = find_problems(images, keep=keep, progress=progress)
        if refused:
            warn(
                f"no space in {self.folder} for {refused} of {len(images)} images, which are decoded in every epoch: "
                "raise cache_gigabytes, free the disk, or remove the folder if it has copies of other photos",
            )
        return problems


def shrink(image: Image.Image, side: int) -> np.ndarray | None:
    """The upright image with a shorter side of `side` pixels: uint8 (h, w, 3); None if it is not larger.

    Always decodes every pixel, so that damage is detected.
    """
    width, height = image.size
    scale = side / min(width, height)
    if scale >= 1:
        image.load()
        return None
    return resize(image, (0, 0, width, height), (round(width * scale), round(height * scale)))
