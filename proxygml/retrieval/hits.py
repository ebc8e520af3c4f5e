"""Search results, and the fraction of the true nearest neighbors among them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import faiss
import numpy as np

from proxygml.embeddings import Embeddings

if TYPE_CHECKING:
    from proxygml.retrieval import Index


class Hit(NamedTuple):
    """An item that a search found."""

    path: str
    label: str  # name of its class
    distance: float  # Euclidean
    similarity: float  # the cosine, -1 to 1; 0 for a vector of zeros
    id: int  # of the item, never reused in an index


def cosines(query: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Cosine similarities of a query (D,) and vectors (K, D) of any lengths: (K,), each in -1..1."""
    query, vectors = query.astype(np.float64), vectors.astype(np.float64)
    lengths = np.linalg.norm(query) * np.linalg.norm(vectors, axis=1)  # (K,)
    return np.clip(vectors @ query / np.where(lengths > 0, lengths, 1), -1, 1)


def measure_recall(index: "Index", count: int, queries: int) -> float:
    """The fraction of the `count` true nearest neighbors of some of an index's own items that its search finds.

    An item is not its own neighbor. A hit as near as the last of the true neighbors counts as found.
    """
    total = len(index)
    count = min(count, total - 1)
    if count < 1:
        return 1.0
    query_rows = np.unique(np.linspace(0, total - 1, min(queries, total)).astype(int))  # (Q,)
    query_vectors, query_paths = _take(query_rows, index.blocks())  # (Q, D), (Q,); fewer if some are removed meanwhile
    if not len(query_paths):
        return 1.0
    nearest = np.full((len(query_paths), count), np.inf)  # (Q, K), squared distances
    for block in index.blocks():
        vectors = block.vectors
        rows = faiss.knn(query_vectors, vectors, min(count + 1, len(vectors)))[1]  # (Q, up to K + 1)
        squared = np.square(vectors[rows].astype(np.float64) - query_vectors[:, None]).sum(2)  # float32 is too coarse
        squared[block.paths[rows] == query_paths[:, None]] = np.inf
        nearest = np.sort(np.hstack([nearest, squared]), axis=1)[:, :count]
    limits = np.sqrt(nearest[:, -1]) * (1 + 1e-5)  # (Q,)
    found = 0
    for path, limit, hits in zip(query_paths, limits, index.search(query_vectors, count + 1), strict=True):
        others = [hit for hit in hits if hit.path != path][:count]
        found += sum(hit.distance <= limit for hit in others)
    return found / (len(query_paths) * count)


def _take(rows: np.ndarray, blocks: Iterable[Embeddings]) -> tuple[np.ndarray, np.ndarray]:
    """Vectors (Q, D) and paths (Q,) of the items at ascending rows (Q,)."""
    vectors: list[np.ndarray] = []
    paths: list[str] = []
    start = 0
    for block in blocks:
        selected = rows[(rows >= start) & (rows < start + len(block))] - start
        vectors += list(block.vectors[selected])
        paths += block.paths[selected].tolist()
        start += len(block)
    return np.array(vectors), np.array(paths, str)
