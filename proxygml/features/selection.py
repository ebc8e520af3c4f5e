"""What held-out classes choose for a `ProxyGMLEmbedding`: whitening, sharpening and the number of epochs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from proxygml.evaluation import Scores, evaluate
from proxygml.features.head import Head, Moments

PATIENCE = 6  # epochs without a better score
MAX_SAMPLES = 5_000  # that are scored
NewHead = Callable[[Moments, float, float], Head]  # whitening, sharpening


@dataclass(frozen=True)
class Selection:
    """The best values for held-out classes, and the scores of these."""

    whitening: float
    sharpening: float
    epochs: int
    history: list[float] = field(default_factory=list)  # before training and after every epoch: `_mean`
    scores: dict[str, Scores] = field(default_factory=dict)  # of the features as given, whitened, and trained


def select(
    given: np.ndarray,
    features: np.ndarray,
    labels: np.ndarray,
    held_out: np.ndarray,
    *,
    whitenings: Sequence[float],
    sharpenings: Sequence[float],
    epochs: Iterable[int],
    new_head: NewHead,
) -> Selection:
    """Train on features (M, D) with labels (M,), but for the classes of the samples held_out (M,), and score on these.

    `given` (M, D) are the features before they were raised to a power.
    """
    test = np.flatnonzero(held_out)[:MAX_SAMPLES]
    train, train_labels = features[~held_out], np.unique(labels[~held_out], return_inverse=True)[1]

    def score(vectors: np.ndarray) -> Scores:
        return evaluate(vectors, labels[test], recall_at=(1,), cluster=False)

    moments = Moments(train, train_labels)
    pairs = list(product(whitenings, sharpenings))
    heads = (new_head(moments, *pair) for pair in pairs)
    best_pair = pairs[int(np.argmax([_mean(score(head.transform(features[test]))) for head in heads]))]
    head = new_head(moments, *best_pair)
    scores: list[Scores] = []
    best = 0
    for epoch in epochs:
        if epoch:
            head.train_epoch(train, train_labels)
        scores.append(score(head.transform(features[test])))
        best = int(np.argmax([_mean(each) for each in scores]))
        if epoch - best >= PATIENCE:
            break
    lengths = np.linalg.norm(given[test], axis=1, keepdims=True)
    raw = score(given[test] / np.where(lengths > 0, lengths, 1))  # of unit length: by cosine, as the others
    named = {"features": raw, "whitened": scores[0], "trained": scores[best]}
    return Selection(*best_pair, best, [_mean(each) for each in scores], named)


def _mean(scores: Scores) -> float:
    """Mean of Recall@1 and MAP@R in percent."""
    return 50 * (scores.recall[1] + scores.map_at_r)
