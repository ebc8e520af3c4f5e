"""The ProxyGML loss, equation by equation.

From "Fewer is More: A Deep Graph Metric Learning Perspective Using Fewer Proxies" (Zhu et al., NeurIPS 2020),
section 3, whose symbols are called here:

    x^s       samples      (B, D)     unit embeddings of the batch (the paper's M is our B)
    x^p       proxies      (C, N, D)  unit proxies, N of each class, so that y^p is the first axis
    S         similarity   (B, C, N)  cosine of every sample and every proxy
    I         linked       (B, C, N)  which k proxies each sample is linked to: its subgraph
    W         subgraphs    (B, C, N)  S where linked, 0 elsewhere
    Y^p       -                       one-hot proxy labels; a product with it is a sum over the last axis
    Z         scores       (B, C)     labels propagated from the linked proxies to the sample
    M         reached      (B, C)     classes with at least one linked proxy
    k, r      links, ratio            k = ceil(r C N)
    lambda    proxy_weight

docs/paper.md lists where this differs from the paper or from its authors' code, and why.
"""

import math
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.losses.interface import checked_labels, highest_precision, require_whole

ABOVE_ANY_COSINE = 4.0  # cosines differ by at most 2, so with this bonus every positive proxy ranks first
NO_POSITIVE_LINK = -math.log(1e-20)  # what the authors' log(P + 1e-20) gives a sample whose own class has P = 0


class Terms(NamedTuple):
    """What the last loss was made of, without gradient, for logs."""

    sample_loss: Tensor  # L^s
    proxy_loss: Tensor | None  # L^p; None where proxy_weight is 0 and it was not computed
    unlinked_share: Tensor  # share of samples without a link to a proxy of their own class


class ProxyGMLLoss(nn.Module):
    """`loss(embeddings, labels)`: embeddings (B, D) of any length, integer labels (B,) in 0..C-1 -> scalar.

    Its parameter `proxies` (C, N, D) is trained with the network: hand `loss.parameters()` to the optimizer, the
    paper with a learning rate of 3e-2 beside 1e-4 for the backbone. `links` is k, the proxies each sample is linked
    to: given, or `ratio` of all. `literal_mask` ranks with the +1 that Eq. 3 writes, which does not always keep all
    positives. `scale` multiplies the scores of samples in their softmax: 1 in the paper, where with one proxy per class
    no probability can come near 1. `last_terms` holds the parts of the last loss.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        proxies_per_class: int = 12,
        ratio: float = 0.05,
        links: int | None = None,
        proxy_weight: float = 0.3,
        positive_mask: bool = True,
        mask_softmax: bool = True,
        literal_mask: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim, proxies_per_class=proxies_per_class)
        if links is not None:
            require_whole(links=links)
        if not 0 < ratio < math.inf:
            raise ValueError(f"expected a ratio above 0 (the paper's is 0.05), got {ratio}")
        if not proxy_weight >= 0:
            raise ValueError(f"expected a proxy_weight of at least 0 (the paper's is 0.3), got {proxy_weight}")
        if not scale > 0:
            raise ValueError(f"expected a scale above 0 (the paper's is 1), got {scale}")
        self.links = choose_links(num_classes, proxies_per_class, ratio) if links is None else links
        self.links = min(self.links, num_classes * proxies_per_class)
        self.proxy_weight = proxy_weight
        self.positive_bonus = 0.0 if not positive_mask else 1.0 if literal_mask else ABOVE_ANY_COSINE
        self.mask_softmax = mask_softmax
        self.scale = scale
        self.last_terms: Terms | None = None
        # As in the authors' code; the length matters although proxies are normalised, since gradients scale with
        # its inverse.
        bound = 1 / math.sqrt(num_classes * proxies_per_class)
        self.proxies = nn.Parameter(torch.empty(num_classes, proxies_per_class, embedding_dim).uniform_(-bound, bound))
        if positive_mask and self.links <= proxies_per_class:
            _warn_of_no_negatives(num_classes, proxies_per_class, self.links)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: object = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch. The last three are what pytorch-metric-learning passes; proxies need none of them."""
        classes, _, dimension = self.proxies.shape
        labels = checked_labels(embeddings, labels, classes, dimension)
        precision = highest_precision(embeddings, self.proxies)
        with torch.autocast(embeddings.device.type, enabled=False):  # exp of a sum of N cosines overflows float16
            samples = F.normalize(embeddings.to(precision), dim=-1)  # (B, D)
            proxies = F.normalize(self.proxies.to(precision), dim=-1)  # (C, N, D)

            similarity = torch.einsum("bd,cnd->bcn", samples, proxies)  # Eq. 2: S
            linked = nearest_proxies(similarity.detach(), labels, self.links, self.positive_bonus)  # Eq. 3: I
            subgraphs = similarity.where(linked, 0)  # Eq. 4: W
            scores = subgraphs.sum(dim=-1)  # (B, C), Eq. 5: Z = W Y^p

            reached = linked.any(dim=-1)  # (B, C): M, from the links; Z == 0 also where vectors are orthogonal
            mask = reached if self.mask_softmax else torch.ones_like(reached)
            sample_loss = masked_cross_entropy(self.scale * scores, mask, labels)  # Eq. 6, 7: L^s

            proxy_loss = None
            loss = sample_loss
            if self.proxy_weight > 0:
                proxy_loss = proxy_cross_entropy(proxies)  # Eq. 8 to 11: L^p
                loss = sample_loss + self.proxy_weight * proxy_loss  # Eq. 12: L
        unlinked = ~reached.gather(1, labels[:, None])  # (B, 1)
        self.last_terms = Terms(
            sample_loss.detach(), None if proxy_loss is None else proxy_loss.detach(), unlinked.to(precision).mean()
        )
        return loss

    def extra_repr(self) -> str:
        classes, per_class, dimension = self.proxies.shape
        return (
            f"num_classes={classes}, embedding_dim={dimension}, proxies_per_class={per_class}, links={self.links}, "
            f"proxy_weight={self.proxy_weight}, positive_bonus={self.positive_bonus}, "
            f"mask_softmax={self.mask_softmax}, scale={self.scale}"
        )


