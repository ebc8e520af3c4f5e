"""Better rankings from the neighbors of neighbors: query expansion, augmentation of the items, and re-ranking.

Axes: B queries, M items, K neighbors, D embedding.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from proxygml.display import counted
from proxygml.embeddings import Embeddings
from proxygml.retrieval.folder import FolderStorage
from proxygml.retrieval.hits import Hit, cosines
from proxygml.retrieval.postgres import PostgresStorage
from proxygml.retrieval.validation import check_vectors
from proxygml.retrieval.vector_index import VectorIndex

Storage = FolderStorage | PostgresStorage

# Chosen by `python -m benchmarks.ranking --only choice`: the highest sum of Recall@1 and MAP@R on training classes.
ALPHA = 1.0  # power of the similarity that weighs a neighbor
RECIPROCAL, AVERAGED = 20, 6  # k1 and k2 of re-ranking
ORIGINAL_WEIGHT = 0.7  # lambda, of the original distance
MAX_AUGMENTED, MAX_RERANKED = 100_000, 1000  # items, all of which are compared with each other
BLOCK_ELEMENTS = 2**24  # numbers of neighbors in memory at a time (128 MB as float64)


def check_sizes(
    items: int, *, expand: int | None = None, augment: int | None = None, rerank: int | None = None
) -> None:
    """An error unless the options of a search in so many items name numbers of neighbors that make sense."""
    for name, value, low, needed in (
        ("expand", expand, 1, 1),
        ("augment", augment, 1, 2),  # an item is not its own neighbor
        ("rerank", rerank, 2, 2),
    ):
        if value is not None and items < needed:
            raise ValueError(f"{name} needs {counted(needed, 'item')} or more, the index has {items}")
        if value is not None and value < low:
            raise ValueError(f"expected {name} of at least {low}, got {value:,}")
    compared = "items, which are all compared with each other"
    if augment is not None and items > MAX_AUGMENTED:
        remedy = "leave it out, or use expand or rerank"
        raise ValueError(f"augment is for up to {MAX_AUGMENTED:,} {compared}; the index has {items:,}: {remedy}")
    if rerank is not None and rerank > MAX_RERANKED:
        raise ValueError(f"rerank is for up to {MAX_RERANKED:,} {compared}, got {rerank:,}")


def weighted_means(vectors: np.ndarray, neighbors: np.ndarray, alpha: float = ALPHA) -> np.ndarray:
    """The mean of each vector (B, D) and its neighbors (B, K, D), weighted by similarity^alpha: (B, D).

    The mean has the length of the vector. Radenović et al., "Fine-tuning CNN Image Retrieval with No Human Annotation",
    2018, section 3.2. A neighbor with a negative similarity has no weight.
    """
    vectors, neighbors = vectors.astype(np.float64), neighbors.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)  # (B, 1)
    scales = lengths * np.linalg.norm(neighbors, axis=2)  # (B, K)
    similarities = np.einsum("bd,bkd->bk", vectors, neighbors) / np.where(scales > 0, scales, 1)  # (B, K)
    sums = vectors + np.einsum("bk,bkd->bd", similarities.clip(0) ** alpha, neighbors)  # (B, D)
    sum_lengths = np.linalg.norm(sums, axis=1, keepdims=True)  # (B, 1); not 0 unless the vector is
    return (sums * (lengths / np.where(sum_lengths > 0, sum_lengths, 1))).astype(np.float32)


def augment(items: Embeddings, neighbors: int, alpha: float = ALPHA) -> Embeddings:
    """The same items with each vector replaced by its weighted mean with its nearest items.

    Compares all items with each other. Augment again after a change.
    """
    check_sizes(len(items), augment=neighbors)
    neighbors = min(neighbors, len(items) - 1)
    vectors = check_vectors(items.vectors, items.dim, "the items")  # (M, D)
    index = VectorIndex.new("exact", items.dim, len(vectors), lambda count: vectors[:count])
    index.add(np.arange(len(vectors)), vectors)
    augmented = np.empty_like(vectors)
    for rows in _blocks(len(vectors), neighbors * items.dim):
        nearest = index.search(vectors[rows], neighbors + 1)[:, 1 : neighbors + 1]  # the first: itself, or an equal one
        augmented[rows] = weighted_means(vectors[rows], vectors[nearest], alpha)
    return replace(items, vectors=augmented)


def reciprocal_distances(
    query: np.ndarray,
    candidates: np.ndarray,
    k1: int = RECIPROCAL,
    k2: int = AVERAGED,
    original_weight: float = ORIGINAL_WEIGHT,
) -> np.ndarray:
    """k-reciprocal distances (K,) between a query (D,) and candidates (K, D): Zhong et al., CVPR 2017.

    Neighbors are looked for among the query and the candidates only, so the cost does not depend on the size of the
    index. As in the authors' code, distances are squared and divided by the largest of each row.
    """
    vectors = np.vstack([query, candidates]).astype(np.float64)  # (K + 1, D)
    squares = np.square(vectors).sum(1)
    squared = np.maximum(squares[:, None] + squares - 2 * vectors @ vectors.T, 0)  # (K + 1, K + 1)
    np.fill_diagonal(squared, 0)
    squared /= np.maximum(squared.max(axis=1, keepdims=True), 1e-30)
    order = np.argsort(squared - np.eye(len(vectors)), axis=1, kind="stable")  # each first, before equal ones

    def reciprocal(k: int) -> np.ndarray:
        """R(p, k), which includes p itself, as rows of zeros and ones (K + 1, K + 1)."""
        near = np.zeros_like(squared)
        np.put_along_axis(near, order[:, : k + 1], 1, axis=1)
        return near * near.T

    sets, halves = reciprocal(k1), reciprocal(max(1, round(k1 / 2)))
    overlaps = sets @ halves.T  # |R(p, k1) and R(q, k1 / 2)|
    joining = sets * (overlaps >= 2 / 3 * halves.sum(axis=1))  # whether R(q, k1 / 2) joins R(p, k1)
    weights = np.where(sets + joining @ halves > 0, np.exp(-squared), 0)  # of R*(p, k1)
    nearest = np.zeros_like(squared)
    np.put_along_axis(nearest, order[:, :k2], 1 / min(k2, len(vectors)), axis=1)
    weights = nearest @ weights  # local query expansion
    shared, united = np.minimum(weights[0], weights[1:]).sum(1), np.maximum(weights[0], weights[1:]).sum(1)  # (K,)
    return (1 - original_weight) * (1 - shared / united) + original_weight * squared[0, 1:]


def search_improved(
    searched: Storage, stored: Storage, queries: np.ndarray, count: int, expand: int | None, rerank: int | None
) -> list[list[Hit]]:
    """The `count` items of `searched` that rank first for queries (M, D), as hits of `stored`.

    Both have the same paths; those of `searched` may be augmented. Distances and similarities are those of the queries
    and the stored vectors.
    """
    results = []
    deepest = max(count, expand or 0, rerank or 0)
    for rows in _blocks(len(queries), deepest * searched.dim):
        ranked_by = queries[rows]  # (B, D)
        if expand is not None:
            nearest = _with_vectors(searched, searched.search(ranked_by, expand))
            pairs = zip(ranked_by, nearest, strict=True)
            ranked_by = np.vstack([weighted_means(query[None], vectors[None]) for query, (_, vectors) in pairs])
        found = _with_vectors(searched, searched.search(ranked_by, max(count, rerank or 0)))
        if rerank is not None:
            pairs = zip(ranked_by, found, strict=True)
            found = [_reranked(hits, query, vectors, rerank) for query, (hits, vectors) in pairs]
        if searched is not stored:
            found = _with_vectors(stored, [hits[:count] for hits, _ in found])
        for query, (hits, vectors) in zip(queries[rows].astype(np.float64), found, strict=True):
            shown = vectors[:count]  # (K, D)
            distances = np.sqrt(np.square(shown - query).sum(1)).tolist()
            numbers = zip(hits[:count], distances, cosines(query, shown).tolist(), strict=True)
            results.append([hit._replace(distance=distance, similarity=cosine) for hit, distance, cosine in numbers])
    return results


def _reranked(hits: list[Hit], query: np.ndarray, vectors: np.ndarray, rerank: int) -> tuple[list[Hit], np.ndarray]:
    """Hits and their vectors (K, D), of which the first are in the order of their k-reciprocal distances."""
    order = np.arange(len(hits))
    order[:rerank] = np.argsort(reciprocal_distances(query, vectors[:rerank]), kind="stable")
    return [hits[place] for place in order], vectors[order]


def _with_vectors(storage: Storage, results: list[list[Hit]]) -> list[tuple[list[Hit], np.ndarray]]:
    """Hits with the ids and vectors (K, D) of a storage; without those that somebody has removed meanwhile."""
    items = storage.find_all(sorted({hit.path for hits in results for hit in hits}))
    pairs = []
    for hits in results:
        kept = [hit._replace(id=items[hit.path][0]) for hit in hits if hit.path in items]
        vectors = np.array([items[hit.path][1] for hit in kept], np.float32).reshape(-1, storage.dim)
        pairs.append((kept, vectors))
    return pairs


def _blocks(count: int, elements: int) -> Iterator[slice]:
    """Slices of `count` rows, of so many elements each, that fit in memory."""
    size = max(1, BLOCK_ELEMENTS // elements)
    for start in range(0, count, size):
        yield slice(start, start + size)
