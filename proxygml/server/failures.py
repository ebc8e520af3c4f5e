"""Which images are found badly, and which classes are taken for each other.

Axes: M images, C classes, B images of one block, K neighbors; R is as many others as the class of an image has.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from proxygml.server.space import Space

DEPTH = 100  # K: neighbors of each image that are looked at
BLOCK = 2048  # images at a time; faiss takes several times longer for fewer
MOST_PAIRS = 200  # of classes that are told


class Confusion(NamedTuple):
    """Two classes that are taken for each other."""

    first: int
    second: int
    # Images of the one among the R nearest of images of the other; it hides the method `count` of tuples.
    count: int  # type: ignore[assignment]
    share: float  # of all that could be: the R nearest of every image of both


class Failures(NamedTuple):
    """How each image is found by its own class."""

    nearest: np.ndarray  # (M, K)
    first_right: np.ndarray  # (M,): rank of the first of the same class; K + 1: none among K; 0: the class has no other
    wrong_share: np.ndarray  # (M,): of other classes among the R nearest (at most K); 0 where R is
    confusions: list[Confusion]  # the worst first

    @property
    def recall_at_1(self) -> float:
        """The share of images whose nearest is of their class; one without another of its class is a miss."""
        return float((self.first_right == 1).mean())

    def worst(self, by: str) -> np.ndarray:
        """All images (M,), the worst found first: `by` rank of the first right one, or share of wrong ones."""
        rank, share = self.first_right, self.wrong_share
        return np.lexsort((-share, -rank) if by == "rank" else (-rank, -share))


def find_failures(space: Space, report: Callable[[int, int], None]) -> Failures:
    """Every image searched among all others; `report` is told (done, M) after every block and may raise to end it."""
    depth = min(DEPTH, len(space) - 1)
    others = space.class_sizes[space.classes] - 1  # (M,): R
    nearest = np.empty((len(space), depth), np.int32)
    first_right, wrong_share = np.zeros(len(space), np.int32), np.zeros(len(space), np.float32)
    keys, counts = [], []
    for start in range(0, len(space), BLOCK):
        images = np.arange(start, min(start + BLOCK, len(space)))
        nearest[images] = space.nearest_others(images, depth)[0]
        found, own = space.classes[nearest[images]], space.classes[images][:, None]  # (B, K), (B, 1)
        right = found == own
        first = np.where(right.any(axis=1), right.argmax(axis=1) + 1, depth + 1) if depth else 0  # (B,)
        first_right[images] = np.where(others[images] > 0, first, 0)
        wrong = ~right & (np.arange(depth) < others[images][:, None])  # (B, K): among the R nearest
        wrong_share[images] = wrong.sum(axis=1) / np.maximum(np.minimum(others[images], depth), 1)
        row, column = wrong.nonzero()
        pair = np.stack([found[row, column], own[row, 0]])
        key, count = np.unique(pair.min(axis=0) * len(space.class_sizes) + pair.max(axis=0), return_counts=True)
        keys.append(key)
        counts.append(count)
        report(int(images[-1]) + 1, len(space))
    slots = np.bincount(space.classes, weights=np.minimum(others, depth))  # (C,)
    confusions = _worst_pairs(np.concatenate(keys), np.concatenate(counts), slots)
    return Failures(nearest, first_right, wrong_share, confusions)


def _worst_pairs(keys: np.ndarray, counts: np.ndarray, slots: np.ndarray) -> list[Confusion]:
    """Pairs by the share of their slots (C,) that the other takes; a key is first * C + second, and may repeat."""
    pairs, place = np.unique(keys, return_inverse=True)
    totals = np.bincount(place, weights=counts, minlength=len(pairs)).astype(int)
    first, second = np.divmod(pairs, len(slots))
    shares = totals / np.maximum(slots[first] + slots[second], 1)
    order = np.lexsort((-totals, -shares))[:MOST_PAIRS]
    return [Confusion(int(first[i]), int(second[i]), int(totals[i]), float(shares[i])) for i in order]


def mistaken(space: Space, failures: Failures, first: int, second: int) -> list[tuple[int, int, int]]:
    """Where two classes are taken for each other: image, the wrong one among its R nearest, its rank; nearest first."""
    found = []
    for own, other in ((first, second), (second, first)):
        images = np.flatnonzero(space.classes == own)
        depth = min(len(images) - 1, failures.nearest.shape[1])
        row, column = (space.classes[failures.nearest[images, :depth]] == other).nonzero()
        found += [
            (int(images[r]), int(failures.nearest[images[r], c]), int(c) + 1) for r, c in zip(row, column, strict=True)
        ]
    return sorted(found, key=lambda entry: (entry[2], entry[0]))
