"""Many proxies: chunk by chunk, with hand-written gradients over the links.

Autograd would keep a normalized copy of all proxies and several matrices as large as the similarities (B, CN), although
only k of the CN columns of a row have a gradient. docs/performance.md has the times, and what else was tried.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.gradients import Collectives, Gradients, Terms, mask_softmax_loss, project_to_tangent
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.topk import (
    chunk_elements,
    chunks,
    invert_norms,
    nearest_proxies,
    rows_per_chunk,
    topk_in_order,
)

SPARSE_LINKS = 0.1  # of all proxies; up to here sums over links take less time than products of mostly zeros
NO_CLASS = -(2**62)  # below whatever labels of other processes are here


def chunked(
    embeddings: Tensor,
    proxies: Tensor,
    labels: Tensor,
    settings: ProxyGMLSettings,
    links: int,
    pool: BufferPool,
    *,
    differentiate: bool,
    collectives: Collectives | None = None,
    all_classes: int | None = None,
) -> tuple[Terms, Gradients]:
    """Embeddings (B, D) and proxies (C, N, D) of any norm, labels (B,) -> L^s and L^p, and the gradients of L.

    Processes that share `all_classes` have `collectives`; the proxies and labels of each begin at its first class.
    """
    classes, per_class, _ = proxies.shape
    inverse_norms = invert_norms(embeddings)  # (B,)
    samples = embeddings * inverse_norms[:, None]  # (B, D)
    # Eq. 2 to 4: I, and the entries of W that are not 0
    graph = link(samples, proxies, labels, min(links, classes * per_class), settings.positive_bonus, collectives)
    scores, score_class, column = propagate(graph.cosines, graph.linked // per_class, classes)  # Eq. 5: Z = W Y^p
    unmasked = None if settings.mask_softmax else all_classes or classes
    sample_loss, grad_scores, unlinked = mask_softmax_loss(  # Eq. 6, 7: L^s, and its gradient dL^s/dZ
        settings.scale * scores, score_class >= 0, score_class == labels[:, None], unmasked, collectives
    )
    gradients: Gradients = None, None
    if differentiate:  # dL^s/dW: a link moves the score of its class
        gradients = link_gradients(
            samples,
            proxies,
            graph,
            settings.scale * grad_scores.gather(1, column),
            pool,
            sparse=settings.sparse_gradient,
            tangent=settings.proxy_weight == 0,  # otherwise the regularizer projects the gradients of both
        )
        project_to_tangent(gradients[0], embeddings, inverse_norms)
        gradients[0].mul_(inverse_norms[:, None])
    proxy_loss = None
    if settings.proxy_weight > 0:  # Eq. 8 to 11: lambda L^p
        given = proxies, graph.inverse_norms, settings.proxy_rows, settings.proxy_weight, gradients[1]
        weighted = regularizer(*given) if collectives is None else collectives.regularizer(*given)
        proxy_loss = weighted / settings.proxy_weight
    return Terms(sample_loss, proxy_loss, unlinked), gradients


class Links(NamedTuple):
    """The subgraphs of a batch."""

    linked: Tensor  # (B, k): the proxies, counted 0..CN-1, that each sample is linked to, ascending; CN is none
    cosines: Tensor  # (B, k): of sample and proxy
    inverse_norms: Tensor  # (CN,): 1 / norm of every proxy
    complete: bool  # no link is none


def link(
    samples: Tensor,
    proxies: Tensor,
    labels: Tensor,
    links: int,
    positive_bonus: float,
    collectives: Collectives | None = None,
) -> Links:
    """The subgraph of each sample: unit samples (B, D), proxies (C, N, D) of any norm, labels (B,).

    Where other processes have other proxies, `collectives` finds which of those that rank first here, by S + S^pos
    (B, k + 1), rank among the first k of all; of equal ones the first here are its candidates.
    """
    per_class, vectors = proxies.shape[1], proxies.flatten(0, 1)  # (CN, D)
    own = labels[:, None] * per_class + torch.arange(per_class, device=labels.device)  # (B, N)
    if collectives is None:
        return Links(*nearest_proxies(samples, vectors, own, links, positive_bonus), complete=True)
    some = min(links + 1, len(vectors))
    linked, cosines, inverse_norms = nearest_proxies(samples, vectors, own, some, positive_bonus)  # (B, k + 1)
    ranks = cosines + positive_bonus * (linked // per_class == labels[:, None])
    lowest = ranks.topk(min(2, some), largest=False).values  # (B, 2): equal where topk had to choose among equals
    for row in (lowest[:, 0] == lowest[:, -1]).nonzero()[:, 0].tolist() if some < len(vectors) else ():
        linked[row], cosines[row], ranks[row] = topk_in_order(
            samples[row], vectors, inverse_norms, own[row], some, positive_bonus
        )
    linked, order = linked.where(collectives.topk_mask(ranks), len(vectors)).sort(dim=1)  # (B, k + 1)
    return Links(linked, cosines.gather(1, order), inverse_norms, complete=False)


def propagate(similarity: Tensor, classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse label propagation, Eq. 5: what the links of a sample to the proxies of a class add up to.

    Similarity (B, k) and classes (B, k) of the links, ascending, -> scores (B, k) of the classes with a link, which
    these are (B, k), and in which column (B, k) the class of each link is. Columns that a sample does not need are
    NO_CLASS, as is a class that is not below `num_classes`.
    """
    new = classes.diff(dim=1, prepend=classes.new_full((len(classes), 1), -1)) != 0  # (B, k)
    column = new.cumsum(dim=1) - 1  # (B, k)
    scores = torch.zeros_like(similarity).scatter_add_(1, column, similarity)
    score_class = torch.full_like(classes, NO_CLASS).scatter_(1, column, classes)
    return scores, score_class.masked_fill_(score_class == num_classes, NO_CLASS), column


