"""The loss of hard-aware deeply cascaded embedding: each head learns from its hardest pairs (Yuan et al., ICCV 2017).

A pair of one class costs D, its squared distance, a pair of two classes 10 [1 - D]_+. Of either kind each head keeps a
share of the hardest. The released code shows one value and follows the gradient of another; trained is here with that
gradient, through the objective

    (1/2 sum of D over kept positives + 5 sum of [1 - D]_+ over kept negatives) / count,

count being the kept positives plus twice the kept negatives with D < 1, since the code lists negatives in both orders.
In that code every head chooses among all pairs; in the paper a head sees only what the head before it kept (`cascade`).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.losses.interface import checked_labels, highest_precision, require_whole, rescaled, without_autocast

NEGATIVE_WEIGHT = 10.0


class Terms(NamedTuple):
    """What the last loss was made of, without gradient, for logs; both are sums over the heads."""

    displayed: Tensor  # what the released code shows: the mean loss of the kept pairs that have one
    active_pairs: Tensor  # how many they are, negatives counted once


class HDCLoss(nn.Module):
    """`loss(embeddings, labels)`: embeddings (B, D), integer labels (B,) in 0..C-1 -> scalar, the sum over the heads.

    The embeddings are those of `heads` heads side by side, cut as `Tensor.tensor_split` cuts, of any length. `ratios`
    are the shares of all pairs that the heads keep, also with `cascade`, where each chooses among those of the head
    before it.
    `backbones.cascade.CascadedEmbedder` is the network.
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
        labels = checked_labels(embeddings, labels, self.num_classes, self.embedding_dim)
        first, second = torch.triu_indices(len(labels), len(labels), offset=1, device=embeddings.device)  # (P,) each
        positive = labels[first] == labels[second]  # (P,)
        precision = highest_precision(embeddings)
        with without_autocast(embeddings.device.type):
            parts = embeddings.to(precision).tensor_split(len(self.ratios), dim=1)  # (B, about D / heads) each
            samples = [F.normalize(rescaled(part), dim=-1) for part in parts]
            apart = [(part[first] - part[second]).square().sum(dim=-1) for part in samples]  # (P,) each, 0 where equal
            distances = torch.stack(apart)  # (heads, P)
            hinges = F.relu(1 - distances)  # (heads, P)
            kept = keep_hardest(distances.detach(), positive, self.ratios, self.cascade)  # (heads, P)
            attracted, repelled = kept & positive, kept & ~positive & (distances < 1)  # (heads, P) each
            counts = attracted.sum(dim=1) + 2 * repelled.sum(dim=1)  # (heads,)
            pulls, pushes = (distances * attracted).sum(dim=1), (hinges * repelled).sum(dim=1)  # (heads,) each
            losses = (0.5 * pulls + 0.5 * NEGATIVE_WEIGHT * pushes) / counts.clamp_min(1)
        displayed = (pulls + 2 * NEGATIVE_WEIGHT * pushes).detach() / counts.clamp_min(1)
        self.last_terms = Terms(displayed.sum(), (attracted | repelled).sum())
        return losses.sum()

    def extra_repr(self) -> str:
        return f"embedding_dim={self.embedding_dim}, ratios={self.ratios}, cascade={self.cascade}"


def keep_hardest(distances: Tensor, positive: Tensor, ratios: tuple[float, ...], cascade: bool) -> Tensor:
    """Which pairs each head keeps: squared distances (heads, P), positive (P,) -> boolean (heads, P).

    A ratio is the share, rounded down, of all positives at other than distance 0 and, apart from them, of all
    negatives, whether they are within the margin or not.
    """
    kept = torch.zeros_like(distances, dtype=torch.bool)
    for head, ratio in enumerate(ratios):
        for listed, hardness in (
            (positive & (distances[head] > 0), distances[head]),
            (~positive, -distances[head]),
        ):
            allowed = listed & kept[head - 1] if cascade and head > 0 else listed  # (P,)
            # 0.29 * 100 is 28.999999999999996 in floating point: without the small number 28 of 100 would be kept.
            share = int(ratio * listed.sum().item() + 1e-9)
            ranked = hardness.masked_fill(~allowed, -torch.inf).topk(min(share, int(allowed.sum()))).indices
            kept[head, ranked] = True
    return kept
