"""ProxyGML as slow loops over single numbers, written from the paper's equations alone.

Numbers are 0-d float64 tensors so that autograd differentiates the loops; nothing is vectorized and nothing is
taken from the package.
"""

import torch
from torch import Tensor


def unit(vector: list[Tensor]) -> list[Tensor]:
    length = sum(x * x for x in vector).sqrt()
    return [x / length for x in vector]


def dot(left: list[Tensor], right: list[Tensor]) -> Tensor:
    return sum(a * b for a, b in zip(left, right, strict=True))


def proxygml(
    embeddings: list[list[Tensor]],  # M x D
    labels: list[int],  # M
    proxies: list[list[list[Tensor]]],  # C x N x D
    *,
    links: int,
    proxy_weight: float,
    positive_bonus: float,
    mask_softmax: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """L, L^s, L^p, and the gap between the last linked and the first unlinked similarity (ties decide nothing)."""
    samples = [unit(x) for x in embeddings]
    classes = len(proxies)
    points = [(unit(p), label) for label, group in enumerate(proxies) for p in group]  # C N pairs (x^p, y^p)
    smallest_gap = float("inf")

    sample_loss = torch.zeros((), dtype=torch.float64)
    for sample, label in zip(samples, labels, strict=True):
        similarity = [dot(sample, p) for p, _ in points]  # Eq. 2
        ranked = [
            s.item() + (positive_bonus if label == y else 0.0) for s, (_, y) in zip(similarity, points, strict=True)
        ]  # Eq. 3
        order = sorted(range(len(points)), key=lambda j: -ranked[j])
        chosen = order[:links]  # the set I
        if links < len(points):
            smallest_gap = min(smallest_gap, ranked[order[links - 1]] - ranked[order[links]])
        scores = [torch.zeros((), dtype=torch.float64) for _ in range(classes)]
        linked_classes = set()
        for j in chosen:  # Eq. 4 and 5: only linked proxies have a weight, and each gives it to its class
            scores[points[j][1]] = scores[points[j][1]] + similarity[j]
            linked_classes.add(points[j][1])
        counted = linked_classes if mask_softmax else set(range(classes))
        if label in counted:
            exponents = {c: (scale * scores[c]).exp() for c in counted}
            probability = exponents[label] / sum(exponents.values())  # Eq. 6
            sample_loss = sample_loss - probability.log() / len(samples)  # Eq. 7
        else:
            sample_loss = sample_loss - torch.tensor(1e-20, dtype=torch.float64).log() / len(samples)

    proxy_loss = torch.zeros((), dtype=torch.float64)
    for p, label in points:
        scores = [torch.zeros((), dtype=torch.float64) for _ in range(classes)]
        for q, other in points:
            scores[other] = scores[other] + dot(p, q)  # Eq. 8 and 9
        probability = scores[label].exp() / sum(s.exp() for s in scores)  # Eq. 10
        proxy_loss = proxy_loss - probability.log() / len(points)  # Eq. 11
    return sample_loss + proxy_weight * proxy_loss, sample_loss, proxy_loss, smallest_gap  # Eq. 12


def value_and_gradients(
    embeddings: Tensor, labels: Tensor, proxies: Tensor, **settings: object
) -> tuple[Tensor, Tensor, Tensor, float]:
    """L, dL/dembeddings (M, D), dL/dproxies (C, N, D) and the smallest gap, from the loops."""
    embeddings = embeddings.detach().double().requires_grad_()
    proxies = proxies.detach().double().requires_grad_()
    loss, _, _, gap = proxygml(
        [list(row) for row in embeddings],
        labels.tolist(),
        [[list(p) for p in group] for group in proxies],
        **settings,
    )
    gradients = (
        torch.autograd.grad(loss, [embeddings, proxies], allow_unused=True, materialize_grads=True)
        if (loss.requires_grad)
        else (torch.zeros_like(embeddings), torch.zeros_like(proxies))
    )
    return loss.detach(), *gradients, gap
