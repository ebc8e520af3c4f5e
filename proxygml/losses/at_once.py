"""ProxyGML at once: the equations of proxygml.py on whole matrices, for few proxies.

Samples and the sums of the unit proxies of each class are rows of one matrix R (B + C, D). With the unit proxies P, one
product R P^T has S of the samples and, transposed, Z^p = P (P^T Y^p) of the proxies. With the gradient G of the loss by
its entries, G P has the gradients of samples and sums, and G^T R those of proxies. P is never made: V, the proxies as
they are, serves in its place, and what is multiplied by it is divided by their lengths. A step with few proxies is more
operations than work, and these are fewer than in subgraphs.py, which takes proxies part by part.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.losses import nearest, subgraphs
from proxygml.losses.nearest import ABOVE_ANY_COSINE, invert_lengths

if TYPE_CHECKING:
    from proxygml.losses.proxygml import ProxyGMLLoss

NO_POSITIVE_LINK = -math.log(1e-20)  # what the authors' log(P + 1e-20) gives a sample whose own class has P = 0
FEW = 2**11  # proxies; with more, and no L^p, parts that stay in the cache take less time
MOST_OF_A_CLASS = 32  # proxies; Z^p is within -N..N, so that exp(Z^p) and probabilities are numbers of float32

Gradients = tuple[Tensor | None, Tensor | None]  # of embeddings (B, D) and proxies (C, N, D), where they are wanted


class Terms(NamedTuple):
    """What the last loss was made of, without gradient, for logs."""

    sample_loss: Tensor  # L^s
    proxy_loss: Tensor | None  # L^p; None where proxy_weight is 0 and it was not computed
    unlinked_share: Tensor  # share of samples without a link to a proxy of their own class


def fit_at_once(batch: int, proxies: Tensor, settings: "ProxyGMLLoss") -> bool:
    """Whether proxies (C, N, D) are few, or few of a class with an L^p of all, and their similarities fit in memory."""
    classes, per_class, _ = proxies.shape
    total, sums = classes * per_class, classes if settings.proxy_weight > 0 else 0
    everyone = not settings.sparse_gradient and (settings.proxy_rows is None or settings.proxy_rows >= total)
    suited = total < FEW if sums == 0 else per_class <= MOST_OF_A_CLASS
    return everyone and suited and (batch + sums) * total <= nearest.at_a_time(proxies)


def solve_at_once(
    embeddings: Tensor, proxies: Tensor, labels: Tensor, settings: "ProxyGMLLoss", *, differentiate: bool
) -> tuple[Terms, Gradients]:
    """Embeddings (B, D) and proxies (C, N, D) of any length, labels (B,) -> L^s and L^p, and the gradients of L."""
    classes, per_class, dimension = proxies.shape
    batch, sums = len(embeddings), classes if settings.proxy_weight > 0 else 0
    vectors = proxies.flatten(0, 1)  # (CN, D)
    inverse_lengths, sample_inverse = invert_lengths(vectors), invert_lengths(embeddings)[:, None]  # (CN,), (B, 1)
    rows = embeddings.new_empty(batch + sums, dimension)  # R
    samples = torch.mul(embeddings, sample_inverse, out=rows[:batch])
    if sums:
        torch.bmm(inverse_lengths.view(classes, 1, per_class), proxies, out=rows[batch:, None])  # (C, 1, D): P^T Y^p
    similarity = (rows @ vectors.T).mul_(inverse_lengths)  # (B + C, CN), Eq. 2: S, and Eq. 8, 9: Z^p
    slopes = torch.empty_like(similarity)  # (B + C, CN): G / |v|, the gradient of R V^T
    sample_loss, unlinked, linked, link_slopes = _sample_loss(
        similarity[:batch], labels, settings, inverse_lengths, slopes[:batch]
    )
    proxy_loss = None
    if sums:
        proxy_loss = _proxy_loss(similarity[batch:], settings.proxy_weight, inverse_lengths, slopes[batch:])
    if not differentiate:
        return Terms(sample_loss, proxy_loss, unlinked), (None, None)

    if settings.links > subgraphs.FEW_LINKS * len(vectors):
        sample_gradient, sum_gradient = (slopes @ vectors).split([batch, sums])  # (B, D), (C, D)
    else:
        sample_gradient = F.embedding_bag(linked, vectors, per_sample_weights=link_slopes, mode="sum")
        sum_gradient = slopes[batch:] @ vectors
    # A unit vector u = v / |v| whose gradient is g gives v the gradient (g - (g . u) u) / |v|.
    along = similarity.mul_(slopes).sum(dim=0)  # (CN,): g . u / |v|
    gradient = settings.gradient_room.empty(len(vectors), vectors)  # (CN, D)
    if sums:
        through_sums = torch.bmm(sum_gradient[:, None], proxies.transpose(1, 2)).view(-1)  # (CN,): g . v
        along.addcmul_(through_sums, inverse_lengths.square())
    torch.mul(vectors, along.mul_(-inverse_lengths)[:, None], out=gradient)
    if sums:
        gradient.view_as(proxies).addcmul_(sum_gradient[:, None], inverse_lengths.view(classes, per_class, 1))
    gradient.addmm_(slopes.T, rows)
    along = (sample_gradient * samples).sum(dim=1, keepdim=True)  # (B, 1): g . u
    sample_gradient.addcmul_(samples, along, value=-1).mul_(sample_inverse)
    return Terms(sample_loss, proxy_loss, unlinked), (sample_gradient, gradient.view_as(proxies))


def _sample_loss(
    cosines: Tensor, labels: Tensor, settings: "ProxyGMLLoss", inverse_lengths: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L^s of cosines (B, CN) and labels (B,), the share of unlinked samples, the links (B, k) and their slopes (B, k).

    The gradient of L^s, times 1 / length of the proxies (CN,), goes into slopes (B, CN).
    """
    batch, classes = len(cosines), settings.num_classes
    own = cosines.new_zeros(batch, classes).scatter_(1, labels[:, None], 1)  # (B, C): Y^s
    by_class = cosines.view(batch, classes, -1)  # (B, C, N)
    ranks = slopes.view_as(by_class)  # whose memory is not needed yet
    torch.add(by_class, own[:, :, None], alpha=settings.positive_bonus, out=ranks)  # Eq. 3: S + S^pos
    linked = ranks.view(batch, -1).topk(settings.links, sorted=False).indices  # (B, k), Eq. 4: I
    reached = linked // by_class.shape[2]  # (B, k): the class of each link
    scores = cosines.new_full((batch, classes), -math.inf if settings.mask_softmax else 0)  # (B, C)
    scores.scatter_reduce_(1, reached, cosines.gather(1, linked), "sum", include_self=False)  # Eq. 5: Z = W Y^p
    log_probability = scores.mul_(settings.scale).log_softmax(dim=1)  # Eq. 6
    unlinked, without = cosines.new_zeros(()), None
    if settings.positive_bonus < ABOVE_ANY_COSINE:  # otherwise a positive ranks first
        without = own.gather(1, reached).amax(dim=1, keepdim=True) == 0  # (B, 1): no link reaches the own class
        unlinked = without.to(cosines.dtype).mean()
        without &= settings.mask_softmax  # it then has no part in the softmax either
        log_probability.masked_fill_(without & (own > 0), -NO_POSITIVE_LINK)
    loss = F.nll_loss(log_probability, labels)  # Eq. 7
    slope = log_probability.exp_().sub_(own).mul_(settings.scale / batch)  # (B, C): dL^s/dZ, (P - Y^s) / B at scale 1
    if without is not None:
        slope.masked_fill_(without, 0)
    link_slopes = slope.gather(1, reached).mul_(inverse_lengths.take(linked))  # (B, k)
    slopes.zero_().scatter_(1, linked, link_slopes)
    return loss, unlinked, linked, link_slopes


def _proxy_loss(scores: Tensor, weight: float, inverse_lengths: Tensor, slopes: Tensor) -> Tensor:
    """L^p of scores (C, CN), a column for each proxy.

    A weight times its gradient, times 1 / length of the proxies (CN,), goes into slopes (C, CN).
    """
    classes, total = scores.shape
    exponentials = torch.mul(scores, 1 / math.log(2), out=slopes).exp2_()  # (C, CN), in half the time of exp
    denominators = exponentials.sum(dim=0)  # (CN,)
    own = slopes.view(classes, classes, -1).diagonal()  # (N, C): those of the class that each proxy is of
    loss = (own / denominators.view(classes, -1).T).log().mean().neg_()  # Eq. 10, 11
    share = weight / total * inverse_lengths  # (CN,)
    slopes *= share / denominators
    own -= share.view(classes, -1).T  # P^p - Y^p
    return loss
