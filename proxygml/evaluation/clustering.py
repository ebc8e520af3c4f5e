"""NMI: how well k-means clusters agree with the labels.

faiss has no k-means++ and scikit-learn's `kmeans_plusplus` is slow for many clusters: 30,000 points (64-d) and 5,000
clusters take it 9.4 s with one trial, `_kmeans_plusplus` 1.6 s and `_kmeans_plusplus_batched` 0.7 s on one core.
"""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from proxygml.evaluation.search import first_equal
from proxygml.evaluation.validation import as_labels, as_matrix, check_seed

ITERATIONS = 25
STARTS = 10  # the clustering with the lowest inertia counts
MANY_CLUSTERS = 200  # above, ten starts take too long and hardly differ
DRAWS_PER_ROUND = 256  # of batched k-means++


def nmi(
    vectors: np.ndarray | Tensor,
    labels: np.ndarray | Tensor,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, str]:
    """Normalized mutual information of labels (M,) and as many k-means clusters; and how k-means was initialized.

    Normalized by the arithmetic mean of both entropies. The initialization is returned because it changes the value.
    `progress` is called with (iterations done, all iterations).
    """
    import faiss
    from sklearn.metrics import normalized_mutual_info_score

    vectors = as_matrix(vectors, "vectors")  # (M, D)
    labels = as_labels(labels, len(vectors), "labels")  # (M,)
    centered = vectors - vectors.mean(0)  # (M, D); centered and scaled so that float32 keeps any spread
    points = centered.div_(max(float(centered.max()), -float(centered.min()), 1e-150)).float().numpy()  # (M, D)
    clusters = min(len(labels.unique()), len(first_equal(points).unique()))  # k-means needs distinct points
    starts, draw = (STARTS, _kmeans_plusplus) if clusters <= MANY_CLUSTERS else (1, _kmeans_plusplus_batched)
    rng = np.random.default_rng(check_seed(seed))
    lowest = np.inf
    for start in range(starts):
        centers = points[draw(points, clusters, rng)]  # (clusters, D)
        inertia = -1.0
        for done in range(1, ITERATIONS + 1):  # one iteration per call, for the progress
            kmeans = faiss.Kmeans(points.shape[1], clusters, niter=1, seed=seed)
            kmeans.cp.min_points_per_centroid = 1  # faiss warns below 39
            kmeans.cp.max_points_per_centroid = len(points)  # faiss drops points above 256
            previous, inertia = inertia, kmeans.train(points, init_centroids=centers)
            centers = np.asarray(kmeans.centroids)  # (clusters, D)
            converged = inertia == previous  # as faiss itself decides
            if progress is not None:
                progress(start * ITERATIONS + (ITERATIONS if converged else done), starts * ITERATIONS)
            if converged:
                break
        distances, nearest = kmeans.index.search(points, 1)  # (M, 1) each
        if distances.sum() < lowest:
            lowest, assigned = distances.sum(), nearest[:, 0]
    method = f"faiss, {ITERATIONS} iterations, best of {starts} k-means++ start{'s' * (starts > 1)}, seed {seed}"
    return float(normalized_mutual_info_score(labels, assigned, average_method="arithmetic")), method


def _kmeans_plusplus(points: np.ndarray, clusters: int, rng: np.random.Generator) -> list[int]:
    """Indices of initial centers among points (M, D), drawn by the squared distance to the nearest center so far."""
    norms = np.einsum("md,md->m", points, points)  # (M,)
    chosen = [int(rng.integers(len(points)))]
    squared = np.full(len(points), np.inf)  # (M,): to the nearest center
    while len(chosen) < clusters:
        newest = points[chosen[-1]]  # (D,)
        squared = np.minimum(squared, (norms - 2 * (points @ newest) + newest @ newest).clip(0))
        squared[chosen[-1]] = 0
        chosen.append(int(_draw_by_weight(squared.cumsum(dtype=np.float64), rng, None)))
    return chosen


def _kmeans_plusplus_batched(points: np.ndarray, clusters: int, rng: np.random.Generator) -> list[int]:
    """The same distribution, many points per round: a few products instead of one pass per cluster.

    Rejection sampling: candidates are drawn by their distance before the round, and each is accepted with probability
    (distance to the nearest center now, accepted candidates included) / (distance before the round).
    """
    norms = np.einsum("md,md->m", points, points)  # (M,)
    squared = np.full(len(points), np.inf, np.float32)  # (M,): to the nearest center
    chosen, newest = [], [int(rng.integers(len(points)))]
    while True:
        chosen += newest
        squared = np.minimum(squared, _squared_distances(points, norms, newest).min(1, initial=np.inf))
        squared[newest] = 0
        if len(chosen) == clusters:
            return chosen
        weights = squared.cumsum(dtype=np.float64)  # (M,)
        if weights[-1] == 0:  # float32 cannot tell the other points from the centers
            return [*chosen, *np.setdiff1d(np.arange(len(points)), chosen)[: clusters - len(chosen)]]
        count = min(len(chosen), clusters - len(chosen), DRAWS_PER_ROUND)
        drawn = _draw_by_weight(weights, rng, count)  # (count,)
        between = _squared_distances(points[drawn], norms[drawn], np.arange(count))  # (count, count)
        threshold = rng.uniform(size=count) * squared[drawn]  # (count,)
        accepted: list[int] = []
        for i in range(count):
            if threshold[i] < between[i, accepted].min(initial=squared[drawn[i]]):
                accepted.append(i)
        newest = drawn[accepted].tolist()


def _draw_by_weight(cumulative: np.ndarray, rng: np.random.Generator, count: int | None) -> np.ndarray:
    """Indices (count,) drawn with probabilities proportional to the weights with these cumulative sums (M,)."""
    drawn = np.searchsorted(cumulative, rng.uniform(0, cumulative[-1], count), side="right")
    return drawn.clip(0, len(cumulative) - 1)


def _squared_distances(points: np.ndarray, norms: np.ndarray, chosen: Sequence[int] | np.ndarray) -> np.ndarray:
    """Squared distances (M, chosen) of points (M, D), with squared norms (M,), to some of them."""
    squared = points @ points[chosen].T  # (M, chosen)
    squared *= -2
    squared += norms[:, None]
    squared += norms[chosen]
    return squared.clip(0, out=squared)
