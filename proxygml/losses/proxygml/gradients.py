"""What the fast implementations share: mask softmax, proxy regularizer and tangent projection, with their gradients.

`loss_and_gradients` is the loss around `fused.sample_loss` or `chunked.sample_loss`.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.definition import NO_POSITIVE_LINK
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.topk import chunk_elements, chunks, invert_norms, rows_per_chunk

Gradients = tuple[Tensor | None, Tensor | None]  # of embeddings (B, D) and proxies (C, N, D); None: not needed


class Terms(NamedTuple):
    """The terms of the last loss, without gradient, for logs."""

    sample_loss: Tensor  # L^s
    proxy_loss: Tensor | None  # L^p; None if proxy_weight is 0
    unlinked_fraction: Tensor  # fraction of samples without a link to a proxy of their own class


class Collectives(Protocol):
    """Operations on all processes, each of which has the proxies of some classes."""

    rank: int
    num_classes: int  # on all processes

    def topk_mask(self, ranks: Tensor) -> Tensor: ...

    def max(self, values: Tensor) -> Tensor: ...

    def sum(self, values: Tensor) -> Tensor: ...

    def shards(self, sums: Tensor) -> Iterable[tuple[int, Tensor]]: ...

    def reduce(self, values: Tensor, owner: int) -> None: ...


class SamplePart(NamedTuple):
    """L^s of a batch and its gradients; that of proxies is projected only if there is no regularizer to do it later."""

    loss: Tensor
    unlinked_fraction: Tensor
    inverse_norms: Tensor  # (CN,): 1 / norm of every proxy
    gradients: Gradients = (None, None)  # of unit samples (B, D) and proxies (C, N, D)


def loss_and_gradients(
    embeddings: Tensor,
    proxies: Tensor,
    labels: Tensor,
    *,
    differentiate: bool,
    sample_loss: Callable[..., SamplePart],
    settings: ProxyGMLSettings,
    links: int,
    pool: BufferPool,
    collectives: Collectives | None = None,
) -> tuple[Terms, Gradients]:
    """L^s and L^p, and the gradients of L: embeddings (B, D) and proxies (C, N, D) of any norm, labels (B,).

    With `collectives`, proxies and labels are relative to the first class of this process.
    """
    inverse_norms = invert_norms(embeddings)  # (B,)
    samples = embeddings * inverse_norms[:, None]  # (B, D)
    part = sample_loss(samples, proxies, labels, settings, links, pool, collectives, differentiate=differentiate)
    sample_gradient, gradient = part.gradients
    if sample_gradient is not None:
        project_to_tangent(sample_gradient, embeddings, inverse_norms)
        sample_gradient.mul_(inverse_norms[:, None])
    proxy_loss, weight = None, settings.proxy_weight
    if weight > 0:
        rows = settings.proxy_rows
        proxy_loss = proxy_regularizer(proxies, part.inverse_norms, rows, weight, gradient, collectives) / weight
    return Terms(part.loss, proxy_loss, part.unlinked_fraction), part.gradients


def mask_softmax_loss(
    scores: Tensor, active: Tensor, own: Tensor, num_classes: int | None = None, collectives: Collectives | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """L^s, its gradient (P - Y^s) / B (B, K) and the fraction of unlinked samples, Eq. 6 and 7.

    Scores (B, K), and which of them are of active classes (B, K) and of the own class (B, K). A sample without a link
    to its own class has P = 0: it costs NO_POSITIVE_LINK and has no gradient. With `num_classes` there is no mask:
    classes without a link have a score of 0, even without a column here.
    """
    own = own.to(scores.dtype) * active  # (B, K): Y^s
    masked = scores.masked_fill(~active, -math.inf)
    highest = masked.amax(dim=1)  # (B,)
    if collectives is not None:
        highest = collectives.max(highest)
    if num_classes is not None:
        linked = active.sum(dim=1)  # (B,)
        unlinked = num_classes - (linked if collectives is None else collectives.sum(linked))
        highest = highest.where(unlinked == 0, highest.clamp_min(0))
    exponentials = (masked - highest[:, None]).exp_()  # (B, K)
    sums = [exponentials.sum(dim=1), (scores * own).sum(dim=1), own.sum(dim=1)]  # (B,) each
    if collectives is not None:
        sums = list(collectives.sum(torch.stack(sums)))
    total, own_score, counted = sums
    unlinked_fraction = 1 - counted.mean()
    if num_classes is not None:
        total, counted = total + unlinked * (-highest.clamp_min(0)).exp(), torch.ones_like(counted)
    losses = (total.log() + highest - own_score).where(counted > 0, NO_POSITIVE_LINK)  # (B,)
    gradient = (exponentials / total[:, None] - own) * (counted / len(scores))[:, None]  # (B, K)
    return losses.mean(), gradient, unlinked_fraction


def proxy_regularizer(
    proxies: Tensor,
    inverse_norms: Tensor,
    rows: int | None = None,
    weight: float = 1.0,
    gradient: Tensor | None = None,
    collectives: Collectives | None = None,
) -> Tensor:
    """Weight times L^p, Eq. 8 to 11: proxies (C, N, D) of any norm, 1 / norm (CN,) -> scalar.

    Z^p = (P P^T) Y^p = P (P^T Y^p) takes products with the class sums (C, D) and no (CN, CN) matrix. With `rows`, the
    mean is over that many random proxies: an unbiased estimate. The gradient is added to `gradient` (C, N, D), which is
    then projected to the tangent space.
    """
    classes, per_class, _ = proxies.shape
    vectors = proxies.flatten(0, 1)  # (CN, D)
    sums = torch.bmm(inverse_norms.view(classes, 1, per_class), proxies)[:, 0]  # (C, D): P^T Y^p
    total = per_class * (classes if collectives is None else collectives.num_classes)
    index, sampled, scale = torch.arange(len(vectors), device=vectors.device), vectors, inverse_norms
    if rows is not None and rows < total:
        index = torch.randperm(len(vectors), device=vectors.device)[: max(1, round(rows * len(vectors) / total))]
        sampled, scale = vectors[index], inverse_norms[index]  # (rows, D), (rows,)
    factor = weight * len(vectors) / (total * len(index))
    labels = index // per_class  # (rows,)
    row_chunks = chunks(len(index), max(1, chunk_elements(vectors) // classes))

    def proxy_scores(shard: Tensor, chunk: slice) -> Tensor:  # (classes of the shard, rows), Eq. 8, 9: Z^p
        return (shard @ sampled[chunk].T).mul_(scale[chunk])

    rank, log_totals = 0, None
    shards: Iterable[tuple[int, Tensor]] = [(rank, sums)]
    if collectives is not None:  # no process has all class sums: a first round for the denominators of Eq. 10
        log_totals = vectors.new_full((len(index),), -math.inf)  # (rows,)
        for _, shard in collectives.shards(sums):
            for chunk in row_chunks:
                log_totals[chunk] = log_totals[chunk].logaddexp(proxy_scores(shard, chunk).logsumexp(dim=0))
        rank = collectives.rank
        shards = [(rank, sums)] if gradient is None else collectives.shards(sums)

    loss = vectors.new_zeros(())
    row_gradient = None if gradient is None else gradient.flatten(0, 1)  # (CN, D)
    for owner, shard in shards:
        shard_gradient = torch.zeros_like(shard)  # (classes of the shard, D)
        for chunk in row_chunks:
            scores = proxy_scores(shard, chunk)
            log_probability = scores.log_softmax(dim=0) if log_totals is None else scores - log_totals[chunk]
            if owner == rank:
                loss -= factor * log_probability.gather(0, labels[None, chunk]).sum()  # Eq. 10, 11
            if row_gradient is None:
                continue
            error = log_probability.exp_()  # P^p - Y^p, the gradient of Z^p
            if owner == rank:
                error.scatter_add_(0, labels[None, chunk], error.new_full((1, error.shape[1]), -1))
            error *= factor * scale[chunk]
            if sampled is vectors:
                row_gradient[chunk].addmm_(error.T, shard)
            else:
                row_gradient.index_add_(0, index[chunk], error.T @ shard)
            shard_gradient.addmm_(error, sampled[chunk])
        if collectives is not None and gradient is not None:
            collectives.reduce(shard_gradient, owner)
        if owner == rank:
            sum_gradient = shard_gradient
    if gradient is not None and row_gradient is not None:
        gradient.addcmul_(sum_gradient[:, None], inverse_norms.view(classes, per_class, 1))
        project_to_tangent(row_gradient, vectors, inverse_norms)
    return loss if collectives is None else collectives.sum(loss)


def project_to_tangent(gradient: Tensor, vectors: Tensor, inverse_norms: Tensor) -> None:
    """Remove the radial component of each row of a gradient (P, D) in place: only directions of vectors matter."""
    for chunk in chunks(len(vectors), rows_per_chunk(vectors)):
        radial = (gradient[chunk] * vectors[chunk]).sum(dim=1) * inverse_norms[chunk].square()  # (rows,)
        gradient[chunk].addcmul_(vectors[chunk], radial[:, None], value=-1)
