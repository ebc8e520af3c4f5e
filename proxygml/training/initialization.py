"""Head and proxies that start from the training images instead of at random."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.display import Progress


def fit_head(head: nn.Linear, features: np.ndarray, labels: np.ndarray, *, seed: int, progress: Progress) -> None:
    """Set a linear layer to what `ProxyGMLEmbedding` fits on features (M, F) with labels (M,).

    Its weights keep their root mean square, which the learning rate is chosen for. With more dimensions than features,
    the last embeddings are 0.
    """
    from proxygml.features.estimator import ProxyGMLEmbedding  # slow to import

    dim = min(head.weight.shape)
    fitted = ProxyGMLEmbedding(dim, power=1.0, random_state=seed, progress=progress).fit(features, labels)
    weight, mean = torch.from_numpy(fitted.components_).to(head.weight), torch.from_numpy(fitted.mean_).to(head.weight)
    with torch.no_grad():
        weight *= head.weight.square().mean().sqrt() / weight.square().mean().sqrt()  # (D, F)
        head.weight.zero_()[:dim] = weight
        head.bias.zero_()[:dim] = -weight @ mean


def start_at_samples(proxies: Tensor, vectors: np.ndarray, labels: np.ndarray, *, seed: int) -> None:
    """Set proxies (C, N, D) to random vectors (M, D) of their class, labels (M,), scaled to the proxies' mean length.

    A class with fewer than N vectors has some of them twice.
    """
    classes, count = proxies.shape[:2]
    rows = np.random.default_rng(seed).permutation(len(labels))
    rows = rows[labels[rows].argsort(kind="stable")]  # grouped by class
    sizes = np.bincount(labels, minlength=classes)[:, None]  # (C, 1)
    chosen = rows[sizes.cumsum(0) - sizes + np.arange(count) % sizes]  # (C, N)
    with torch.no_grad():
        start = F.normalize(torch.from_numpy(vectors[chosen]).to(proxies), dim=2)  # (C, N, D)
        proxies.copy_(start * proxies.norm(dim=2).mean())
