"""NMI: how well the clusters that k-means finds agree with the labels."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from proxygml.evaluation.vectors import first_equal, integers, matrix

ITERATIONS = 25
STARTS = 10  # of which the tightest clustering counts
MANY_CLUSTERS = 200  # beyond, ten starts take too long, and hardly differ
DRAWN_TOGETHER = 256  # points of a start, with more clusters than that


def nmi(
    vectors: np.ndarray | Tensor,
    labels: np.ndarray | Tensor,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, str]:
    """Agreement of k-means clusters, as many as labels, with the labels; and in words how k-means was started.

    Mutual information over the arithmetic mean of both entropies. The start comes back because it moves the value.
    `progress` is told (iterations done, all).
    """
    import faiss
    from sklearn.metrics import normalized_mutual_info_score

    vectors = matrix(vectors, "vectors")  # (M, D)
    labels = integers(labels, len(vectors), "labels")  # (M,)
    centred = vectors - vectors.mean(0)  # (M, D); centred and scaled, so that float32 keeps any spread
    points = centred.div_(max(float(centred.max()), -float(centred.min()), 1e-150)).float().numpy()  # (M, D)
    clusters = min(len(labels.unique()), len(first_equal(points).unique()))  # k-means needs as many distinct points
    starts, spread = (STARTS, _spread_start) if clusters <= MANY_CLUSTERS else (1, _spread_start_in_rounds)
    random = np.random.default_rng(seed)
    tightest = np.inf
    for start in range(starts):
        centres = points[spread(points, clusters, random)]  # (clusters, D)
        looseness = -1.0  # as none is
        for done in range(1, ITERATIONS + 1):  # one by one, so that progress can be told
            means = faiss.Kmeans(points.shape[1], clusters, niter=1, seed=seed)
            means.cp.min_points_per_centroid = 1  # faiss would warn below 39
            means.cp.max_points_per_centroid = len(points)  # and drop points above 256
            before, looseness = looseness, means.train(points, init_centroids=centres)
            centres = np.asarray(means.centroids)  # (clusters, D)
            settled = looseness == before  # where faiss would stop of itself
            if progress is not None:
                progress(start * ITERATIONS + (ITERATIONS if settled else done), starts * ITERATIONS)
            if settled:
                break
        distances, nearest = means.index.search(points, 1)  # (M, 1) each
        if distances.sum() < tightest:
            tightest, assigned = distances.sum(), nearest[:, 0]
    words = f"faiss, {ITERATIONS} iterations, best of {starts} k-means++ start{'s' * (starts > 1)}, seed {seed}"
    return float(normalized_mutual_info_score(labels, assigned, average_method="arithmetic")), words


def _spread_start(points: np.ndarray, clusters: int, random: np.random.Generator) -> list[int]:
    """k-means++: which points (M, D) to start from, each drawn by its squared distance to those before it."""
    lengths = np.einsum("md,md->m", points, points)  # (M,)
    chosen = [int(random.integers(len(points)))]
    squared = np.full(len(points), np.inf)  # (M,) to the nearest chosen
    while len(chosen) < clusters:
        newest = points[chosen[-1]]  # (D,)
        squared = np.minimum(squared, (lengths - 2 * (points @ newest) + newest @ newest).clip(0))
        squared[chosen[-1]] = 0
        chances = squared.cumsum(dtype=np.float64)  # (M,)
        chosen.append(
            int(np.searchsorted(chances, random.uniform(0, chances[-1]), side="right").clip(0, len(points) - 1))
        )
    return chosen


def _spread_start_in_rounds(points: np.ndarray, clusters: int, random: np.random.Generator) -> list[int]:
    """k-means++ as above, in law, but many points at a time: a few products instead of a pass for every cluster.

    Points are drawn by their distance before the round, and each is then kept with the chance that its distance to
    those kept before it is of that (rejection sampling).
    """
    lengths = np.einsum("md,md->m", points, points)  # (M,)
    squared = np.full(len(points), np.inf, np.float32)  # (M,) to the nearest chosen
    chosen, newest = [], [int(random.integers(len(points)))]
    while True:
        chosen += newest
        squared = np.minimum(squared, _squared_distances(points, lengths, newest).min(1, initial=np.inf))
        squared[newest] = 0
        if len(chosen) == clusters:
            return chosen
        chances = squared.cumsum(dtype=np.float64)  # (M,)
        if chances[-1] == 0:  # the others are as good as equal to these
            return [*chosen, *np.setdiff1d(np.arange(len(points)), chosen)[: clusters - len(chosen)]]
        count = min(len(chosen), clusters - len(chosen), DRAWN_TOGETHER)
        drawn = np.searchsorted(chances, random.uniform(0, chances[-1], count), side="right").clip(0, len(points) - 1)
        among = _squared_distances(points[drawn], lengths[drawn], np.arange(count))  # (count, count)
        needed = random.uniform(size=count) * squared[drawn]  # (count,)
        kept: list[int] = []
        for place in range(count):
            if needed[place] < among[place, kept].min(initial=squared[drawn[place]]):
                kept.append(place)
        newest = drawn[kept].tolist()


def _squared_distances(points: np.ndarray, lengths: np.ndarray, chosen: Sequence[int] | np.ndarray) -> np.ndarray:
    """Of points (M, D) with squared lengths (M,) to some of them: (M, chosen)."""
    squared = points @ points[chosen].T  # (M, chosen)
    squared *= -2
    squared += lengths[:, None]
    squared += lengths[chosen]
    return squared.clip(0, out=squared)
