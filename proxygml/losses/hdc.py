"""The loss of hard-aware deeply cascaded embedding: each head learns from its hardest pairs (Yuan et al., ICCV 2017).

A positive pair costs D, its squared distance; a negative pair costs 10 [1 - D]_+. Each head keeps a fraction of the
hardest pairs of either kind. The released code displays one value and follows the gradient of another one, which we
use, through the objective

    (1/2 sum of D over kept positives + 5 sum of [1 - D]_+ over kept negatives) / count,

where count is the number of kept positives plus twice the kept negatives with D < 1: the code lists negatives in both
orders. In the code every head chooses among all pairs; in the paper, among the pairs of the head before (`cascade`).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.losses.interface import full_precision, normalized, require_whole

NEGATIVE_WEIGHT = 10.0


class Terms(NamedTuple):
    """Sums over the heads in the last loss, without gradient, for logs."""

    displayed: Tensor  # the value that the released code displays: the mean loss of the active pairs
    active_pairs: Tensor  # the number of kept pairs with a loss above 0, each negative once


class HDCLoss(nn.Module):
    """`loss(embeddings, labels)`: embeddings (B, D), integer labels (B,) in 0..C-1 -> scalar, the sum over the heads.

    `backbones.cascade.CascadedEmbedder` is the network: embeddings are the outputs of `heads` heads side by side, split
    by `Tensor.tensor_split`, of any norm. Each head keeps its fraction in `ratios` of all pairs, also with `cascade`.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        heads: int = 3,
        ratios: tuple[float, ...] = (1.0, 0.5, 0.2),
        cascade: bool = False,
    ) -> None:
        super().__init__()
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim, heads=heads)
        if embedding_dim < heads:
            raise ValueError(f"expected an embedding_dim that {heads} heads can share, got {embedding_dim}")
        if len(ratios) != heads or not all(0 < ratio <= 1 for ratio in ratios):
            raise ValueError(f"expected a ratio above 0 and up to 1 for each of {heads} heads, got {tuple(ratios)}")
        self.num_classes, self.embedding_dim = num_classes, embedding_dim
        self.ratios, self.cascade = tuple(ratios), cascade
        self.last_terms: Terms | None = None

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        with full_precision(self, embeddings, labels) as (embeddings, labels):
            first, second = torch.triu_indices(len(labels), len(labels), offset=1, device=labels.device)  # (P,) each
            positive = labels[first] == labels[second]  # (P,)
            samples = [normalized(part) for part in embeddings.tensor_split(len(self.ratios), dim=1)]
            distances = torch.stack([(part[first] - part[second]).square().sum(dim=-1) for part in samples])
            hinges = F.relu(1 - distances)  # (heads, P)
            kept = keep_hardest(distances.detach(), positive, self.ratios, self.cascade)  # (heads, P)
            attracted, repelled = kept & positive, kept & ~positive & (distances < 1)  # (heads, P) each
            counts = (attracted.sum(dim=1) + 2 * repelled.sum(dim=1)).clamp_min(1)  # (heads,)
            pulls, pushes = (distances * attracted).sum(dim=1), (hinges * repelled).sum(dim=1)  # (heads,) each
            losses = (0.5 * pulls + 0.5 * NEGATIVE_WEIGHT * pushes) / counts
        displayed = (pulls + 2 * NEGATIVE_WEIGHT * pushes).detach() / counts
        self.last_terms = Terms(displayed.sum(), (attracted | repelled).sum())
        return losses.sum()

    def extra_repr(self) -> str:
        return f"embedding_dim={self.embedding_dim}, ratios={self.ratios}, cascade={self.cascade}"


def keep_hardest(distances: Tensor, positive: Tensor, ratios: tuple[float, ...], cascade: bool) -> Tensor:
    """Which pairs each head keeps: squared distances (heads, P), positive (P,) -> boolean (heads, P).

    A ratio is a fraction, rounded down, of all positives with a distance above 0, and of all negatives.
    """
    kept = torch.zeros_like(distances, dtype=torch.bool)
    for head, ratio in enumerate(ratios):
        hardness = distances[head].where(positive, -distances[head])  # (P,)
        for pairs in (positive & (distances[head] > 0), ~positive):
            allowed = pairs & kept[head - 1] if cascade and head > 0 else pairs  # (P,)
            # 0.29 * 100 is 28.999999999999996 in floating point; without the epsilon, 28 of 100 would be kept.
            count = min(int(ratio * pairs.sum().item() + 1e-9), int(allowed.sum()))
            kept[head, hardness.masked_fill(~allowed, -torch.inf).topk(count).indices] = True
    return kept
