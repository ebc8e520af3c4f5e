"""A gallery to search in: vectors with paths and classes, in a folder or in a PostgreSQL database."""

from pathlib import Path

from proxygml.index.address import is_address
from proxygml.index.finder import KINDS, suited
from proxygml.index.folder import Index
from proxygml.index.hits import Hit
from proxygml.index.postgres import PostgresIndex

__all__ = ["KINDS", "Hit", "Index", "PostgresIndex", "create_index", "is_address", "open_index", "suited"]


def open_index(place: str | Path) -> Index | PostgresIndex:
    """The index in a folder, or at an address postgresql://..."""
    return PostgresIndex.open(str(place)) if is_address(place) else Index.open(Path(place))


def create_index(place: str | Path, *, width: int, model: str, kind: str) -> Index | PostgresIndex:
    """An empty index in a new folder, or at an address postgresql://..."""
    if is_address(place):
        return PostgresIndex.create(str(place), width=width, model=model, kind=kind)
    return Index.create(Path(place), width=width, model=model, kind=kind)
