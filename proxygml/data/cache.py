"""Large photos, decoded and shrunk once: a folder of small arrays that are memory-mapped when a crop is wanted.

A copy is named by what it was made of (path, size and time of the file, and how far it was shrunk), so a photo that
changes gets a new one, several runs share a folder, and what an interrupted run has kept serves the next.
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
from proxygml.data.images import resized, upright_size
from proxygml.files import atomic_write

SPARE_BYTES = 2**30  # of the disk stay free for checkpoints and everybody else


@dataclass(frozen=True)
class Cache:
    """Copies of photos in `folder`, the shorter side shrunk to `side` pixels; photos that are no larger have none."""

    folder: Path
    side: int

    def open(self, photo: Path) -> Image.Image:
        """The copy of a photo where there is one, else the photo itself: an `open_file` for an ImageList."""
        try:
            return Image.fromarray(np.load(self.copy_of(photo), mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError):  # no copy, or one that is damaged
            return open_image(photo)

    def copy_of(self, photo: Path) -> Path:
        """Where the copy of a photo is or would be."""
        status = photo.stat()
        made_of = f"{photo.absolute()}\n{status.st_size}\n{status.st_mtime_ns}\n{self.side}"
        return self.folder / f"{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.npy"

    def least_bytes(self, photos: int) -> int:
        """What the copies of so many photos take if all are square, which is the least."""
        return 3 * self.side**2 * photos

    def fill(
        self, images: ImageList, most_bytes: int, progress: Callable[[int, int], None] | None = None
    ) -> list[Problem]:
        """Make the copies that are missing; what cannot be read, as `find_problems` tells it.

        Where the folder would exceed `most_bytes`, copies of other photos give way, the oldest first. What then still
        has no room is decoded whenever it is wanted, as without a cache.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"expected a folder for the cache, got {self.folder}, which is or lies below a file"
            ) from error
        wanted = set()
        for index in range(len(images)):
            with suppress(OSError):  # a file that is not there is found with the other problems
                wanted.add(self.copy_of(images.file(index)))
        room = _Room(self.folder, most_bytes, wanted)
        problems = find_problems(
            images,
            decode=True,
            keep=lambda index, image: self._keep(images.file(index), image, room),
            progress=progress,
        )
        if room.refused:
            warnings.warn(
                f"no room in {self.folder} for {room.refused} of {len(images)} images, which are decoded anew in "
                "every epoch: raise cache_gigabytes or free the disk",
                stacklevel=2,
            )
        return problems

    def _keep(self, photo: Path, image: Image.Image, room: "_Room") -> None:
        copy = self.copy_of(photo)
        if copy in room.sizes:
            return
        small = shrunk(image, self.side)
        if small is not None and room.take(small.nbytes):
            try:
                with atomic_write(copy) as path:
                    np.save(path, small)
            except OSError:  # a full disk is no fault of the image
                room.refused += 1


def shrunk(image: Image.Image, side: int) -> np.ndarray | None:
    """The image upright, its shorter side `side` pixels long: uint8 (h, w, 3); None where it is no larger already.

    Decodes every pixel in either case, so that damage is found.
    """
    width, height = upright_size(image)
    scale = side / min(width, height)
    if scale >= 1:
        image.load()
        return None
    return resized(image, (0, 0, width, height), (max(1, round(width * scale)), max(1, round(height * scale))))


class _Room:
    """How much more the folder may hold, and which copies are there."""

    def __init__(self, folder: Path, most_bytes: int, wanted: set[Path]) -> None:
        # By their names: the folder may hold arrays of others, which no recipe that was sent may have deleted.
        own = [path for path in folder.glob("*.npy") if re.fullmatch("[0-9a-f]{32}", path.stem)]
        copies = {path: path.stat() for path in own}
        newest_first = sorted(copies, key=lambda path: copies[path].st_mtime, reverse=True)
        self.spare = [path for path in newest_first if path not in wanted]
        self.sizes = {path: status.st_size for path, status in copies.items()}
        self.left = min(most_bytes - sum(self.sizes.values()), shutil.disk_usage(folder).free - SPARE_BYTES)
        self.refused = 0
        self.lock = threading.Lock()  # images are read by several threads

    def take(self, size: int) -> bool:
        """Reserve so many bytes, if need be in place of copies of other images."""
        with self.lock:
            while self.left < size and self.spare:
                path = self.spare.pop()
                path.unlink(missing_ok=True)
                self.left += self.sizes.pop(path)
            granted = size <= self.left
            self.left -= size if granted else 0
            self.refused += not granted
            return granted
