"""The exact ranks of every query's positives: counted where positives are few, otherwise from a full search.

Axes: M queries, G gallery items, D embedding, B queries or items of one block, K neighbors, R positives of one query,
P positives of all queries: query by query, nearest first.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from proxygml.evaluation.counting import count_ranks
from proxygml.evaluation.search import central_vector, nearest_in_blocks
from proxygml.precision import full_float32

MAX_COUNTED = 2**23  # P; each takes about 60 bytes
MAX_COMPARED = 2**16  # R times D; above, float32 bounds leave too many comparisons open
MAX_DUPLICATES = 64  # copies of an item leave them open too


def ranks_of_positives(
    vectors: Tensor,
    classes: Tensor,
    gallery: Tensor,
    gallery_classes: Tensor,
    positives: Tensor,
    *,
    depth: int,
    block: int | None,
    process: tuple[int, int],
    progress: Callable[[int, int], None],
) -> Iterator[tuple[slice, Tensor]]:
    """Yields slices of the queries (M,) with the ranks (P,) of their positives; each process gets other queries.

    vectors (M, D) and gallery (G, D) have classes 0..C-1; if both are the same tensor, no query finds itself.
    `positives` (M,) counts the positives of each query. A rank above R, or for the nearest positive above both R and
    `depth`, is only known to be above.
    """
    origin = central_vector(gallery)  # (D,)
    if _countable(vectors, gallery, positives, origin):
        sides = (vectors, classes), (gallery, gallery_classes)
        with full_float32():
            ranks = count_ranks(*sides, positives, origin, depth, block, process, progress)
        rank, world_size = process
        own = slice(len(vectors) * rank // world_size, len(vectors) * (rank + 1) // world_size)
        yield own, ranks[positives[: own.start].sum() : positives[: own.stop].sum()]
        return
    count = min(max(depth, int(positives.max())), len(gallery) - (vectors is gallery))  # K
    for queries, indices, _ in nearest_in_blocks(vectors, gallery, count, block, process):
        hits = gallery_classes[indices] == classes[queries, None]  # (B, K)
        end = positives[queries].cumsum(0)  # (B,)
        image, column = hits.nonzero(as_tuple=True)
        ranks = torch.full((int(end[-1]),), count + 1)  # (P,)
        ranks[(end - positives[queries])[image] + hits.cumsum(1)[image, column] - 1] = column + 1
        yield queries, ranks
        progress(queries.stop, len(vectors))


def _countable(vectors: Tensor, gallery: Tensor, positives: Tensor, origin: Tensor) -> bool:
    """Whether float32 products decide most comparisons and the counts fit in memory."""
    few = positives.max() * vectors.shape[1] <= MAX_COMPARED and positives.sum() <= MAX_COUNTED
    query_norms, norms = (torch.linalg.vector_norm(side - origin, dim=1) for side in (vectors, gallery))  # (M,), (G,)
    in_range = 1e-10 < max(query_norms.max(), norms.max()) < 1e10  # squares fit in float32
    duplicates = norms.unique(return_counts=True)[1].square().sum() / len(norms)  # equal norms: copies of an item
    return bool(few and in_range and duplicates <= MAX_DUPLICATES)
