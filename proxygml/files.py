"""Files that are written whole or not at all, their checksums, what is said of those that cannot be read; the cache."""

import glob
import json
import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import platformdirs

MOST_UNPACKED, MOST_SWELLING = 2**30, 100  # bytes that any archive may unpack to, and how many times its own size
CHECKSUM = "checksum"  # the entry of a JSON object that is of all others


class UnwritableError(OSError):
    """A file could not be written: the disk is full, or read-only."""


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again; the variable PROXYGML_CACHE names another."""
    return Path(os.environ.get("PROXYGML_CACHE") or platformdirs.user_cache_dir("proxygml")).expanduser()


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; what is written there takes its place at the end, synced, in one step.

    Whatever interrupts the writing (an exception, a kill, a full disk) leaves the old file as it was.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The suffix stays last: savers such as np.savez and matplotlib read the format from it.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        # A write that fails does not name its file, and other errors name the temporary one, a copy as its second.
        named = {getattr(error, "filename", None), getattr(error, "filename2", None)}
        here = temporary is None or named == {None} or str(temporary) in named
        if isinstance(error, OSError) and error.errno and here:
            raise UnwritableError(f"could not write {path}: {error.strerror}") from error
        raise


def sweep(path: Path) -> None:
    """Remove what killed processes left of writing a file, which nobody may be writing now."""
    for left in path.parent.glob(f".{glob.escape(path.stem)}-????????{path.suffix}"):
        left.unlink(missing_ok=True)


def file_checksum(path: Path, size: int | None = None) -> int:
    """Of the first `size` bytes of a file, or of all."""
    found, left = 0, path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left and (some := file.read(min(left, 2**20))):
            found, left = zlib.crc32(some, found), left - len(some)
    return found


def sealed(values: dict) -> dict:
    """The same, to be kept as JSON, with a checksum."""
    return values | {CHECKSUM: _checksum(values)}


def unsealed(values: dict) -> dict:
    """What was sealed, without its checksum, if it had one; a ValueError where it was altered."""
    values = dict(values)
    expected = values.pop(CHECKSUM, None)
    if expected not in (None, _checksum(values)):
        raise ValueError(f"it was altered; whoever did so on purpose takes out its {CHECKSUM}")
    return values


def _checksum(values: dict) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says; a ValueError where it is none, however deep it goes."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def refuse_swelling(file: BinaryIO) -> None:
    """An error where a zip archive says that it unpacks to so much more than it holds as only a trap does.

    No reader gives out more of a member than the archive says. What is no archive is left to who reads it.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
            size = file.seek(0, os.SEEK_END)
            if unpacked > max(MOST_UNPACKED, MOST_SWELLING * size):
                raise ValueError(f"it has {size:,} bytes and says that it unpacks to {unpacked:,}: it is not opened")
            for name in archive.namelist():  # torch lets a pickle ask for as many bytes as it likes
                if name.endswith(".pkl") and b"bytearray" in archive.read(name):
                    raise ValueError("it asks for memory of its own, as weights never do: it is not opened")
    file.seek(0)


def check_texts(name: str, texts: np.ndarray) -> None:
    """An error where an array that was read is no row of texts (M,): numpy takes any numbers for characters."""
    if texts.ndim != 1 or texts.dtype.kind != "U":
        raise ValueError(f"expected {name} as a row of texts, got {texts.dtype} {texts.shape}")
    if texts.nbytes and np.ascontiguousarray(texts, texts.dtype.newbyteorder("=")).view("u4").max() > sys.maxunicode:
        raise ValueError(f"expected {name} as texts, got numbers that are no characters")


def one_line(said: object, most: int = 300) -> str:
    """What an error says, or another text of unknown length, in one line that a person can read."""
    text = " ".join(str(said)[: 4 * most].split()) or type(said).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
