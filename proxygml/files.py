"""Files that are written whole or not at all, and the folder for those that can be made again."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again; the variable PROXYGML_CACHE names another."""
    return Path(os.environ.get("PROXYGML_CACHE") or platformdirs.user_cache_dir("proxygml")).expanduser()


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; what is written there takes its place at the end, synced, in one step.

    Whatever interrupts the writing (an exception, a kill, a full disk) leaves the old file as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: savers such as np.savez and matplotlib read the format from it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
