"""How well an index tells known from unknown classes, the threshold between them, and calibrated probabilities.

Every image is searched for twice: among all others, as an image of a known class, and only among those of other
classes, as if its own were missing, as an unknown one. Axes: M images that are searched for, G all images, K neighbors.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from proxygml.display import counted
from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbors
from proxygml.evaluation.intervals import auroc, auroc_interval, fraction_interval
from proxygml.tasks.classify import VOTERS, Calibration, probabilities, scores, vote

MIN_IMAGES, MIN_CLASSES = 10, 2  # labeled images, and classes of two or more
MAX_QUERIES = 20_000  # images that are searched for, at random
AGREEMENTS = (0.0, 0.05, 0.1, 0.2)  # weights in the score, of which the best by AUROC is taken
BINS = 15  # of probabilities, for the calibration error
Interval = tuple[float, float]


@dataclass(frozen=True)
class Separation:
    """What `calibrate` measured, with 95 % intervals over the classes."""

    calibration: Calibration
    auroc: float
    auroc_interval: Interval
    auroc_of_similarity: float  # of the similarity to the nearest image, for comparison
    false_accepts_interval: Interval
    refused: float  # fraction of known images below the threshold
    refused_interval: Interval
    accuracy: float  # fraction of known images that get the right class, whatever the threshold
    error_before: float  # expected calibration error of the probabilities
    error_after: float
    known: np.ndarray  # (M,): scores of the images as known ones
    unknown: np.ndarray  # (M,)
    probability: np.ndarray  # (M,): of the answer, calibrated
    right: np.ndarray  # (M,): whether the answer is

    def to_json(self) -> dict[str, Any]:
        """All but the arrays, ready for `json.dumps`."""
        return {name: value for name, value in asdict(self).items() if not isinstance(value, np.ndarray)}

    def refused_at(self, false_accepts: float) -> float:
        """The fraction of known images that are refused if this fraction of unknown ones is accepted."""
        return float(np.mean(self.known < threshold_for(self.unknown, false_accepts)))


def calibrate(embeddings: Embeddings, *, false_accepts: float = 0.01, seed: int = 0) -> Separation:
    """Measure labeled embeddings: the threshold accepts at most a fraction `false_accepts` of unknown images."""
    if not 0 < false_accepts < 1:
        raise ValueError(f"expected a fraction of false accepts between 0 and 1, got {false_accepts}")
    labeled = embeddings.labels >= 0
    vectors, classes = embeddings.vectors[labeled], embeddings.labels[labeled]  # (G, D), (G,)
    check_enough(classes)
    sizes = np.bincount(classes)
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(sizes[classes] > 1)  # (M,): a lone image of its class is never known
    rows = np.sort(rng.permutation(rows)[:MAX_QUERIES])
    own = classes[rows]  # (M,)
    numbers = np.arange(len(classes))
    labels, similarities = voters(vectors, classes, rows, (rows, numbers))  # (M, K) each
    others, other_similarities = voters(vectors, classes, rows, (own, classes))
    shares, other_shares = vote(labels, similarities), vote(others, other_similarities)
    right = labels[np.arange(len(rows)), shares.argmax(axis=1)] == own  # (M,)
    tried = {
        each: (scores(similarities, shares, each), scores(other_similarities, other_shares, each))
        for each in AGREEMENTS
    }
    agreement = max(tried, key=lambda each: auroc(*tried[each]))
    known, unknown = tried[agreement]  # (M,) each
    threshold = threshold_for(unknown, false_accepts)

    distinct = distinct_shares(labels, shares)
    temperature = fit_temperature(distinct, right)
    before, after = (probabilities(distinct, each).max(axis=1) for each in (1.0, temperature))  # (M,) each
    accepted, refused = unknown >= threshold, known < threshold
    count = len(np.unique(own))
    return Separation(
        Calibration(
            threshold, agreement, temperature, float(accepted.mean()), embeddings.model, images=len(rows), classes=count
        ),
        auroc=auroc(known, unknown),
        auroc_interval=auroc_interval(known, unknown, own),
        auroc_of_similarity=auroc(*tried[0.0]),
        false_accepts_interval=fraction_interval(accepted, own),
        refused=float(refused.mean()),
        refused_interval=fraction_interval(refused, own),
        accuracy=float(right.mean()),
        error_before=calibration_error(before, right),
        error_after=calibration_error(after, right),
        known=known,
        unknown=unknown,
        probability=after,
        right=right,
    )


def check_enough(classes: np.ndarray) -> None:
    """An error if there are too few images (M,) or classes to measure."""
    several = int((np.bincount(classes) > 1).sum()) if len(classes) else 0
    if len(classes) < MIN_IMAGES or several < MIN_CLASSES:
        raise ValueError(
            f"expected {MIN_IMAGES} or more labeled images, and {MIN_CLASSES} or more classes with two or more images, "
            f"got {counted(len(classes), 'labeled image')} and {counted(several, 'class')} with two or more images: "
            "add some with `proxygml index add`"
        )


def voters(
    vectors: np.ndarray, classes: np.ndarray, rows: np.ndarray, groups: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Classes (M, K) and cosine similarities (M, K) of the nearest to some rows (M,) of vectors (G, D), by `groups`."""
    count = min(VOTERS, len(vectors) - 1)
    nearest, distances = neighbors(vectors[rows], vectors, count=count, groups=groups)  # (M, K) each
    lengths = np.maximum(np.linalg.norm(vectors.astype(np.float64), axis=1), 1e-300)  # (G,)
    ours, theirs = lengths[rows, None], lengths[nearest]
    similarities = (ours**2 + theirs**2 - distances**2) / (2 * ours * theirs)  # -inf where there is none
    return classes[nearest], np.minimum(similarities, 1)


def threshold_for(unknown: np.ndarray, false_accepts: float) -> float:
    """The lowest threshold that at most a fraction of these scores (M,) reach."""
    most = int(false_accepts * len(unknown))
    return float(np.nextafter(np.sort(unknown)[-most - 1], np.inf))


def distinct_shares(labels: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The shares (M, K), 0 for a class that an earlier neighbor has: labels (M, K)."""
    same_class = labels[:, :, None] == labels[:, None, :]  # (M, K, K)
    return np.where(np.tril(same_class, -1).any(axis=2), 0, shares)


def fit_temperature(shares: np.ndarray, right: np.ndarray) -> float:
    """The temperature by which the probability of the answer best predicts whether it is right: (M, K), (M,)."""
    from scipy.optimize import minimize_scalar

    def loss(logarithm: float) -> float:
        likely = probabilities(shares, np.exp(logarithm)).max(axis=1)  # (M,)
        return -float(np.mean(np.log(np.maximum(np.where(right, likely, 1 - likely), 1e-12))))

    return float(np.exp(minimize_scalar(loss, bounds=(np.log(0.1), np.log(10)), method="bounded").x))


def calibration_error(probability: np.ndarray, right: np.ndarray) -> float:
    """The expected calibration error (Guo et al. 2017) of probabilities (M,) of being right (M,)."""
    bins = np.minimum((probability * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, probability - right)).sum() / len(right))
