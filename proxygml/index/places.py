"""The folder that an index is in: who may build there, and whether the network that is kept there is unaltered."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxygml import locks
from proxygml.files import file_checksum

MODEL = ("best.pt", "recipe.json")  # what embeds a query


@contextmanager
def built(folder: Path) -> Iterator[None]:
    """Alone to build an index in a folder: of two that begin one at once, the later would replace that of the other."""
    if not (folder / "items.sqlite").exists():
        refuse_taken(folder)
    with locks.locked(folder):
        yield


def refuse_taken(folder: Path) -> None:
    """An error if there is something at a folder's place already, but for what a process that was killed left."""
    if folder.exists() and (not folder.is_dir() or any(not path.name.startswith(".") for path in folder.iterdir())):
        raise FileExistsError(f"{folder} is there already: name a new folder")


def erase(folder: Path) -> None:
    """Remove an index, but for the lock of who does so."""
    for path in folder.iterdir():
        if path.name != locks.NAME:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def network_checksum(model: Path) -> str:
    """Of what embeds a query; something else where it is not there."""
    return " ".join(f"{file_checksum(model / name):08x}" if (model / name).exists() else "none" for name in MODEL)
