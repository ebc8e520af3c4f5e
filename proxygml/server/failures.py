"""Images with neighbors of other classes, and the pairs of classes that are confused.

Axes: M images, C classes, B images of a block, K neighbors; R is the number of other images in an image's class.
"""

from typing import NamedTuple

import numpy as np

from proxygml.server.jobs import Report
from proxygml.server.space import Space

DEPTH = 100  # K
BLOCK = 2048  # images at a time; with fewer, faiss takes several times longer
MAX_PAIRS = 200  # of classes


class Confusion(NamedTuple):
    """Two confused classes."""

    first: int
    second: int
    # Images of one class among the R nearest of the other's. It hides the method `count` of tuples.
    count: int  # type: ignore[assignment]
    neighbors: int  # R nearest of all images of both classes
    fraction: float


class Failures(NamedTuple):
    """How well each image retrieves its own class."""

    nearest: np.ndarray  # (M, K)
    first_right: np.ndarray  # (M,): rank of the first of the same class; K + 1: none among K; 0: it has no other image
    wrong_fraction: np.ndarray  # (M,): of the R nearest (at most K), how many are of other classes; 0 if R is 0
    confusions: list[Confusion]  # highest fraction first

    @property
    def recall_at_1(self) -> float:
        """Recall@1; an image without another of its class is a miss."""
        return float((self.first_right == 1).mean())

    def worst_first(self, order: str) -> np.ndarray:
        """All images (M,) by `first_right` (order "rank") or by `wrong_fraction` ("fraction"), descending."""
        rank, fraction = -self.first_right, -self.wrong_fraction
        return np.lexsort((fraction, rank) if order == "rank" else (rank, fraction))


def find_failures(space: Space, report: Report) -> Failures:
    """Search each image among all others; calls report(done, M) after every block."""
    depth = min(DEPTH, len(space) - 1)
    others = space.class_sizes[space.classes] - 1  # (M,): R
    nearest = np.empty((len(space), depth), np.int32)
    first_right, wrong_fraction = np.zeros(len(space), np.int32), np.zeros(len(space), np.float32)
    num_classes = len(space.class_sizes)
    counts: dict[int, int] = {}  # by first * C + second
    for start in range(0, len(space), BLOCK):
        images = np.arange(start, min(start + BLOCK, len(space)))
        nearest[images] = space.nearest_others(images, depth)[0]
        classes, own = space.classes[nearest[images]], space.classes[images][:, None]  # (B, K), (B, 1)
        right = classes == own
        first = np.where(right.any(axis=1), right.argmax(axis=1) + 1, depth + 1) if depth else 0  # (B,)
        first_right[images] = np.where(others[images] > 0, first, 0)
        wrong = ~right & (np.arange(depth) < others[images][:, None])  # (B, K): among the R nearest
        wrong_fraction[images] = wrong.sum(axis=1) / np.maximum(np.minimum(others[images], depth), 1)
        keys = np.minimum(classes, own) * num_classes + np.maximum(classes, own)  # (B, K)
        for key, count in zip(*(values.tolist() for values in np.unique(keys[wrong], return_counts=True)), strict=True):
            counts[key] = counts.get(key, 0) + count
        report(int(images[-1]) + 1, len(space))
    sums = np.bincount(space.classes, weights=np.minimum(others, depth)).astype(int).tolist()  # (C,)
    confusions = []
    for key, count in sorted(counts.items()):
        first, second = divmod(key, num_classes)
        neighbors = sums[first] + sums[second]
        confusions.append(Confusion(first, second, count, neighbors, count / neighbors))
    confusions.sort(key=lambda pair: (-pair.fraction, -pair.count))
    return Failures(nearest, first_right, wrong_fraction, confusions[:MAX_PAIRS])


def list_confused(space: Space, failures: Failures, first: int, second: int) -> list[tuple[int, int, int]]:
    """(image, neighbor, rank) for each neighbor of the other of two classes among the R nearest, by rank."""
    confused = []
    for own, other in ((first, second), (second, first)):
        images = np.flatnonzero(space.classes == own)
        nearest = failures.nearest[images, : len(images) - 1]  # (images, up to R)
        for row, column in np.argwhere(space.classes[nearest] == other).tolist():
            confused.append((int(images[row]), int(nearest[row, column]), column + 1))
    return sorted(confused, key=lambda entry: (entry[2], entry[0]))
