"""The nearest items of every query, found by faiss."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from proxygml.evaluation.validation import as_matrix

BLOCK = 1024  # queries at a time
SPARE = 8  # more candidates than asked for, since float32 may swap a few
MAX_ELEMENTS = 2**23  # of neighbors, or of candidates' vectors, at a time: 64 MB in float64


def neighbors(
    queries: np.ndarray | Tensor, gallery: np.ndarray | Tensor | None = None, *, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The K = count nearest items of queries (M, D): indices (M, K) and Euclidean distances (M, K), nearest first.

    Searches gallery (G, D); without one the queries themselves, each excluding itself. faiss proposes candidates in
    float32, which are ranked by their distances in float64, then by index.
    """
    queries = as_matrix(queries, "queries", min_rows=1 if gallery is not None else 2)  # (M, D)
    items = queries if gallery is None else as_matrix(gallery, "gallery", width=queries.shape[1])  # (G, D)
    max_count = len(items) - (gallery is None)
    if not 1 <= count <= max_count:
        raise ValueError(f"expected a count from 1 to {max_count}, the number of items, got {count}")
    indices, distances = [], []
    for rows, candidates in nearest_in_blocks(queries, items, min(count + SPARE, max_count)):
        candidates = candidates.sort(dim=1).values  # (B, K + SPARE)
        block = max(1, MAX_ELEMENTS // (candidates.shape[1] * items.shape[1]))
        for batch, near in zip(queries[rows].split(block), candidates.split(block), strict=True):
            distance, order = (items[near] - batch[:, None]).norm(dim=2).sort(dim=1, stable=True)
            indices.append(near.gather(1, order[:, :count]))
            distances.append(distance[:, :count])
    return torch.cat(indices).numpy(), torch.cat(distances).numpy()


def nearest_in_blocks(
    queries: Tensor, items: Tensor, count: int, process: tuple[int, int] = (0, 1)
) -> Iterator[tuple[slice, Tensor]]:
    """Yields a slice of the queries (M,) and their nearest items (B, K), nearest first by distances in float32.

    If items (G, D) and queries (M, D) are the same tensor, no query finds itself. Each process gets other blocks.
    """
    import faiss

    same = queries is items
    origin = items[(items - items.mean(0)).norm(dim=1).argmin()]  # (D,), a central item: products cancel least
    sides = [items - origin] if same else [items - origin, queries - origin]  # (G, D), (M, D)
    largest = max(side.abs().max() for side in sides)
    scale = 2.0 ** -int(torch.frexp(largest).exponent)  # squares are in range, and ties stay ties
    gallery, *_ = both = [(side * scale).float().numpy() for side in sides]
    vectors = both[-1]  # (M, D)
    block = max(1, min(BLOCK, MAX_ELEMENTS // count))
    rank, world_size = process
    for start in range(rank * block, len(vectors), world_size * block):
        rows = slice(start, min(start + block, len(vectors)))
        _, indices = faiss.knn(vectors[rows], gallery, count + same)  # (B, K); (B, K + 1) with itself
        if same:
            others = indices != np.arange(rows.start, rows.stop)[:, None]  # (B, K + 1)
            others[others.all(axis=1), -1] = False  # if so many vectors equal the query that it is not among them
            indices = indices[others].reshape(-1, count)
        yield rows, torch.from_numpy(indices)
