"""Files that are written whole or not at all, checksums by which changes are noticed, the folder of the cache."""

import glob
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

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
        # A write that fails does not name its file, and other errors name the temporary one.
        here = temporary is None or getattr(error, "filename", None) in (None, str(temporary))
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
