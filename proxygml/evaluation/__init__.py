"""How well an embedding finds and groups classes: recall@n, R-precision, MAP@R and NMI; and its neighbours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxygml.evaluation.clustering import nmi
from proxygml.evaluation.ranks import ranks_of_positives
from proxygml.evaluation.search import neighbours
from proxygml.evaluation.vectors import integers, matrix
from proxygml.gathering import sum_over_processes

__all__ = ["Scores", "evaluate", "neighbours", "nmi"]


@dataclass(frozen=True)
class Scores:
    """Shares between 0 and 1, and what they were taken over."""

    recall: dict[int, float]  # n -> share of the images with a hit among their n nearest
    r_precision: float
    map_at_r: float
    nmi: float | None  # None: clustering was not asked for
    images: int
    classes: int
    lone_queries: int  # images whose class nothing else has among what is searched: misses in every share
    nmi_start: str | None  # how k-means was started: NMI depends on it

    def to_json(self) -> dict[str, float | int | str | None]:
        """The scores under flat keys ("recall@1", ..., "nmi", ...), ready for `json.dumps`."""
        rest = asdict(self)
        return {f"recall@{n}": share for n, share in rest.pop("recall").items()} | rest

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> "Scores":
        """The scores that `to_json` wrote."""
        recall = {int(key.removeprefix("recall@")): entries[key] for key in entries if key.startswith("recall@")}
        rest = {key: entries[key] for key in entries if not key.startswith("recall@")}
        expected = {field.name for field in fields(cls)} - {"recall"}
        if wrong := sorted(expected ^ rest.keys()):
            raise ValueError(f"expected recall@n and {sorted(expected)}, but {wrong} differ: pass what to_json wrote")
        return cls(recall=recall, **rest)


def evaluate(
    vectors: np.ndarray | Tensor,
    labels: np.ndarray | Tensor,
    *,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    gallery: np.ndarray | Tensor | None = None,
    gallery_labels: np.ndarray | Tensor | None = None,
    cluster: bool = True,
    seed: int = 0,
    block: int | None = None,
    process: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores of vectors (M, D) with integer labels (M,), ranked by Euclidean distance (for unit vectors: by cosine).

    Every image is searched among all others, or in gallery (G, D) with gallery_labels (G,) where that is given; NMI
    is taken over the M images either way. A recall@n with n above the number of items is the recall of all items.
    `progress` is told (images done, M) after every block, and then (iterations done, all) of k-means. Of several
    processes, all of which call it with the same vectors, `process` (rank, how many) compares its part, and all have
    the scores; k-means is not spread, and each may ask for it or not.
    """
    vectors = matrix(vectors, "vectors", least=1 if gallery is not None else 2)  # (M, D)
    gallery = None if gallery is None else matrix(gallery, "gallery", width=vectors.shape[1])  # (G, D)
    labels = integers(labels, len(vectors), "labels")  # (M,)
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("expected gallery and gallery_labels together, but only one came: pass both or neither")
    searched_labels = labels  # (G,)
    if gallery is not None and gallery_labels is not None:
        searched_labels = integers(gallery_labels, len(gallery), "gallery_labels")
    if any(n < 1 or n != int(n) for n in recall_at):
        raise ValueError(f"expected whole numbers from 1 in recall_at, but {recall_at} came: each counts neighbours")

    searched = vectors if gallery is None else gallery  # (G, D)
    numbers = torch.cat([labels, searched_labels]).unique(return_inverse=True)[1]  # (M + G,); the labels as 0..C-1
    sides = vectors, numbers[: len(vectors)], searched, numbers[len(vectors) :]
    positives = sides[3].bincount(minlength=len(numbers))[sides[1]] - int(gallery is None)  # (M,); R of each image
    depth, report = int(max(recall_at, default=1)), progress or (lambda done, total: None)
    of_image = torch.zeros(len(recall_at) + 2, len(vectors), dtype=torch.float64)  # (metrics, M)
    known = ranks_of_positives(*sides, positives, depth=depth, block=block, process=process, progress=report)
    for asking, ranks in known:
        of_image[:, asking] = _metrics(ranks, positives[asking], recall_at)
    if process[1] > 1:
        of_image = sum_over_processes(of_image)
    *recalls, precision, average_precision = of_image.mean(1).tolist()  # (metrics, M) -> (metrics,)
    agreement, start = nmi(vectors, labels, seed=seed, progress=report) if cluster else (None, None)
    return Scores(
        recall={int(n): share for n, share in zip(recall_at, recalls, strict=True)},
        r_precision=precision,
        map_at_r=average_precision,
        nmi=agreement,
        images=len(vectors),
        classes=len(labels.unique()),
        lone_queries=int((positives == 0).sum()),
        nmi_start=start,
    )


def _metrics(ranks: Tensor, positives: Tensor, recall_counts: Sequence[int]) -> Tensor:
    """Every recall@n, R-precision and MAP@R of each image: ranks (P,), positives (B,) -> (metrics, B); 0 where R is 0.

    R-precision is the share of positives among the R nearest; MAP@R, as in "A Metric Learning Reality Check" (Musgrave
    et al. 2020), the precision at each of them, summed, over R: unlike R-precision it sees their order.
    """
    image = torch.arange(len(positives)).repeat_interleave(positives)  # (P,)
    first = positives.cumsum(0) - positives  # (B,)
    precision = (torch.arange(1, len(ranks) + 1) - first[image]) / ranks.double()  # (P,)
    counted = ranks <= positives[image]  # (P,)
    nearest = torch.full(positives.shape, torch.inf, dtype=torch.float64)  # (B,)
    nearest[positives > 0] = ranks[first[positives > 0]].double()
    shares = torch.zeros(2, len(positives), dtype=torch.float64)  # (2, B)
    shares.index_add_(1, image, torch.stack([counted, counted * precision]).double())
    return torch.stack([*(nearest <= n for n in recall_counts), *(shares / positives.clamp_min(1))])
