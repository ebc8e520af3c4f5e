"""k-means, and NMI: how well its clusters agree with the labels."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from proxygml.display import counted
from proxygml.evaluation.search import first_equal
from proxygml.evaluation.validation import as_labels, as_matrix, check_seed

ITERATIONS = 25
STARTS = 10  # the clustering with the lowest inertia counts
MANY_CLUSTERS = 200  # above, ten starts take too long and hardly differ


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
    from sklearn.metrics import normalized_mutual_info_score

    vectors = as_matrix(vectors, "vectors")  # (M, D)
    labels = as_labels(labels, len(vectors), "labels")  # (M,)
    assigned, method = kmeans(vectors, len(labels.unique()), seed=seed, progress=progress)
    return float(normalized_mutual_info_score(labels, assigned, average_method="arithmetic")), method


def kmeans(
    vectors: np.ndarray | Tensor, clusters: int, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> tuple[np.ndarray, str]:
    """The cluster of each of vectors (M, D), and how k-means was initialized; fewer clusters if many are equal."""
    import faiss

    vectors = as_matrix(vectors, "vectors")  # (M, D)
    centered = vectors - vectors.mean(0)  # (M, D); centered and scaled so that float32 keeps any spread
    points = centered.div_(max(float(centered.max()), -float(centered.min()), 1e-150)).float().numpy()  # (M, D)
    clusters = min(clusters, len(first_equal(points).unique()))  # k-means needs distinct points
    initialization = faiss.ClusteringInitialization(points.shape[1], clusters)  # type: ignore[attr-defined]  # no stub
    initialization.method = faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS
    starts = STARTS if clusters <= MANY_CLUSTERS else 1
    lowest = np.inf
    for start in range(starts):
        initialization.seed = STARTS * check_seed(seed) + start
        centers = np.empty((clusters, points.shape[1]), np.float32)
        initialization.init_centroids(len(points), faiss.swig_ptr(points), faiss.swig_ptr(centers))
        inertia = -1.0
        for done in range(1, ITERATIONS + 1):  # one iteration per call, for the progress
            fitted = faiss.Kmeans(points.shape[1], clusters, niter=1, seed=seed)
            fitted.cp.min_points_per_centroid = 1  # faiss warns below 39
            fitted.cp.max_points_per_centroid = len(points)  # faiss drops points above 256
            previous, inertia = inertia, fitted.train(points, init_centroids=centers)
            centers = np.asarray(fitted.centroids)  # (clusters, D)
            converged = inertia == previous  # as faiss itself decides
            if progress is not None:
                progress(start * ITERATIONS + (ITERATIONS if converged else done), starts * ITERATIONS)
            if converged:
                break
        distances, nearest = fitted.index.search(points, 1)  # (M, 1) each
        if distances.sum() < lowest:
            lowest, assigned = distances.sum(), nearest[:, 0]
    method = f"faiss, {ITERATIONS} iterations, best of {counted(starts, 'k-means++ start')}, seed {seed}"
    return assigned, method
