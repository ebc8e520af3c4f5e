"""A script that draws vectors (M, D) in two dimensions: `python layout.py tsne|umap VECTORS.npy POINTS.npy`.

It runs in a process of its own, which can be ended at any time, and imports nothing of this package.
"""

import sys

import numpy as np


def tsne(vectors: np.ndarray) -> np.ndarray:
    """scikit-learn's t-SNE: (M, D) -> (M, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(30, (len(vectors) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0, verbose=2).fit_transform(vectors)


def umap(vectors: np.ndarray) -> np.ndarray:
    """UMAP: (M, D) -> (M, 2)."""
    from umap import UMAP

    return UMAP(n_neighbors=min(15, len(vectors) - 1), random_state=0, n_jobs=1, verbose=True).fit_transform(vectors)


if __name__ == "__main__":
    name, source, target = sys.argv[1:]
    try:
        np.save(target, (tsne if name == "tsne" else umap)(np.load(source, allow_pickle=False)))
    except Exception as error:  # the page shows the last line
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
