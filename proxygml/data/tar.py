"""Images in tar files in WebDataset's layout: for each image, a file of the same name with its class.

key.jpg is next to key.cls, a text with the class, or key.json, {"label": ...}. Images are read in place, without
unpacking. The webdataset library only streams, without an index of images, which sampling by class and evaluation
need. The list of a file's images is kept in the user's cache, because reading a million headers takes a minute.
"""

import hashlib
import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from PIL import Image

from proxygml.data import ImageList, open_image
from proxygml.data.folder import SUFFIXES
from proxygml.data.splits import split_by_class
from proxygml.files import atomic_write, cache_folder, one_line, parse_json, require_file

MAX_LABEL_BYTES = 2**16


class Listed(NamedTuple):
    """An image in a tar file: name and place of its bytes, and its class."""

    name: str
    offset: int
    size: int
    label: str


def load(root: str | Path, *, test_fraction: float = 0.5) -> tuple[ImageList, ImageList]:
    """Training and test images from the tar files in the folder `root`, or from a single tar file.

    `split_classes` selects `test_fraction` of the classes for testing.
    """
    root = Path(root)
    folder, files = (root, sorted(root.glob("*.tar"))) if root.is_dir() else (root.parent, [root])
    if not files or not files[0].is_file() or files[0].suffix != ".tar":
        raise FileNotFoundError(f"no tar files in {root}: expected file names that end in .tar")
    paths, classes = [], []
    for file in files:
        for name, offset, size, label in list_images(file):
            paths.append(f"{file.name}/{name}@{offset}+{size}")
            classes.append(sys.intern(label))  # one object per class saves memory
    if not classes:
        raise ValueError(f"no images in {root}: expected members that end in {' '.join(SUFFIXES)}")
    train, test = split_by_class(paths, classes, test_fraction, root=folder)
    return replace(train, open_file=open_member), replace(test, open_file=open_member)


def list_images(file: Path) -> list[Listed]:
    """Every image in a tar file.

    From the user's cache if the file has the same size and time as when it was listed.
    """
    status = require_file(file).stat()
    key = f"{file.absolute()}\n{status.st_size}\n{status.st_mtime_ns}"
    name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    cached = cache_folder() / "tar" / f"{name}.json"
    with suppress(OSError, ValueError):  # a missing or damaged file is written again
        return [Listed(*row) for row in json.loads(cached.read_bytes())]
    listed = list(_samples(file))
    with suppress(OSError), atomic_write(cached) as draft:  # an unwritable cache only costs time
        draft.write_text(json.dumps(listed))
    return listed


def open_member(path: Path) -> Image.Image:
    """The image at folder/file.tar/name@offset+size."""
    match = re.fullmatch(r"(.*)@(\d+)\+(\d+)", str(path), re.DOTALL)
    if match is None:
        raise ValueError(f"expected a path such as file.tar/name@offset+size, got {path}")
    member, offset, size = match[1], int(match[2]), int(match[3])
    ends = (found.end() - 1 for found in re.finditer(r"\.tar/", member))  # a folder name may end in .tar too
    file = next((member[:end] for end in ends if os.path.isfile(member[:end])), None)
    if file is None:
        raise FileNotFoundError(f"no {path}: the tar file was removed after it was listed")
    with open(file, "rb") as shard:  # opened anew: thousands of shards would need as many descriptors
        contents = os.pread(shard.fileno(), size, offset)
    if len(contents) < size:
        raise OSError(f"{file} ends before {path.name}: it was truncated after it was listed")
    return open_image(io.BytesIO(contents))


def _samples(file: Path) -> Iterator[Listed]:
    with file.open("rb") as opened:  # outside the try: an OSError of the file itself stays one
        try:
            with tarfile.open(fileobj=opened, mode="r:") as archive:
                for key, members in groupby(_members(archive, opened), key=lambda member: _split(member.name)[0]):
                    yield from _sample(key, members, opened)
        except ValueError as error:
            raise ValueError(f"{file.name}: {one_line(error)}") from error
        except Exception as error:  # damaged bytes make tarfile raise more than its own errors
            raise ValueError(f"{file} is truncated or no tar file: {one_line(error)}") from error


def _members(archive: tarfile.TarFile, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    end = os.fstat(file.fileno()).st_size
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # it would keep a kilobyte for each
        if not member.isfile():
            continue
        if member.issparse() or member.size < 0 or member.offset_data + member.size > end:
            raise tarfile.ReadError(f"the {member.size:,} bytes of {member.name} are not in the file")
        yield member


def _sample(key: str, members: Iterator[tarfile.TarInfo], file: BinaryIO) -> Iterator[Listed]:
    """The image among consecutive members with the same key, if there is one."""
    image = label = None
    for member in members:
        suffix = _split(member.name)[1]
        if suffix in SUFFIXES:
            image = member.name, member.offset_data, member.size
        elif suffix in (".cls", ".json"):
            if member.size > MAX_LABEL_BYTES:
                raise ValueError(f"{member.name} has {member.size:,} bytes, too many for a class")
            label = _label(os.pread(file.fileno(), member.size, member.offset_data), suffix, member.name)
    if image is not None and label is not None:
        yield Listed(*image, label)
    elif image is not None or label is not None:
        lacks = "an image" if image is None else "a class (.cls or .json)"
        raise ValueError(f"{key} lacks {lacks}: expected both, one after the other")


def _split(name: str) -> tuple[str, str]:
    """folder/a.b.jpg -> folder/a, .b.jpg: WebDataset splits at the first dot of the file name."""
    folder, slash, last = name.rpartition("/")
    key, dot, suffix = last.partition(".")
    return f"{folder}{slash}{key}", f"{dot}{suffix.lower()}"


def _label(contents: bytes, suffix: str, where: str) -> str:
    try:
        text = contents.decode()
        label = str(cast(dict, parse_json(text))["label"]) if suffix == ".json" else text
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{where}: expected a class, as text or as {{"label": ...}}, got {contents[:40]!r}') from error
    if not label.strip():
        raise ValueError(f"{where}: expected a class, got nothing")
    return label.strip()
