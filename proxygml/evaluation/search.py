"""The nearest items of every query, exactly and in order."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from proxygml.evaluation.vectors import checked_block, first_equal, matrix, middle


def neighbours(
    queries: np.ndarray | Tensor, gallery: np.ndarray | Tensor | None = None, *, count: int, block: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest items of queries (M, D): indices (M, K) and Euclidean distances (M, K), nearest first, K = count.

    Searched is gallery (G, D), or without one the queries themselves, each without itself. Of items equally far the
    lower index comes first. `block` queries are compared at a time; by default as many as fit in 64 MB.
    """
    queries = matrix(queries, "queries", least=1 if gallery is not None else 2)  # (M, D)
    searched = queries if gallery is None else matrix(gallery, "gallery", width=queries.shape[1])  # (G, D)
    most = len(searched) - (gallery is None)
    if not 1 <= count <= most:
        raise ValueError(f"expected a count from 1 to {most}, the items to be found, but {count} came: change it")
    indices, distances = np.empty((len(queries), count), np.int64), np.empty((len(queries), count))  # (M, K) each
    for asking, nearest, squared in nearest_in_blocks(queries, searched, count, block):
        indices[asking], distances[asking] = nearest, squared.sqrt()
    return indices, distances


def nearest_in_blocks(
    queries: Tensor, searched: Tensor, count: int, block: int | None, process: tuple[int, int] = (0, 1)
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Block by block: the queries' place in (M,), their nearest items (B, K) in order, squared distances (B, K).

    Where what is searched (G, D) are the queries (M, D), the same tensor, none finds itself. Of several processes each
    takes other blocks.
    """
    alone = queries is searched
    block = checked_block(min(max(2**23 // len(searched), 16), 1024) if block is None else block)
    origin = middle(searched)  # (D,)
    searched = searched - origin
    queries = searched if alone else queries - origin
    halves = searched.square().sum(1) / 2  # (G,)
    first = first_equal(searched.numpy())  # (G,)
    copies = (first != torch.arange(len(first))).nonzero()[:, 0]
    buffer = torch.empty(min(block, len(queries)), len(searched), dtype=torch.float64)  # (B, G); fresh memory is dear
    rank, processes = process
    for start in range(rank * block, len(queries), processes * block):
        asked = queries[start : start + block]  # (B, D)
        ranks = torch.addmm(halves, asked, searched.T, alpha=-1, out=buffer[: len(asked)])  # (B, G); lacks |q|²/2
        if len(copies):  # a matrix product may round equal columns differently, by their place
            ranks[:, copies] = ranks[:, first[copies]]
        if alone:
            ranks[:, start:].fill_diagonal_(torch.inf)  # the query itself, by its index
        indices = _smallest(ranks, count)  # (B, K)
        own = asked.square().sum(1, keepdim=True) / 2  # (B, 1)
        squared = 2 * (ranks.gather(1, indices) + own)  # (B, K)
        # Where six digits cancelled, the difference itself is taken: equal vectors are then exactly 0 apart.
        rows, columns = (squared < 1e-6 * (own + halves[indices])).nonzero(as_tuple=True)
        for row, column in zip(rows.split(2**14), columns.split(2**14), strict=True):
            squared[row, column] = (asked[row] - searched[indices[row, column]]).square().sum(1)
        squared, order = squared.sort(dim=1, stable=True)
        yield slice(start, start + len(asked)), indices.gather(1, order), squared


def _smallest(rank: Tensor, count: int) -> Tensor:
    """Where every row's smallest entries are, ascending: rank (B, G) -> (B, K); of equal entries the first."""
    values, indices = rank.topk(min(count + 1, rank.shape[1]), largest=False)  # (B, K + 1); (B, K) if K = G
    indices, edge = indices[:, :count], values[:, count - 1 : count]  # (B, K), (B, 1)
    tied = (values[:, count:] == edge).any(1)  # (B,); topk took any of the entries that equal the edge
    if tied.any():
        nearer, level = rank[tied] < edge[tied], rank[tied] == edge[tied]  # (rows that tie, G)
        chosen = nearer | (level & (level.cumsum(1) <= count - nearer.sum(1, keepdim=True)))
        indices[tied] = chosen.nonzero()[:, 1].view(-1, count)
    return indices.sort(dim=1).values
