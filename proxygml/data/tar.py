"""Images in tar files, as WebDataset writes them: for each image its class in a file of the same name.

key.jpg beside key.cls, a text that names the class, or beside key.json, {"label": ...}. Members are not unpacked; an
image is read where it lies, and training goes through the files in long runs of neighbors, so that a disk that is far
away reads ahead. What a file holds is listed once and kept in the user's cache: a million members take a minute.
"""

import hashlib
import io
import os
import re
import tarfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from PIL import Image

from proxygml.data import ImageList, open_image
from proxygml.data.folder import ENDINGS
from proxygml.data.names import Names
from proxygml.data.table import divide, split_classes
from proxygml.files import atomic_write, cache_folder, one_line, parse_json

WHERE = "your own tar files of images with their classes, as WebDataset writes them"
LICENCE = "yours"
MOST_OF_A_LABEL = 2**16  # bytes
LISTING = 1  # the form of what is kept of a listing


def load(root: Path, *, test_fraction: float = 0.5, seed: int = 0) -> tuple[ImageList, ImageList]:
    """What to train on and what to test on, from the tar files in `root`, or from a single one.

    `test_fraction` of the classes are for testing, chosen by `split_classes`.
    """
    root = Path(root)
    folder, files = (root, sorted(root.glob("*.tar"))) if root.is_dir() else (root.parent, [root])
    if not files or not files[0].is_file() or files[0].suffix != ".tar":
        raise FileNotFoundError(f"no tar files in {root}: expected some whose names end in .tar")
    paths = Names()
    classes: list[str] = []
    known: dict[str, str] = {}  # of equal names only the first is kept
    for file in files:
        own_paths, labels, names = listing(file)
        paths.extend(own_paths)
        own = [known.setdefault(name, name) for name in names]
        classes += [own[label] for label in labels.tolist()]
    if not classes:
        raise ValueError(f"no images in {root}: expected members that end in {' '.join(ENDINGS)}")
    test_classes = split_classes(known, test_fraction=test_fraction, seed=seed)
    both = divide(paths, classes, [name in test_classes for name in classes], root=folder)
    train, test = (replace(each, open_file=open_member) for each in both)
    return train, test


def listing(file: Path) -> tuple[Names, np.ndarray, Names]:
    """Of a tar file the path of every image, the label (M,) of each, and what these labels are called.

    From the user's cache, unless the file is new there, or of another size or time than when it was listed.
    """
    status = file.stat()
    made_of = f"{LISTING}\n{file.absolute()}\n{status.st_size}\n{status.st_mtime_ns}"
    kept = cache_folder() / "tar" / f"{hashlib.sha256(made_of.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.npz"
    with suppress(Exception):  # whatever a missing, cut or foreign file raises: it is listed again
        return _read_listing(kept)
    paths, labels = Names(), array("q")
    numbers: dict[str, int] = {}
    for name, offset, size, label in _samples(file):
        paths.append(f"{file.name}/{name}@{offset}+{size}")
        labels.append(numbers.setdefault(label, len(numbers)))
    listed = paths, np.frombuffer(labels, dtype=np.int64), Names(numbers)
    with suppress(OSError), atomic_write(kept) as draft:  # without a place to keep it, the next time takes as long
        (block, ends), (name_block, name_ends) = listed[0].packed(), listed[2].packed()
        np.savez(draft, paths=block, ends=ends, labels=listed[1], names=name_block, name_ends=name_ends)
    return listed


def _read_listing(kept: Path) -> tuple[Names, np.ndarray, Names]:
    with kept.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        paths, labels = Names.unpacked(stored["paths"], stored["ends"]), stored["labels"]
        names = Names.unpacked(stored["names"], stored["name_ends"])
    if labels.shape != (len(paths),) or (len(labels) and not 0 <= labels.min() <= labels.max() < len(names)):
        raise ValueError(f"expected a label for each of {len(paths)} images in {kept}, got {labels.shape}")
    return paths, labels, names


def open_member(path: Path) -> Image.Image:
    """The image at folder/file.tar/name@offset+size."""
    whole = re.fullmatch(r"(.*)@(\d+)\+(\d+)", str(path), re.DOTALL)
    if whole is None:
        raise ValueError(f"expected a place in a tar file, file.tar/name@offset+size, got {path}")
    place, offset, size = whole.groups()
    ends = (found.end() - 1 for found in re.finditer(r"\.tar/", place))  # folders may be called so too
    file = next((place[:end] for end in ends if os.path.isfile(place[:end])), None)
    if file is None:
        raise FileNotFoundError(f"no {path}: the tar file that was listed is gone")
    contents = os.pread(_opened(file), int(size), int(offset))
    if len(contents) < int(size):
        raise OSError(f"{file} ends before {path.name}: it was cut short since it was listed")
    return open_image(io.BytesIO(contents))


@lru_cache(maxsize=64)
def _opened(file: str) -> int:
    return os.open(file, os.O_RDONLY)


def _samples(file: Path) -> Iterator[tuple[str, int, int, str]]:
    """Name, place and size of every image in a tar file, and its class."""
    with file.open("rb") as opened:  # what the system says of the file is said as it is
        try:
            yield from _samples_in(opened)
        except ValueError as error:
            raise ValueError(f"{file.name}: {one_line(error)}") from error
        except Exception as error:  # on damaged bytes tarfile raises more than its own errors
            raise ValueError(f"{file} is no whole tar file: {one_line(error)}") from error


def _samples_in(file: BinaryIO) -> Iterator[tuple[str, int, int, str]]:
    key, image, label = None, None, None
    end = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # which it would keep, a kilobyte each
            if not member.isfile():
                continue
            own_key, ending = _split(member.name)
            if own_key != key:
                if key is not None and (image is not None or label is not None):
                    yield _complete(key, image, label)
                key, image, label = own_key, None, None
            if member.issparse() or member.size < 0 or member.offset_data + member.size > end:
                raise tarfile.ReadError(f"{member.name} is said to have {member.size:,} bytes, which are not there")
            if ending in ENDINGS:
                image = member.name, member.offset_data, member.size
            elif ending in (".cls", ".json"):
                if member.size > MOST_OF_A_LABEL:
                    raise ValueError(f"{member.name} has {member.size:,} bytes, too many for a class")
                label = _label(os.pread(file.fileno(), member.size, member.offset_data), ending, member.name)
    if key is not None and (image is not None or label is not None):
        yield _complete(key, image, label)


def _split(name: str) -> tuple[str, str]:
    """folder/a.b.jpg -> folder/a and .b.jpg: for WebDataset an ending begins at the first dot of the last name."""
    folder, slash, last = name.rpartition("/")
    key, dot, ending = last.partition(".")
    return f"{folder}{slash}{key}", f"{dot}{ending.lower()}"


def _label(contents: bytes, ending: str, where: str) -> str:
    try:
        text = contents.decode()
        label = str(cast(dict, parse_json(text))["label"]) if ending == ".json" else text
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{where}: expected a class, as text or as {{"label": ...}}, got {contents[:40]!r}') from error
    if not label.strip():
        raise ValueError(f"{where}: expected a class, got nothing")
    return label.strip()


def _complete(key: str, image: tuple[str, int, int] | None, label: str | None) -> tuple[str, int, int, str]:
    if image is None or label is None:
        lacks = "an image" if image is None else "a class (.cls or .json)"
        raise ValueError(f"{key} lacks {lacks}: expected both, one after the other")
    return *image, label
