"""Few proxies: whole matrices, and a hand-written gradient that needs one product for samples and class sums.

Samples and the sums of the unit proxies of each class are rows of one matrix R (B + C, D). With the unit proxies P, one
product R P^T gives S of the samples and, transposed, Z^p = P (P^T Y^p) of the proxies. With the gradient G of the loss
by its entries, G P gives the gradients of samples and sums, and G^T R those of proxies. P is never made: the proxies V
serve in its place, and what is multiplied by them is divided by their norms. A step with few proxies is more operations
than work, and these are fewer than in chunked.py. docs/performance.md has the times.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.losses.proxygml import chunked, topk
from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.gradients import Gradients, Terms, mask_softmax_loss
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.topk import invert_norms

MAX_PROXIES = 2**11  # on a CPU; with more, and no L^p, chunks that stay in the cache take less time
MAX_PER_CLASS = 32  # Z^p is within -N..N, so that exp(Z^p) and probabilities are numbers of float32


def fits_fused(batch: int, proxies: Tensor, settings: ProxyGMLSettings) -> bool:
    """Whether proxies (C, N, D) are few, or few of a class with an L^p of all, and their similarities fit in memory."""
    classes, per_class, _ = proxies.shape
    total, sums = classes * per_class, classes if settings.proxy_weight > 0 else 0
    all_rows = not settings.sparse_gradient and (settings.proxy_rows is None or settings.proxy_rows >= total)
    few = total < MAX_PROXIES or proxies.device.type != "cpu"
    suited = few if sums == 0 else per_class <= MAX_PER_CLASS
    return all_rows and suited and (batch + sums) * total <= topk.chunk_elements(proxies)


def fused(
    embeddings: Tensor,
    proxies: Tensor,
    labels: Tensor,
    settings: ProxyGMLSettings,
    links: int,
    pool: BufferPool,
    *,
    differentiate: bool,
) -> tuple[Terms, Gradients]:
    """Embeddings (B, D) and proxies (C, N, D) of any norm, labels (B,) -> L^s and L^p, and the gradients of L."""
    classes, per_class, dimension = proxies.shape
    batch, sums = len(embeddings), classes if settings.proxy_weight > 0 else 0
    vectors = proxies.flatten(0, 1)  # (CN, D)
    inverse_norms, sample_inverse = invert_norms(vectors), invert_norms(embeddings)[:, None]  # (CN,), (B, 1)
    rows = embeddings.new_empty(batch + sums, dimension)  # R
    samples = torch.mul(embeddings, sample_inverse, out=rows[:batch])
    if sums:
        torch.bmm(inverse_norms.view(classes, 1, per_class), proxies, out=rows[batch:, None])  # (C, 1, D): P^T Y^p
    similarity = (rows @ vectors.T).mul_(inverse_norms)  # (B + C, CN), Eq. 2: S, and Eq. 8, 9: Z^p
    grad_scores = torch.empty_like(similarity)  # (B + C, CN): G / |v|, the gradient of R V^T
    sample_loss, unlinked, linked, grad_links = _sample_loss(
        similarity[:batch], labels, settings, links, inverse_norms, grad_scores[:batch]
    )
    proxy_loss = None
    if sums:
        proxy_loss = _proxy_loss(similarity[batch:], settings.proxy_weight, inverse_norms, grad_scores[batch:])
    terms = Terms(sample_loss, proxy_loss, unlinked)
    if not differentiate:
        return terms, (None, None)

    if links > chunked.SPARSE_LINKS * len(vectors):
        sample_gradient, sum_gradient = (grad_scores @ vectors).split([batch, sums])  # (B, D), (C, D)
    else:
        sample_gradient = F.embedding_bag(linked, vectors, per_sample_weights=grad_links, mode="sum")
        sum_gradient = grad_scores[batch:] @ vectors
    # A unit vector u = v / |v| with gradient g gives v the gradient (g - (g . u) u) / |v|. project_to_tangent would
    # read all rows again for the radial component g . u; the similarities have it already.
    radial = similarity.mul_(grad_scores).sum(dim=0)  # (CN,): g . u / |v|
    gradient = pool.empty(len(vectors), vectors)  # (CN, D)
    if sums:
        through_sums = torch.bmm(sum_gradient[:, None], proxies.transpose(1, 2)).view(-1)  # (CN,): g . v
        radial.addcmul_(through_sums, inverse_norms.square())
    torch.mul(vectors, radial.mul_(-inverse_norms)[:, None], out=gradient)
    if sums:
        gradient.view_as(proxies).addcmul_(sum_gradient[:, None], inverse_norms.view(classes, per_class, 1))
    gradient.addmm_(grad_scores.T, rows)
    radial = (sample_gradient * samples).sum(dim=1, keepdim=True)  # (B, 1): g . u
    sample_gradient.addcmul_(samples, radial, value=-1).mul_(sample_inverse)
    return terms, (sample_gradient, gradient.view_as(proxies))


def _sample_loss(
    cosines: Tensor, labels: Tensor, settings: ProxyGMLSettings, links: int, inverse_norms: Tensor, grad_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L^s of cosines (B, CN), the fraction of unlinked samples, the links (B, k) and their gradients (B, k).

    The gradient of L^s, divided by the norms of the proxies (CN,), goes into grad_scores (B, CN).
    """
    batch, per_class = len(cosines), settings.proxies_per_class
    classes = cosines.shape[1] // per_class
    own = cosines.new_zeros(batch, classes).scatter_(1, labels[:, None], 1)  # (B, C): Y^s
    ranks = grad_scores.view(batch, classes, per_class)  # its memory is not needed yet
    torch.add(cosines.view_as(ranks), own[:, :, None], alpha=settings.positive_bonus, out=ranks)  # Eq. 3: S + S^pos
    linked = ranks.view(batch, -1).topk(links, sorted=False).indices  # (B, k), Eq. 4: I
    link_class = linked // per_class  # (B, k)
    scores = cosines.new_zeros(batch, classes).scatter_add_(
        1, link_class, cosines.gather(1, linked)
    )  # Eq. 5: Z = W Y^p
    active = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, link_class, True)  # (B, C): M
    all_classes = None if settings.mask_softmax else classes
    loss, gradient, unlinked = mask_softmax_loss(scores.mul_(settings.scale), active, own, all_classes)  # Eq. 6, 7
    grad_links = gradient.gather(1, link_class).mul_(settings.scale * inverse_norms.take(linked))  # (B, k)
    grad_scores.zero_().scatter_(1, linked, grad_links)
    return loss, unlinked, linked, grad_links


def _proxy_loss(scores: Tensor, weight: float, inverse_norms: Tensor, grad_scores: Tensor) -> Tensor:
    """L^p of scores (C, CN), a column for each proxy.

    A weight times its gradient, divided by the norms of the proxies (CN,), goes into grad_scores (C, CN).
    """
    classes, total = scores.shape
    exponentials = torch.mul(scores, 1 / math.log(2), out=grad_scores).exp2_()  # (C, CN), in half the time of exp
    denominators = exponentials.sum(dim=0)  # (CN,)
    own = grad_scores.view(classes, classes, -1).diagonal()  # (N, C): those of the class that each proxy is of
    loss = (own / denominators.view(classes, -1).T).log().mean().neg_()  # Eq. 10, 11
    factor = weight / total * inverse_norms  # (CN,)
    grad_scores *= factor / denominators
    own -= factor.view(classes, -1).T  # P^p - Y^p
    return loss
