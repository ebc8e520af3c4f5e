"""Nearest-neighbor search: vectors with paths and classes, in a folder (SQLite + faiss) or in PostgreSQL (pgvector)."""

from pathlib import Path

from proxygml.retrieval.folder import Index
from proxygml.retrieval.hits import Hit
from proxygml.retrieval.postgres import PostgresIndex
from proxygml.retrieval.postgres import suggest_kind as suggest_postgres_kind
from proxygml.retrieval.url import is_url
from proxygml.retrieval.vector_index import KINDS
from proxygml.retrieval.vector_index import suggest_kind as suggest_faiss_kind

__all__ = ["KINDS", "AnyIndex", "Hit", "Index", "PostgresIndex", "create_index", "is_url", "open_index"]

AnyIndex = Index | PostgresIndex


def open_index(location: str | Path) -> AnyIndex:
    """The index in a folder or at a postgresql:// URL."""
    return PostgresIndex.open(str(location)) if is_url(location) else Index.open(Path(location))


def create_index(
    location: str | Path, *, dim: int, model: str = "", kind: str | None = None, expected_size: int = 0
) -> AnyIndex:
    """An empty index in a new folder or at a postgresql:// URL; without `kind`, the one that suits `expected_size`."""
    if is_url(location):
        kind = kind or suggest_postgres_kind(expected_size, dim)
        return PostgresIndex.create(str(location), dim=dim, model=model, kind=kind)
    return Index.create(Path(location), dim=dim, model=model, kind=kind or suggest_faiss_kind(expected_size, dim))
