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


def fraction_interval(hits: np.ndarray, classes: np.ndarray) -> tuple[float, float]:
    """95 % interval of the fraction of hits (M,) in images whose classes (M,) are a sample of all classes.

    Clopper and Pearson's interval of as many independent images as tell as much as these (Korn and Graubard 1998).
    """
    from scipy import stats

    mean, numbers = float(np.mean(hits)), np.unique(classes, return_inverse=True)[1]
    sums = np.bincount(numbers, (hits - mean) / len(hits))  # (C,)
    variance = len(sums) / (len(sums) - 1) * float(sums @ sums)
    images = len(hits) if variance == 0 else min(len(hits), mean * (1 - mean) / variance)
    images *= (stats.t.ppf(0.975, len(hits) - 1) / stats.t.ppf(0.975, len(sums) - 1)) ** 2
    found = mean * images
    low = stats.beta.ppf(0.025, found, images - found + 1) if mean > 0 else 0.0
    high = stats.beta.ppf(0.975, found + 1, images - found) if mean < 1 else 1.0
    return float(low), float(high)


def auroc(known: np.ndarray, unknown: np.ndarray) -> float:
    """How often a known image (M,) scores above an unknown one (N,); ties count half."""
    return float(_below(known, unknown).mean())


def auroc_interval(known: np.ndarray, unknown: np.ndarray, classes: np.ndarray) -> tuple[float, float]:
    """95 % interval of the AUROC where each image, of classes (M,), has a score as a known and as an unknown one (M,).

    Its variance is that of clustered data (Obuchowski 1997).
    """
    from scipy import stats

    area, numbers = auroc(known, unknown), np.unique(classes, return_inverse=True)[1]
    each = _below(known, unknown) + 1 - _below(unknown, known) - 2 * area  # (M,)
    sums = np.bincount(numbers, each / len(each))  # (C,)
    deviation = np.sqrt(len(sums) / (len(sums) - 1) * float(sums @ sums))
    margin = float(stats.t.ppf(0.975, len(sums) - 1) * deviation)
    return max(0.0, area - margin), min(1.0, area + margin)


def _below(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
    """For each score (M,) the fraction of others (N,) below it; equal ones count half."""
    others = np.sort(others)
    return (np.searchsorted(others, scores) + np.searchsorted(others, scores, "right")) / (2 * len(others))
