"""Nearest-neighbor search: vectors with paths and classes, in a folder (SQLite + faiss) or in PostgreSQL (pgvector)."""

from proxygml.retrieval.hits import Hit
from proxygml.retrieval.index import Index
from proxygml.retrieval.url import is_url
from proxygml.retrieval.vector_index import KINDS

__all__ = ["KINDS", "Hit", "Index", "is_url"]
