"""The class of a vector by a weighted vote of its nearest neighbors, with a probability, or "unknown".

Axes: M images, D embedding, K neighbors.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from proxygml.retrieval import Hit, Index

VOTERS = 10  # K: neighbors that vote
SOFTNESS = 0.05  # a neighbor's vote weighs exp(similarity / SOFTNESS)
AGREEMENT = 0.1  # what the logarithm of the winner's share weighs in the score, before `calibrate` has chosen it
CALIBRATION = "calibration"  # its name in an index's metadata


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` measured: from which score on a class is known, and how sure its probability may be."""

    threshold: float  # of the score: anything below is unknown
    agreement: float  # what the logarithm of the winner's share of the votes weighs in the score
    temperature: float  # of the probabilities; 1: as voted
    false_accepts: float  # the fraction of unknown images that the threshold accepts, as measured
    model: str  # id of the network of the vectors
    images: int  # that were measured, and their classes
    classes: int


class Candidate(NamedTuple):
    """A class, and the probability that it is the right one if that is among the classes of the index."""

    label: str
    probability: float


class Answer(NamedTuple):
    """The class that an image belongs to, if it is known."""

    label: str | None  # None: unknown
    score: float  # similarity of the nearest item, less if the classes of its neighbors disagree
    candidates: list[Candidate]  # the likeliest first; their probabilities leave some for classes not among them
    calibrated: bool  # otherwise nothing is unknown, and the probabilities are those of the votes


def classify(index: Index, vectors: np.ndarray, calibration: Calibration | None = None) -> list[Answer]:
    """An answer for each of the vectors (M, D); without a calibration, none is unknown.

    >>> import numpy as np
    >>> from proxygml import Embeddings, Index
    >>> angles = np.array([0, 0.1, 0.2, 1.4, 1.5])
    >>> vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    >>> photos = Embeddings(vectors, np.array([0, 0, 0, 1, 1]), angles.astype(str), np.array(["crow", "owl"]))
    >>> classify(Index.from_embeddings(photos), vectors[:1])[0].label
    'crow'
    """
    return [answer(hits, calibration) for hits in index.search(vectors, VOTERS)]


def answer(hits: Sequence[Hit], calibration: Calibration | None = None) -> Answer:
    """The vote of the nearest items, of which those without a class have none."""
    hits = [hit for hit in hits if hit.label]
    if not hits:
        raise ValueError("none of the nearest items has a class: an index to classify with needs labels")
    names, labels = np.unique([hit.label for hit in hits], return_inverse=True)
    similarities = np.array([[hit.similarity for hit in hits]])  # (1, K)
    shares = vote(labels[None], similarities)  # (1, K)
    first = np.unique(labels, return_index=True)[1]  # a neighbor of each class
    likely = probabilities(shares[:, first], 1.0 if calibration is None else calibration.temperature)[0]
    order = np.argsort(-shares[0, first], kind="stable")
    candidates = [Candidate(str(names[place]), float(likely[place])) for place in order]
    score = float(scores(similarities, shares, AGREEMENT if calibration is None else calibration.agreement)[0])
    known = calibration is None or score >= calibration.threshold
    return Answer(candidates[0].label if known else None, score, candidates, calibration is not None)


def vote(labels: np.ndarray, similarities: np.ndarray) -> np.ndarray:
    """The share of each neighbor's class in the votes (M, K): labels (M, K), cosine similarities (M, K).

    A similarity of -inf is no neighbor.
    """
    weights = np.exp((similarities - 1) / SOFTNESS)  # (M, K)
    same_class = labels[:, :, None] == labels[:, None, :]  # (M, K, K)
    sums = (same_class * weights[:, None, :]).sum(axis=2)  # (M, K)
    return sums / weights.sum(axis=1, keepdims=True)


def scores(similarities: np.ndarray, shares: np.ndarray, agreement: float) -> np.ndarray:
    """Scores (M,) by similarities and shares (M, K): high if an item is near and the others agree."""
    return similarities.max(axis=1) + agreement * np.log(shares.max(axis=1))


def probabilities(shares: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities of classes by their shares in the votes (M, classes), each in a row once or with share 0.

    One vote more, of 1 / K, is for none of them: even neighbors that agree may be wrong.
    """
    powers = shares ** (1 / temperature)
    return powers / (powers.sum(axis=1, keepdims=True) + VOTERS ** (-1 / temperature))


def read_calibration(index: Index) -> Calibration | None:
    """The calibration stored with an index; None if there is none. An error if it is of another network."""
    text = index.metadata.get(CALIBRATION)
    if text is None:
        return None
    remedy = "repeat `proxygml calibrate`"
    try:
        calibration = Calibration(**json.loads(text))
        if not (np.isfinite(calibration.threshold) and 0 < calibration.temperature < np.inf):
            raise ValueError("not finite")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the calibration of {index.location} is damaged: {remedy}") from error
    if calibration.model != index.model:
        theirs, ours = (f"model {model}" if model else "an unknown model" for model in (calibration.model, index.model))
        raise ValueError(f"the calibration of {index.location} is of {theirs}, its vectors are of {ours}: {remedy}")
    return calibration


def store_calibration(index: Index, calibration: Calibration) -> None:
    """Store a calibration with an index, instead of an earlier one."""
    index.set_metadata(CALIBRATION, json.dumps(asdict(calibration)))
