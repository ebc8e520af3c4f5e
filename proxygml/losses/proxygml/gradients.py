"""What the fast implementations share: the mask softmax and the regularizer with their gradients, and a projection."""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from proxygml.losses.proxygml.definition import NO_POSITIVE_LINK
from proxygml.losses.proxygml.topk import chunks, rows_per_chunk

Gradients = tuple[Tensor | None, Tensor | None]  # of embeddings (B, D) and proxies (C, N, D), where they are wanted


class Terms(NamedTuple):
    """What the last loss was made of, without gradient, for logs."""

    sample_loss: Tensor  # L^s
    proxy_loss: Tensor | None  # L^p; None where proxy_weight is 0 and it was not computed
    unlinked_fraction: Tensor  # of the samples, which no proxy of their own class is linked to


class Collectives(Protocol):
    """What processes that share the classes compute together."""

    def topk_mask(self, ranks: Tensor) -> Tensor: ...

    def max(self, values: Tensor) -> Tensor: ...

    def sum(self, values: Tensor) -> Tensor: ...

    def regularizer(
        self, proxies: Tensor, inverse_norms: Tensor, sampled: int | None, weight: float, gradient: Tensor | None
    ) -> Tensor: ...


def mask_softmax_loss(
    scores: Tensor, active: Tensor, own: Tensor, all_classes: int | None = None, collectives: Collectives | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 6 and 7: scores (B, K), which of them have a link (B, K) and which are of the own class (B, K) -> scalar.

    And its gradient (B, K), (P - Y^s) / B, and the fraction of samples whose own class has no link. Such a sample has
    P = 0: it counts as NO_POSITIVE_LINK and gives no gradient. Without the mask, `all_classes` is their number, and
    those without a link take part with a score of 0, whether they have a column or not.
    """
    own = own.to(scores.dtype) * active  # (B, K): Y^s
    masked = scores.masked_fill(~active, -math.inf)
    highest = masked.amax(dim=1)  # (B,)
    if collectives is not None:
        highest = collectives.max(highest)
    if all_classes is not None:
        linked = active.sum(dim=1)  # (B,)
        unlinked = all_classes - (linked if collectives is None else collectives.sum(linked))
        highest = highest.where(unlinked == 0, highest.clamp_min(0))
    exponentials = (masked - highest[:, None]).exp_()  # (B, K)
    sums = [exponentials.sum(dim=1), (scores * own).sum(dim=1), own.sum(dim=1)]  # (B,) each
    if collectives is not None:
        sums = list(collectives.sum(torch.stack(sums)))
    total, own_score, counted = sums
    unlinked_fraction = 1 - counted.mean()
    if all_classes is not None:
        total, counted = total + unlinked * (-highest.clamp_min(0)).exp(), torch.ones_like(counted)
    losses = (total.log() + highest - own_score).where(counted > 0, NO_POSITIVE_LINK)  # (B,)
    gradient = (exponentials / total[:, None] - own) * (counted / len(scores))[:, None]  # (B, K)
    return losses.mean(), gradient, unlinked_fraction


def project_to_tangent(gradient: Tensor, vectors: Tensor, inverse_norms: Tensor) -> None:
    """Take the radial component from each row of a gradient (P, D): the norm of its vector makes no difference."""
    for chunk in chunks(len(vectors), rows_per_chunk(vectors)):
        radial = (gradient[chunk] * vectors[chunk]).sum(dim=1) * inverse_norms[chunk].square()  # (rows,)
        gradient[chunk].addcmul_(vectors[chunk], radial[:, None], value=-1)
