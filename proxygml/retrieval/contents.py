"""The files of an index folder: who may build there, what is refused unopened, and what may be erased.

A stranger may have sent the folder. SQLite follows links, waits for pipes and deletes the file that a journal names.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from proxygml import files

DATABASE = "items.sqlite"
MODEL_FILES = ("model.safetensors", "recipe.json")  # of a run: enough to embed a query
FAISS_FILE = re.compile(r"(hnsw|ivf-pq)-\d+\.faiss")
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")  # at the end of a journal that names another file


def check_contents(folder: Path) -> None:
    """An error unless what an index consists of are plain files, none of which harms other files."""
    for path in (folder / "model", *_paths(folder)):
        with suppress(FileNotFoundError):  # a journal may be removed at any time
            is_expected_type = stat.S_ISDIR if path.name == "model" else stat.S_ISREG
            if not is_expected_type(path.lstat().st_mode):
                raise ValueError(f"{path} is a link or a special file, which no index contains: remove it")
    journal = folder / f"{DATABASE}-journal"
    with suppress(FileNotFoundError), journal.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - len(JOURNAL_MAGIC)))
        if file.read() == JOURNAL_MAGIC:
            reason = f"{journal} names another file, which SQLite would delete"
            raise ValueError(f"{reason}: remove {folder} and build the index again")


def erase(folder: Path) -> None:
    """Remove the files of an index, by name; an error, and no change, if there are others."""
    check_contents(folder)
    paths = _paths(folder)
    for path in folder.rglob("*"):
        if path not in (*paths, folder / "model") and not path.name.startswith("."):
            raise FileExistsError(f"{path} does not belong to an index, which has to be built again: move it elsewhere")
    for path in sorted(paths, reverse=True):  # a journal before its database: it must not meet the next one
        path.unlink(missing_ok=True)
    with suppress(OSError):  # it does not exist, or contains hidden files
        (folder / "model").rmdir()


def _paths(folder: Path) -> list[Path]:
    """Where an index may have files."""
    databases = [folder / f"{DATABASE}{suffix}" for suffix in ("", "-journal", "-wal", "-shm")]
    model_files = [folder / "model" / name for name in MODEL_FILES]
    return databases + model_files + [path for path in folder.glob("*.faiss") if FAISS_FILE.fullmatch(path.name)]


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from building an index in the same folder."""
    if not (folder / DATABASE).exists():
        check_new(folder)
    with files.locked(folder):
        yield


def check_new(folder: Path) -> None:
    """An error if a folder exists and contains more than what a killed process left."""
    if folder.exists() and (not folder.is_dir() or any(not path.name.startswith(".") for path in folder.iterdir())):
        raise FileExistsError(f"{folder} exists already: name a new folder")