def choose_links(num_classes: int, proxies_per_class: int, ratio: float) -> int:
    """k = ceil(r C N), at least 1 and at most C N."""
    proxies = num_classes * proxies_per_class
    # 0.07 * 100 * 12 is 84.00000000000001 in floating point: without the small number its ceiling would be 85.
    return min(proxies, max(1, math.ceil(ratio * proxies - 1e-9)))


def nearest_proxies(similarity: Tensor, labels: Tensor, links: int, positive_bonus: float) -> Tensor:
    """Which proxies each sample is linked to: similarity (B, C, N), labels (B,) -> boolean (B, C, N), k per sample."""
    if positive_bonus:
        own_class = F.one_hot(labels, similarity.shape[1])  # (B, C), Eq. 3: S^pos, the same for all N of a class
        similarity = similarity + positive_bonus * own_class[:, :, None]
    ranked = similarity.flatten(1).topk(links, sorted=False).indices  # (B, k) of C N
    linked = torch.zeros_like(similarity, dtype=torch.bool)
    linked.flatten(1).scatter_(1, ranked, True)
    return linked


def masked_cross_entropy(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log P(own class) over the classes in the mask: scores (B, C), mask (B, C), labels (B,) -> scalar.

    A sample whose own class is masked out has P = 0; it counts as NO_POSITIVE_LINK and gives no gradient.
    """
    own = labels[:, None]  # (B, 1)
    log_total = scores.masked_fill(~mask, -math.inf).logsumexp(dim=1, keepdim=True)  # (B, 1)
    own_log_probability = scores.gather(1, own) - log_total  # Eq. 6: log P
    return -own_log_probability.where(mask.gather(1, own), -NO_POSITIVE_LINK).mean()  # Eq. 7


def proxy_cross_entropy(proxies: Tensor) -> Tensor:
    """L^p, every proxy classified by all proxies, itself included: unit proxies (C, N, D) -> scalar."""
    classes, per_class, _ = proxies.shape
    class_sums = proxies.sum(dim=1)  # (C, D): Z^p = (P P^T) Y^p = P (P^T Y^p) needs no (CN)^2 matrix
    scores = proxies.flatten(0, 1) @ class_sums.T  # (CN, C), Eq. 8, 9: Z^p
    own_class = torch.arange(classes, device=proxies.device).repeat_interleave(per_class)  # (CN,)
    return F.cross_entropy(scores, own_class)  # Eq. 10, 11


def _warn_of_no_negatives(num_classes: int, proxies_per_class: int, links: int) -> None:
    if num_classes == 1:
        advice = "one class leaves nothing to tell apart"
    else:
        ratio = (proxies_per_class + 0.5) / (num_classes * proxies_per_class)  # rounded up, one link more than N
        advice = f"use a ratio of at least {ratio:.4g} or links of at least {proxies_per_class + 1}"
    warnings.warn(
        f"{links} links for each sample are all taken by the {proxies_per_class} proxies of its own class: "
        f"no negative is linked and nothing tells classes apart; {advice}",
        stacklevel=3,
    )
