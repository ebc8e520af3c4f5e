"""Finds wrong labels, near-duplicates, outliers, and classes that are confused or split in two.

Axes: M images, D embedding, C classes, K neighbors.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from proxygml.embeddings import Embeddings, check_nonzero
from proxygml.evaluation.validation import as_matrix
from proxygml.retrieval.hits import cosines
from proxygml.tasks.calibrate import voters
from proxygml.tasks.classify import vote

Kind = Literal["label", "duplicate", "outlier"]
SHARE = 0.2  # what the share in the votes of neighbors weighs beside the similarity to the mean of a class
CUT = 3.5  # robust standard deviations from the median beyond which a similarity is unusual
MOST_WRONG = 0.5  # fraction of labels: above, they do not fit the vectors at all
CONFUSED = 0.2  # fraction of the neighbors of two classes that are of the other one
SPLIT = 0.5  # silhouette of two halves (Kaufman and Rousseeuw: reasonable)
MIN_SIZE = 10  # images of a class that may be confused or split: in a smaller one, ten neighbors are never all its own
BLOCK = 1024  # images at a time


class Finding(NamedTuple):
    """Something about one image: its label is doubtful, it is a copy of another one, or it is unlike all others."""

    kind: Kind
    row: int
    other: int  # the row of the duplicate, of the nearest image of the suggested class, or of the nearest image
    suggestion: str  # the class that fits better, for a doubtful label
    score: float  # the lower, the more doubtful; of a duplicate the similarity


@dataclass
class Audit:
    """Findings, the most certain of each kind first, and pairs of classes or single classes with a number."""

    findings: list[Finding] = field(default_factory=list)
    confused: list[tuple[str, str, float]] = field(default_factory=list)  # and the fraction of their neighbors
    split: list[tuple[str, float]] = field(default_factory=list)  # and the silhouette
    small: int = 0  # classes with too few images to be confused or split
    duplicate_similarity: float = 1.0  # from which on images are duplicates

    def count(self, kind: Kind) -> int:
        return sum(finding.kind == kind for finding in self.findings)


def audit(items: Embeddings) -> Audit:
    """The findings about embeddings; without labels of two classes, only duplicates and outliers."""
    if len(items) < 3:
        raise ValueError(f"expected 3 or more images to audit, got {len(items)}")
    as_matrix(items.vectors, "vectors")  # an error if they are not finite
    check_nonzero(items)
    rows = np.arange(len(items))
    numbers, similarities = voters(items.vectors, rows, rows, (rows, rows))  # (M, K) each
    found = Audit()
    labeled, doubtful = np.flatnonzero(items.labels >= 0), set()
    if len(np.unique(items.labels[labeled])) > 1:
        vectors, labels = items.vectors[labeled], np.unique(items.labels[labeled], return_inverse=True)[1]
        names = [items.class_name(label) for label in np.unique(items.labels[labeled]).tolist()]
        margins, suggestions, wrong = doubtful_labels(vectors, labels)
        if wrong > MOST_WRONG * len(labels):
            raise ValueError(
                f"about {100 * wrong / len(labels):.0f} % of the labels contradict the vectors: "
                "are they those of other images, or is the network not made for them?"
            )
        for place in np.argsort(margins, kind="stable")[:wrong].tolist():
            row = int(labeled[place])
            doubtful.add(row)
            suggested = labeled[labels == suggestions[place]]
            other = int(suggested[cosines(items.vectors[row], items.vectors[suggested]).argmax()])
            found.findings.append(Finding("label", row, other, names[suggestions[place]], float(margins[place])))
        found.small = int((np.bincount(labels) < MIN_SIZE).sum())
        found.confused, found.split = confused_classes(items, numbers), split_classes(vectors, labels, names)
    found.duplicate_similarity = duplicate_similarity(similarities)
    pairs: dict[tuple[int, int], float] = {}
    for row, place in np.argwhere(similarities >= found.duplicate_similarity).tolist():
        other = int(numbers[row, place])
        pairs[min(row, other), max(row, other)] = float(similarities[row, place])
    for pair, similarity in sorted(pairs.items(), key=lambda pair: -pair[1]):
        other, row = sorted(pair, key=lambda each: (each in doubtful, each))  # the row is left out if accepted
        found.findings.append(Finding("duplicate", row, other, "", similarity))
    density = similarities.mean(axis=1)  # (M,)
    center, spread = _median_and_spread(density)
    for row in np.argsort(density, kind="stable")[: np.sum(density < center - CUT * spread)].tolist():
        found.findings.append(Finding("outlier", row, int(numbers[row, 0]), "", float(density[row])))
    return found


def doubtful_labels(vectors: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Margins (M,), the lower the more doubtful, the class that fits best (M,), and how many labels look wrong.

    An image fits a class by the cosine to the mean of its other images, after centering, and by its share in the votes
    of the neighbors. A wrong label, drawn at random, is as likely among the worse half of the classes as among the
    others, where a right one hardly ever is: so their number follows from those in the worse half.
    """
    numbers = np.arange(len(labels))
    nearest, similarities = voters(vectors, labels, numbers, (numbers, numbers))  # (M, K) each
    shares = vote(nearest, similarities)  # (M, K)
    centered = _unit(vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64))  # (M, D)
    sizes = np.bincount(labels)  # (C,)
    sums = np.zeros((len(sizes), vectors.shape[1]))  # (C, D)
    np.add.at(sums, labels, centered)
    means = _unit(sums)
    margins, best = np.empty(len(labels)), np.empty(len(labels), np.int64)  # (M,) each
    worse, judged = 0, sizes[labels] > 1  # (M,): a lone image of its class has nothing to agree with
    for start in range(0, len(labels), BLOCK):
        rows = numbers[start : start + BLOCK]  # (B,)
        own, lines = labels[rows], np.arange(len(rows))
        fit = centered[rows] @ means.T  # (B, C)
        fit[lines, own] = (_unit(sums[own] - centered[rows]) * centered[rows]).sum(axis=1)
        ranks = (fit > fit[lines, own][:, None]).sum(axis=1)  # (B,): 0 is the best
        worse += int((judged[rows] & (ranks >= (len(sizes) + 1) // 2)).sum())
        fit[lines[:, None], nearest[rows]] += SHARE * shares[rows]  # the same for all neighbors of a class
        own_fit = fit[lines, own]
        fit[lines, own] = -np.inf
        best[rows] = fit.argmax(axis=1)
        margins[rows] = np.where(judged[rows], own_fit - fit.max(axis=1), np.inf)
    half = (len(sizes) - (len(sizes) + 1) // 2) / (len(sizes) - 1)  # of the wrong classes
    wrong = min(round(worse / half), int((margins < 0).sum()))
    return margins, best, wrong


def duplicate_similarity(similarities: np.ndarray) -> float:
    """From which similarity on images are duplicates, by those of all images to their ten nearest (M, K).

    Distances of different images to their nearest vary around their median by a factor; those of copies are far
    smaller. So that many copies do not hide each other, copies by a first estimate do not count as the nearest.
    """
    cut = _unusually_similar(similarities[:, similarities.shape[1] // 2])
    for _ in range(2):  # without copies, the second time changes little; with many, more would let them in
        nearest = np.where(similarities < cut, similarities, -np.inf).max(axis=1)  # (M,)
        if np.isinf(nearest).all():
            break
        cut = _unusually_similar(nearest[np.isfinite(nearest)])
    return cut


def _unusually_similar(nearest: np.ndarray) -> float:
    logarithms = np.log(np.maximum(1 - nearest, 1e-6))  # (M,)
    center, spread = _median_and_spread(logarithms)
    return float(1 - np.exp(center - CUT * max(spread, 0.1)))


def confused_classes(items: Embeddings, neighbors: np.ndarray) -> list[tuple[str, str, float]]:
    """Pairs of classes, and the fraction of the neighbors (M, K) of the images of both that are of the other one."""
    labels, own = np.unique(items.labels, return_inverse=True)  # (C,), (M,)
    pairs, counts = np.unique(
        np.stack([np.repeat(own, neighbors.shape[1]), own[neighbors].ravel()]), axis=1, return_counts=True
    )
    seen: dict[tuple[int, int], int] = {}
    for first, second, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
        if first != second and min(labels[first], labels[second]) >= 0:
            pair = min(first, second), max(first, second)
            seen[pair] = seen.get(pair, 0) + count
    sizes = np.bincount(own)  # (C,)
    fractions = {
        pair: count / float(sizes[list(pair)].sum() * neighbors.shape[1])
        for pair, count in seen.items()
        if sizes[list(pair)].min() >= MIN_SIZE
    }
    ranked = sorted((pair for pair in fractions if fractions[pair] >= CONFUSED), key=lambda pair: -fractions[pair])
    return [(*(items.class_name(labels[each]) for each in pair), fractions[pair]) for pair in ranked]  # type: ignore[misc]  # two


def split_classes(vectors: np.ndarray, labels: np.ndarray, names: list[str]) -> list[tuple[str, float]]:
    """Classes whose images lie in two groups, each of a quarter or more, and the silhouette of these."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    found = []
    for label, name in enumerate(names):
        own = vectors[labels == label]
        if len(own) < MIN_SIZE or not np.ptp(own, axis=0).any():
            continue
        halves = KMeans(2, n_init=3, random_state=0).fit_predict(own)
        if np.bincount(halves, minlength=2).min() >= len(own) / 4:
            silhouette = float(silhouette_score(own, halves))
            if silhouette > SPLIT:
                found.append((name, silhouette))
    return sorted(found, key=lambda each: -each[1])


def _median_and_spread(values: np.ndarray) -> tuple[float, float]:
    """The median, and the standard deviation by the median deviation, which outliers do not change."""
    center = float(np.median(values))
    return center, 1.4826 * float(np.median(np.abs(values - center)))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
