"""Atomic files, checksums, folder locks, the cache folder, and checks of untrusted files."""

import errno
import fcntl
import glob
import inspect
import json
import os
import secrets
import shutil
import socket
import stat
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import platformdirs
from filelock import FileLock, Timeout

if TYPE_CHECKING:  # `proxygml --help` starts without numpy
    import numpy as np

MAX_UNPACKED, MAX_EXPANSION = 2**25, 100  # bytes that any file may unpack to, and multiples of its own size
CHECKSUM = "checksum"  # key of the checksum in a JSON object
LOCK_NAME = ".lock"
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of network file systems without locks
LOCK_TIMEOUT = 3.0  # seconds to wait for a process that was just stopped and is still exiting


class UnwritableError(OSError):
    """A file could not be written: the disk is full, or read-only."""


def cache_folder() -> Path:
    """The user's cache folder, or the folder in the environment variable PROXYGML_CACHE."""
    return Path(os.environ.get("PROXYGML_CACHE") or platformdirs.user_cache_dir("proxygml")).expanduser()


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder; at the end it is synced and renamed to `path`.

    An interruption (an exception, a kill, a full disk) leaves the old file unchanged.
    """
    path = Path(path)
    temporary = handle = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The suffix stays last: savers such as np.savez and matplotlib read the format from it.
        draft = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")
        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        temporary = draft
        _try_flock(handle)  # for `remove_temporaries`
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        with suppress(OSError):  # some file systems cannot sync a folder
            _sync(path.parent)  # without it, the new name may be lost with the power
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        # A failed write does not name its file; other errors name the temporary file, a copy as its second file.
        named = {getattr(error, "filename", None), getattr(error, "filename2", None)}
        about_this_file = temporary is None or named == {None} or str(temporary) in named
        if isinstance(error, OSError) and error.errno and about_this_file:
            raise UnwritableError(f"could not write {path}: {error.strerror}") from error
        raise
    finally:
        if handle is not None:
            os.close(handle)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder inside `folder`, which is created if needed; at the end, its content is moved up into `folder`.

    An interruption leaves nothing to see. Not beside `folder`, which may be the current one or a mounted disk.
    """
    draft = folder / f".unfinished-{secrets.token_hex(4)}"
    draft.mkdir(parents=True)
    try:
        yield draft
        for path in sorted(draft.iterdir()):
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # not empty
            folder.rmdir()


def remove_temporaries(*paths: Path) -> None:
    """Remove the temporary files of these paths that killed processes left behind; those in use stay."""
    for path in paths:
        for temporary in path.parent.glob(f".{glob.escape(path.stem)}-????????{glob.escape(path.suffix)}"):
            with suppress(OSError):  # removed by another process
                handle = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                if _try_flock(handle):
                    temporary.unlink()
                os.close(handle)


def _try_flock(handle: int) -> bool:
    """Lock a file until it is closed or the process ends; False if another process has locked it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also on file systems without locks
        return False
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is created if needed; an error names the process that uses it.

    The system releases the lock when its process ends, however it ends; forks do not keep it.
    """
    path = folder / LOCK_NAME
    lock = FileLock(path, timeout=LOCK_TIMEOUT, poll_interval=0.1, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # FileLock does not follow it either, but names neither reason nor remedy
            raise ValueError(f"{path} is a link: remove it")
        if path.exists():
            require_file(path)  # a stranger's may be a pipe
        lock.acquire()
    except Timeout:
        owner = path.read_bytes()[:300].decode(errors="replace") or "another process"
        raise ValueError(f"{owner} is using {folder}: wait for it, or stop it") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UnwritableError(f"could not write {path}: {error.strerror}") from error
    try:
        with suppress(OSError):  # a full disk: it names no process
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        lock.release()


def require_unlocked(folder: Path) -> None:
    """Raise a ValueError if a process uses the folder."""
    if (folder / LOCK_NAME).exists():
        with locked(folder):
            pass


def file_checksum(path: Path, size: int | None = None) -> int:
    """CRC-32 of the first `size` bytes of a file, or of all of it."""
    checksum, left = 0, path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left and (chunk := file.read(min(left, 2**20))):
            checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
    return checksum


def with_checksum(values: dict) -> dict:
    """A JSON object with a checksum of its other entries."""
    return values | {CHECKSUM: _checksum(values)}


def verify_checksum(values: dict) -> dict:
    """The values without their checksum, if they had one; a ValueError if they were altered."""
    values = dict(values)
    expected = values.pop(CHECKSUM, None)
    if expected not in (None, _checksum(values)):
        raise ValueError(f"it was altered; if you edited it on purpose, remove its {CHECKSUM}")
    return values


def _checksum(values: dict) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; a ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def require_file(path: Path) -> Path:
    """The path, if it leads to a file: opening a pipe would wait forever, and a device may never end."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: expected a file")
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a pipe or device'}: expected a file")
    return path


def reject_zip_bomb(file: BinaryIO) -> None:
    """Raise a ValueError if a zip archive unpacks to far more than its size; other files pass.

    Python never extracts more of a member than the archive declares.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
            size = file.seek(0, os.SEEK_END)
            if unpacked > max(MAX_UNPACKED, MAX_EXPANSION * size):
                raise ValueError(f"it has {size:,} bytes and unpacks to {unpacked:,}: it is not opened")
    file.seek(0)


def check_texts(name: str, texts: "np.ndarray") -> None:
    """Raise a ValueError unless an array from a file is strings (M,): numpy accepts any numbers as characters."""
    if texts.ndim != 1 or texts.dtype.kind != "U":
        raise ValueError(f"expected {name} as a row of texts, got {texts.dtype} {texts.shape}")
    if texts.nbytes and texts.astype(texts.dtype.newbyteorder("="), "C").view("u4").max() > sys.maxunicode:
        raise ValueError(f"expected {name} as texts, got numbers that are no characters")


def one_line(value: object, max_length: int = 300) -> str:
    """An error message, or another text of unknown length, as one short line."""
    text = " ".join(str(value)[: 4 * max_length].split()) or type(value).__name__
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ ": did you mean 'x'?" with the known name closest to an unknown one; empty if none is close."""
    names = sorted(known, key=len)
    nearest = [each for each in names if each.startswith(name)] or get_close_matches(name, names, n=1, cutoff=0.4)
    return f": did you mean {nearest[0]!r}?" if nearest else ""


def unknown_name(expected: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is none of the known ones: expected "a loss", got another, and the known ones."""
    return ValueError(f"expected {expected}, got {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")


def warn(message: str) -> None:
    """A warning that shows the line outside this package that called into it."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