def link_gradients(
    samples: Tensor, proxies: Tensor, links: Links, grad_links: Tensor, pool: BufferPool, *, sparse: bool, tangent: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of samples (B, D) and proxies (C, N, D), by the chain rule from those of the cosines (B, k).

    With g = dL/ds of a link, s = x.p / |p|: dx = sum of g p / |p|; dp = sum of g (x - s p / |p|) / |p|. A `sparse`
    gradient has the rows of linked proxies alone. Unless `tangent`, the radial component of dp is not taken off yet.
    """
    vectors = proxies.flatten(0, 1)  # (CN, D)
    linked, grads, cosines = links.linked.flatten(), grad_links.flatten(), links.cosines.flatten()  # (L,) each
    sample = torch.arange(len(linked), device=linked.device) // links.linked.shape[1]  # (L,), ascending
    if not links.complete:
        there = (linked < len(vectors)).nonzero()[:, 0]
        linked, grads, cosines, sample = (each[there] for each in (linked, grads, cosines, sample))
    weights = grads * links.inverse_norms[linked]  # (L,): g / |p|
    if not sparse and len(linked) > SPARSE_LINKS * len(samples) * len(vectors):
        matrix = weights.new_zeros(len(samples), len(vectors)).index_put_((sample, linked), weights)  # (B, CN)
        proxy_gradient = torch.mm(matrix.T, samples, out=pool.empty(len(vectors), samples))  # (CN, D)
        if tangent:
            project_to_tangent(proxy_gradient, vectors, links.inverse_norms)
        return matrix @ vectors, proxy_gradient.view_as(proxies)

    sample_gradient = _sums_of_rows(vectors, linked, weights, sample.bincount(minlength=len(samples)))  # (B, D)
    radial = None  # (CN,): of each proxy the sum of g s / |p|^2
    if tangent:
        radial = torch.zeros_like(links.inverse_norms).index_add_(0, linked, weights * cosines)
        radial *= links.inverse_norms
    proxy, order = linked.sort()  # (L,): the links of a proxy beside each other
    links_of_rows = samples, sample[order], weights[order]
    if not sparse:
        counts = proxy.bincount(minlength=len(vectors))  # (CN,)
        return sample_gradient, _row_gradients(*links_of_rows, counts, vectors, None, radial, pool).view_as(proxies)
    touched, counts = proxy.unique_consecutive(return_counts=True)  # (T,): the proxies that are linked
    class_and_place = torch.stack([touched // proxies.shape[1], touched % proxies.shape[1]])
    values = _row_gradients(*links_of_rows, counts, vectors, touched, radial, pool)  # (T, D)
    return sample_gradient, torch.sparse_coo_tensor(
        class_and_place, values, proxies.shape, is_coalesced=True, check_invariants=False
    )


def _row_gradients(
    samples: Tensor,
    sample: Tensor,
    weights: Tensor,
    counts: Tensor,
    vectors: Tensor,
    rows: Tensor | None,
    radial: Tensor | None,
    pool: BufferPool,
) -> Tensor:
    """Gradients of these rows of vectors (CN, D), or of all where it is None: sums of samples, less `radial`.

    Sample (L,) and weight (L,) of each link, row by row; `counts` of them for each row.
    """
    if radial is None:
        return _sums_of_rows(samples, sample, weights, counts)
    gradient = pool.empty(len(counts), samples)
    ends = counts.cumsum(0)
    for chunk in chunks(len(counts), rows_per_chunk(vectors)):
        first, last = ends[chunk.start] - counts[chunk.start], ends[chunk.stop - 1]
        sums = _sums_of_rows(samples, sample[first:last], weights[first:last], counts[chunk])
        chosen, factor = (
            each[chunk] if rows is None else each.index_select(0, rows[chunk]) for each in (vectors, radial)
        )
        torch.addcmul(sums, chosen, factor[:, None], value=-1, out=gradient[chunk])
    return gradient


def _sums_of_rows(vectors: Tensor, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Weighted sums of rows (L,) of vectors (P, D), `counts` (sums,) of them after another in each: (sums, D)."""
    return F.embedding_bag(rows, vectors, counts.cumsum(0) - counts, per_sample_weights=weights, mode="sum")


def regularizer(
    proxies: Tensor,
    inverse_norms: Tensor,
    sampled: int | None = None,
    weight: float = 1.0,
    gradient: Tensor | None = None,
) -> Tensor:
    """A weight times L^p, the mean cross-entropy of proxies (C, N, D) that all of them classify; 1 / norm: (CN,).

    With `sampled`, the mean of so many proxies drawn at random, an unbiased estimate; each softmax is over all classes.
    The gradient of the value is added to `gradient` (C, N, D), which is then projected to the tangent space.

    Z^p = (P P^T) Y^p = P (P^T Y^p) takes products with the sums of classes (C, D), no (CN)^2 matrix.
    """
    classes, per_class, _ = proxies.shape
    vectors = proxies.flatten(0, 1)  # (CN, D)
    sums = torch.bmm(inverse_norms.view(classes, 1, per_class), proxies)[:, 0]  # (C, D): P^T Y^p
    everyone = sampled is None or sampled >= len(vectors)
    order = torch.arange(len(vectors), device=vectors.device)
    if not everyone:
        order = torch.randperm(len(vectors), device=vectors.device)[:sampled]
    drawn, scale = (vectors, inverse_norms) if everyone else (vectors[order], inverse_norms[order])
    factor = weight / len(drawn)
    loss = vectors.new_zeros(())
    rows_gradient = None if gradient is None else gradient.flatten(0, 1)  # (CN, D)
    sum_gradient = torch.zeros_like(sums)
    for chunk in chunks(len(drawn), max(1, chunk_elements(vectors) // classes)):
        scores = (drawn[chunk] @ sums.T).mul_(scale[chunk, None])  # (rows, C), Eq. 8, 9: Z^p
        log_probability = scores.log_softmax(dim=1)  # Eq. 10
        own = order[chunk] // per_class  # (rows,)
        loss += factor * F.nll_loss(log_probability, own, reduction="sum")  # Eq. 11
        if rows_gradient is None:
            continue
        error = log_probability.exp_()  # (rows, C): P^p - Y^p, the gradient of Z^p
        error.scatter_add_(1, own[:, None], error.new_full((len(own), 1), -1))
        error *= factor * scale[chunk, None]
        if everyone:
            rows_gradient[chunk].addmm_(error, sums)
        else:
            rows_gradient.index_add_(0, order[chunk], error @ sums)
        sum_gradient.addmm_(error.T, drawn[chunk])
    if gradient is not None and rows_gradient is not None:
        gradient.addcmul_(sum_gradient[:, None], inverse_norms.view(classes, per_class, 1))
        project_to_tangent(rows_gradient, vectors, inverse_norms)
    return loss
