"""Head and proxies that start from the training images instead of at random."""

from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.display import Progress
from proxygml.training import build
from proxygml.training.evaluator import Evaluator
from proxygml.training.loop import TrainingLoop


def start_from_images(loop: TrainingLoop, evaluator: Evaluator, progress: Progress) -> None:
    """Fit the head to the training images and start the proxies at them, where the recipe says so."""
    recipe, model, fabric = loop.recipe, loop.model, loop.fabric
    embedded = None
    if recipe.head_start == "fitted":
        bare = build.without_head(model, recipe).to(fabric.device)
        features = evaluator.embed(bare, loop.images, "features of training images")
        if fabric.is_global_zero:
            fit_head(model.head, features.vectors, features.labels, seed=recipe.seed, progress=progress)
        model.head.load_state_dict(fabric.broadcast(model.head.state_dict()))
        with torch.inference_mode():
            vectors = model.head(torch.from_numpy(features.vectors).to(fabric.device))
        embedded = replace(features, vectors=vectors.cpu().numpy())
    if recipe.proxy_start == "samples" and recipe.is_proxygml:
        if embedded is None:
            embedded = evaluator.embed(model, loop.images, "embedding training images")
        start_at_samples(cast(Tensor, loop.loss.proxies), embedded.vectors, embedded.labels, seed=recipe.seed)


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
