"""The ranks of every image's positives, exactly: counted where positives are few, else found by search.

Axes: M images that ask, G items, D embedding, B images or items of one block, K neighbours, R positives of one image,
P positives of all images: image after image, and of each image the nearest first.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from proxygml.evaluation.counting import count_ranks
from proxygml.evaluation.search import nearest_in_blocks
from proxygml.evaluation.vectors import middle

MOST_TO_COUNT = 2**23  # P; each takes about 60 bytes
MOST_IN_DOUBT = 2**16  # R times D: with more positives, or longer sums, float32 leaves too many comparisons in doubt
MOST_ALIKE = 64  # and so it does with more copies of an item


def ranks_of_positives(
    vectors: Tensor,
    classes: Tensor,
    searched: Tensor,
    searched_classes: Tensor,
    positives: Tensor,
    *,
    depth: int,
    block: int | None,
    process: tuple[int, int],
    progress: Callable[[int, int], None],
) -> Iterator[tuple[slice, Tensor]]:
    """Part by part: some images, by their place in (M,), and the ranks (P,) of their positives.

    Vectors (M, D) and searched (G, D) have classes from 0 on; where they are the same tensor, no image finds itself.
    `positives` (M,) are as many as each image has. Of a rank above R, or of the nearest positive's above both R and
    `depth`, is only known that it is. Of several processes each is given other images.
    """
    origin = middle(searched)  # (D,)
    if _countable(vectors, searched, positives, origin):
        sides = (vectors, classes), (searched, searched_classes)
        ranks = count_ranks(*sides, positives, origin, depth, block, process, progress)
        rank, processes = process
        mine = slice(len(vectors) * rank // processes, len(vectors) * (rank + 1) // processes)
        yield mine, ranks[positives[: mine.start].sum() : positives[: mine.stop].sum()]
        return
    found = min(max(depth, int(positives.max())), len(searched) - (vectors is searched))  # K
    for asking, indices, _ in nearest_in_blocks(vectors, searched, found, block, process):
        hits = searched_classes[indices] == classes[asking, None]  # (B, K)
        end = positives[asking].cumsum(0)  # (B,)
        image, column = hits.nonzero(as_tuple=True)
        ranks = torch.full((int(end[-1]),), found + 1)  # (P,)
        ranks[(end - positives[asking])[image] + hits.cumsum(1)[image, column] - 1] = column + 1
        yield asking, ranks
        progress(asking.stop, len(vectors))


def _countable(vectors: Tensor, searched: Tensor, positives: Tensor, origin: Tensor) -> bool:
    """Whether float32 products tell enough, and what is to be counted fits in memory."""
    try:
        rough = torch.get_float32_matmul_precision() != "highest"  # products may then be rounded to bfloat16
    except RuntimeError:  # torch says so where its newer switches were used
        rough = True
    few = positives.max() * vectors.shape[1] <= MOST_IN_DOUBT and positives.sum() <= MOST_TO_COUNT
    asking, found = (torch.linalg.vector_norm(side - origin, dim=1) for side in (vectors, searched))  # (M,), (G,)
    fit = 1e-10 < max(asking.max(), found.max()) < 1e10  # squares that float32 holds
    alike = found.unique(return_counts=True)[1].square().sum() / len(found)  # items as long as an item: its copies
    return bool(few and fit and alike <= MOST_ALIKE and not rough)
