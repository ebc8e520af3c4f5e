"""A folder of large photos, decoded and shrunk once to small arrays that are memory-mapped for each crop.

The name of a copy is a hash of the photo's path, size and time and of the size of the copy. So a changed photo gets a
new copy, several runs can share a folder, and a run continues with the copies of an interrupted one.
"""

import hashlib
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from proxygml.data import ImageList, open_image
from proxygml.data.check import Problem, find_problems
from proxygml.data.decoding import resize
from proxygml.files import atomic_write

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

        If the folder would exceed `max_bytes`, the oldest copies of other photos are deleted. Photos that still do not
        fit are decoded in every epoch, as without a cache.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"expected a folder for the cache, got {self.folder}, which is or is below a file"
            ) from error
        needed = set()
        for index in range(len(images)):
            with suppress(OSError):  # find_problems reports missing files
                needed.add(self.copy_path(images.file(index)))
        budget = _Budget(self.folder, max_bytes, needed)

        def keep(index: int, image: Image.Image) -> None:
            copy = self.copy_path(images.file(index))
            if copy in budget.sizes:
                return
            small = shrink(image, self.side)
            if small is not None and budget.take(small.nbytes):
                try:
                    with atomic_write(copy) as path:
                        np.save(path, small)
                except OSError:  # a full disk does not make the image unreadable
                    budget.refused += 1

        problems = find_problems(images, decode=True, keep=keep, progress=progress)
        if budget.refused:
            warnings.warn(
                f"no room in {self.folder} for {budget.refused} of {len(images)} images, which are decoded in every "
                "epoch: raise cache_gigabytes or free the disk",
                stacklevel=2,
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


class _Budget:
    """The bytes left for copies in a folder, and the sizes of the copies it has."""

    def __init__(self, folder: Path, max_bytes: int, needed: set[Path]) -> None:
        # Only names of copies: a recipe from someone else must not delete other arrays.
        files = [path for path in folder.glob("*.npy") if re.fullmatch("[0-9a-f]{32}", path.stem)]
        copies = {path: path.stat() for path in files}
        newest_first = sorted(copies, key=lambda path: copies[path].st_mtime, reverse=True)
        self.removable = [path for path in newest_first if path not in needed]
        self.sizes = {path: status.st_size for path, status in copies.items()}
        self.left = min(max_bytes - sum(self.sizes.values()), shutil.disk_usage(folder).free - SPARE_BYTES)
        self.refused = 0
        self.lock = threading.Lock()  # several threads read images

    def take(self, size: int) -> bool:
        """Reserve bytes, deleting copies of other photos if needed; False if there is no room."""
        with self.lock:
            while self.left < size and self.removable:
                path = self.removable.pop()
                path.unlink(missing_ok=True)
                self.left += self.sizes.pop(path)
            granted = size <= self.left
            self.left -= size if granted else 0
            self.refused += not granted
            return granted
