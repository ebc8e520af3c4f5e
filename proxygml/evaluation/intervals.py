"""How certain the difference of two recalls on the same queries is."""

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


def difference_interval(hits: np.ndarray, baseline: np.ndarray, *, seed: int = 0) -> tuple[float, float, float]:
    """Recall of hits (M,) minus that of a baseline (M,), and its 95 % interval: a bootstrap over the queries.

    It covers the choice of queries, not that of classes or of the seed of training.
    """
    if len(hits) != len(baseline) or not len(hits):
        raise ValueError(f"expected hits of the same queries, got {len(hits)} and {len(baseline)}")
    gained, lost = (hits & ~baseline).mean(), (baseline & ~hits).mean()
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(hits), [gained, lost, 1 - gained - lost], size=RESAMPLES)  # (RESAMPLES, 3)
    differences = (drawn[:, 0] - drawn[:, 1]) / len(hits)
    low, high = np.quantile(differences, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(gained - lost), float(low), float(high)
