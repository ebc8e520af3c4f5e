"""Recall@n, R-precision, MAP@R and NMI of an embedding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxygml.distributed.collectives import sum_over_processes
from proxygml.evaluation.clustering import nmi
from proxygml.evaluation.ranks import ranks_of_positives
from proxygml.evaluation.validation import as_labels, as_matrix, check_seed


@dataclass(frozen=True)
class Scores:
    """Scores between 0 and 1, and the number of images and classes behind them."""

    recall: dict[int, float]  # n -> fraction of images with a hit among their n nearest
    r_precision: float
    map_at_r: float
    nmi: float | None  # None without clustering
    images: int
    classes: int
    lone_queries: int  # images without another of their class to find; each counts as a miss
    nmi_start: str | None  # how k-means was initialized: NMI depends on it
    hits: np.ndarray | None = field(default=None, compare=False, repr=False)  # (images,): with a hit at the first n

    def to_json(self) -> dict[str, float | int | str | None]:
        """The scores under flat keys ("recall@1", ..., "nmi", ...), ready for `json.dumps`."""
        rest = asdict(self)
        del rest["hits"]
        return {f"recall@{n}": value for n, value in rest.pop("recall").items()} | rest

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> "Scores":
        """The scores that `to_json` wrote."""
        recall = {int(key.removeprefix("recall@")): entries[key] for key in entries if key.startswith("recall@")}
        rest = {key: entries[key] for key in entries if not key.startswith("recall@")}
        expected = {each.name for each in fields(cls)} - {"recall", "hits"}
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
    """Scores of vectors (M, D) with integer labels (M,), ranked by Euclidean distance (cosine for unit vectors).

    Each image is searched among all others, or in gallery (G, D) with gallery_labels (G,) if given. NMI (`cluster`)
    covers the M images either way. Items at equal distance are ranked in a random order, drawn from `seed`: in the
    order of the rows, equal vectors could score anything. Recall@n with n above the number of items is the recall of
    all items. `progress` is called with (images done, M) after every block, then with (iterations done, all iterations)
    of k-means. With several processes, all call this with the same vectors; `process` = (rank, world size) compares its
    part, and all return the scores. k-means is not distributed; each process may ask for it or not.
    """
    vectors = as_matrix(vectors, "vectors", min_rows=1 if gallery is not None else 2)  # (M, D)
    labels = as_labels(labels, len(vectors), "labels")  # (M,)
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("expected gallery and gallery_labels together, got only one: pass both or neither")
    items, item_labels = vectors, labels  # (G, D), (G,)
    if gallery is not None and gallery_labels is not None:
        items = as_matrix(gallery, "gallery", width=vectors.shape[1])
        item_labels = as_labels(gallery_labels, len(items), "gallery_labels")
    if any(n < 1 or n != int(n) for n in recall_at):
        raise ValueError(f"expected integers from 1 in recall_at, got {recall_at}")
    check_seed(seed)

    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))  # (G,)
    items, item_labels = items[order], item_labels[order]
    queries, query_labels = (items, item_labels) if gallery is None else (vectors, labels)  # (M, D), (M,)
    classes = torch.cat([query_labels, item_labels]).unique(return_inverse=True)[1]  # (M + G,): labels as 0..C-1
    query_classes, item_classes = classes[: len(queries)], classes[len(queries) :]
    positives = item_classes.bincount(minlength=len(classes))[query_classes] - int(gallery is None)  # (M,): R
    depth, report = int(max(recall_at, default=1)), progress or (lambda done, total: None)
    per_image = torch.zeros(len(recall_at) + 2, len(vectors), dtype=torch.float64)  # (metrics, M)
    sides = queries, query_classes, items, item_classes
    blocks = ranks_of_positives(*sides, positives, depth=depth, block=block, process=process, progress=report)
    for rows, ranks in blocks:
        per_image[:, rows] = _metrics(ranks, positives[rows], recall_at)
    if process[1] > 1:
        per_image = sum_over_processes(per_image)
    *recalls, r_precision, map_at_r = per_image.mean(1).tolist()  # (metrics, M) -> (metrics,)
    hits = per_image[0].bool()  # (M,)
    if gallery is None:
        hits = torch.empty_like(hits).scatter(0, order, hits)  # in the caller's order
    nmi_value, nmi_start = nmi(vectors, labels, seed=seed, progress=report) if cluster else (None, None)
    return Scores(
        recall={int(n): value for n, value in zip(recall_at, recalls, strict=True)},
        r_precision=r_precision,
        map_at_r=map_at_r,
        nmi=nmi_value,
        images=len(vectors),
        classes=len(labels.unique()),
        lone_queries=int((positives == 0).sum()),
        nmi_start=nmi_start,
        hits=hits.numpy() if recall_at else None,
    )


def _metrics(ranks: Tensor, positives: Tensor, recall_at: Sequence[int]) -> Tensor:
    """Every recall@n, R-precision and MAP@R of each image: ranks (P,), positives (B,) -> (metrics, B); 0 where R is 0.

    R-precision is the fraction of positives among the R nearest. MAP@R ("A Metric Learning Reality Check", Musgrave et
    al. 2020) sums the precision at each of them and divides by R: unlike R-precision it depends on their order.
    """
    image = torch.arange(len(positives)).repeat_interleave(positives)  # (P,)
    first = positives.cumsum(0) - positives  # (B,)
    precision = (torch.arange(1, len(ranks) + 1) - first[image]) / ranks.double()  # (P,)
    counted = ranks <= positives[image]  # (P,)
    nearest = torch.full(positives.shape, torch.inf, dtype=torch.float64)  # (B,)
    nearest[positives > 0] = ranks[first[positives > 0]].double()
    sums = torch.zeros(2, len(positives), dtype=torch.float64)  # (2, B)
    sums.index_add_(1, image, torch.stack([counted, counted * precision]).double())
    return torch.stack([*(nearest <= n for n in recall_at), *(sums / positives.clamp_min(1))])
