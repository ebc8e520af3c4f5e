"""The nearest items of every query, exactly and in order."""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from proxygml.evaluation.validation import as_matrix, check_block


def neighbors(
    queries: np.ndarray | Tensor,
    gallery: np.ndarray | Tensor | None = None,
    *,
    count: int,
    groups: tuple[np.ndarray, np.ndarray] | None = None,
    block: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The K = count nearest items of queries (M, D): indices (M, K) and Euclidean distances (M, K), nearest first.

    Searches gallery (G, D); without one the queries themselves, each excluding itself. Of items at equal distance the
    lower index comes first. With `groups` of the queries (M,) and of the items (G,), no query finds an item of its own
    group; where too few are left, the last distances are infinite. `block` queries are compared at a time; the default
    fits in 64 MB.
    """
    queries = as_matrix(queries, "queries", min_rows=1 if gallery is not None else 2)  # (M, D)
    items = queries if gallery is None else as_matrix(gallery, "gallery", width=queries.shape[1])  # (G, D)
    max_count = len(items) - (gallery is None)
    if not 1 <= count <= max_count:
        raise ValueError(f"expected a count from 1 to {max_count}, the number of items, got {count}")
    indices, distances = np.empty((len(queries), count), np.int64), np.empty((len(queries), count))  # (M, K) each
    for rows, nearest, squared in nearest_in_blocks(queries, items, count, block, groups=groups):
        indices[rows], distances[rows] = nearest, squared.sqrt()
    return indices, distances


def nearest_in_blocks(
    queries: Tensor,
    items: Tensor,
    count: int,
    block: int | None,
    process: tuple[int, int] = (0, 1),
    groups: tuple[np.ndarray, np.ndarray] | None = None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields a slice of the queries (M,), their nearest items (B, K) in order, and squared distances (B, K).

    If items (G, D) and queries (M, D) are the same tensor, no query finds itself; with `groups` of the queries (M,) and
    of the items (G,), none finds an item of its own group. Each process gets other blocks.
    """
    same = queries is items
    block = check_block(min(max(2**23 // len(items), 16), 1024) if block is None else block)
    origin = central_vector(items)  # (D,)
    items = items - origin
    queries = items if same else queries - origin
    halves = items.square().sum(1) / 2  # (G,)
    first = first_equal(items.numpy())  # (G,)
    copies = (first != torch.arange(len(first))).nonzero()[:, 0]
    buffer = torch.empty(min(block, len(queries)), len(items), dtype=torch.float64)  # (B, G); reused
    rank, world_size = process
    for start in range(rank * block, len(queries), world_size * block):
        batch = queries[start : start + block]  # (B, D)
        scores = torch.addmm(halves, batch, items.T, alpha=-1, out=buffer[: len(batch)])  # (B, G): distance - |q|²/2
        if len(copies):  # a matrix product may round equal columns differently
            scores[:, copies] = scores[:, first[copies]]
        if same:
            scores[:, start:].fill_diagonal_(torch.inf)  # the query itself, by its index
        if groups is not None:
            own_group = groups[0][start : start + len(batch), None] == groups[1]  # (B, G)
            scores[torch.from_numpy(own_group)] = torch.inf
        indices = _smallest(scores, count)  # (B, K)
        own = batch.square().sum(1, keepdim=True) / 2  # (B, 1)
        squared = 2 * (scores.gather(1, indices) + own)  # (B, K)
        # Where six digits cancel, take the difference itself: equal vectors then have distance 0 exactly.
        rows, columns = (squared < 1e-6 * (own + halves[indices])).nonzero(as_tuple=True)
        for row, column in zip(rows.split(2**14), columns.split(2**14), strict=True):
            squared[row, column] = (batch[row] - items[indices[row, column]]).square().sum(1)
        squared, order = squared.sort(dim=1, stable=True)
        yield slice(start, start + len(batch)), indices.gather(1, order), squared


def central_vector(vectors: Tensor) -> Tensor:
    """The vector of (M, D) nearest to their mean: (D,).

    With the origin there, products of vectors cancel least. It is a vector and not the mean because differences of
    integers, and nearly always of float32, are exact in float64: ties stay ties.
    """
    return vectors[torch.linalg.vector_norm(vectors - vectors.mean(0), dim=1).argmin()]


def first_equal(vectors: np.ndarray) -> Tensor:
    """Index of the first row equal to each row: vectors (M, D) -> (M,)."""
    seen: dict[bytes, int] = {}  # digests: 16 bytes instead of a whole row. Adding 0 turns -0 into 0.
    digests = (hashlib.blake2b(vector + 0, digest_size=16).digest() for vector in vectors)
    return torch.tensor([seen.setdefault(digest, index) for index, digest in enumerate(digests)])


def _smallest(scores: Tensor, count: int) -> Tensor:
    """Columns of the smallest entries of each row, ascending: scores (B, G) -> (B, K); of equal entries the first."""
    values, indices = scores.topk(min(count + 1, scores.shape[1]), largest=False)  # (B, K + 1); (B, K) if K = G
    indices, edge = indices[:, :count], values[:, count - 1 : count]  # (B, K), (B, 1)
    tied = (values[:, count:] == edge).any(1)  # (B,); topk took any of the entries equal to the edge
    if tied.any():
        nearer, equal = scores[tied] < edge[tied], scores[tied] == edge[tied]  # (tied rows, G)
        chosen = nearer | (equal & (equal.cumsum(1) <= count - nearer.sum(1, keepdim=True)))
        indices[tied] = chosen.nonzero()[:, 1].view(-1, count)
    return indices.sort(dim=1).values
