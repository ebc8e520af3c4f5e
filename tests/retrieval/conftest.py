"""Fixtures for indexes: random embeddings, and new locations in a folder or in PostgreSQL."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from proxygml.embeddings import Embeddings
from proxygml.retrieval import Index, vector_index

DIM = 12
CLASSES = np.array(["crow", "örn", "wren"])


def random_embeddings(count: int, *, seed: int = 0, start: int = 0, dim: int = DIM, model: str = "m") -> Embeddings:
    """Random vectors of three classes with paths /photos/START.jpg, ..."""
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    paths = np.array([f"/photos/{start + number}.jpg" for number in range(count)])
    return Embeddings(vectors, np.arange(count) % 3, paths, CLASSES, model)


def add_in_parts(location: str, backwards: bool) -> int:
    """Add the same thousand items from first to last or from last to first, 75 at a time; returns how many were new."""
    index, items = Index.open(location), random_embeddings(1000)
    starts = range(0, 1000, 50)
    added = 0
    for start in reversed(starts) if backwards else starts:
        rows = slice(start, start + 75)
        columns = items.vectors[rows], items.labels[rows], items.paths[rows]
        columns = [column[::-1] for column in columns] if backwards else columns
        added += index.add(Embeddings(*columns, CLASSES, "m"))
    return added


@pytest.fixture
def new_location(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Where an index does not exist yet: `new_location("folder")`, `new_location("postgres")`."""

    def location(storage: str) -> str:
        return str(tmp_path / "index") if storage == "folder" else request.getfixturevalue("new_database")

    return location


@pytest.fixture(autouse=True)
def few_training_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "MIN_TRAINING_VECTORS", 400)
