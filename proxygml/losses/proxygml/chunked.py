"""Many proxies: chunk by chunk, with hand-written gradients over the links.

Autograd would keep a normalized copy of all proxies and several matrices of the size of the similarities (B, CN),
although only k of the CN columns of a row have a gradient. docs/performance.md has times and what else we tried.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.gradients import Collectives, SamplePart, mask_softmax_loss, project_to_tangent
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.topk import chunks, nearest_proxies, rows_per_chunk

SPARSE_LINKS = 0.1  # fraction of linked proxies up to which sums over links are faster than matrix products
NO_CLASS = -(2**62)  # less than any label relative to the first class of a process


def sample_loss(
    samples: Tensor,
    proxies: Tensor,
    labels: Tensor,
    settings: ProxyGMLSettings,
    links: int,
    pool: BufferPool,
    collectives: Collectives | None = None,
    *,
    differentiate: bool,
) -> SamplePart:
    """L^s and its gradients: unit samples (B, D), proxies (C, N, D) of any norm, labels (B,)."""
    classes, per_class, _ = proxies.shape
    # Eq. 2 to 4: I and the nonzero entries of W
    graph = link(samples, proxies, labels, min(links, classes * per_class), settings.positive_bonus, collectives)
    scores, active_classes, column = propagate(graph.cosines, graph.linked // per_class, classes)  # Eq. 5: Z = W Y^p
    num_classes = classes if collectives is None else collectives.num_classes
    loss, grad_scores, unlinked = mask_softmax_loss(  # Eq. 6, 7
        settings.scale * scores,
        active_classes >= 0,
        active_classes == labels[:, None],
        None if settings.mask_softmax else num_classes,
        collectives,
    )
    if not differentiate:
        return SamplePart(loss, unlinked, graph.inverse_norms)
    gradients = link_gradients(
        samples,
        proxies,
        graph,
        settings.scale * grad_scores.gather(1, column),
        pool,
        sparse=settings.sparse_gradient,
        tangent=settings.proxy_weight == 0,
    )
    return SamplePart(loss, unlinked, graph.inverse_norms, gradients)


class Links(NamedTuple):
    """The subgraphs of a batch."""

    linked: Tensor  # (B, k): indices 0..CN-1 of the linked proxies, ascending; CN: no link
    cosines: Tensor  # (B, k)
    inverse_norms: Tensor  # (CN,): 1 / norm of every proxy
    complete: bool  # every sample has k links here


def link(
    samples: Tensor,
    proxies: Tensor,
    labels: Tensor,
    links: int,
    positive_bonus: float,
    collectives: Collectives | None = None,
) -> Links:
    """The subgraph of each sample: unit samples (B, D), proxies (C, N, D) of any norm, labels (B,).

    With `collectives`, each process proposes its first k proxies by S + S^pos.
    """
    per_class, vectors = proxies.shape[1], proxies.flatten(0, 1)  # (CN, D)
    own = labels[:, None] * per_class + torch.arange(per_class, device=labels.device)  # (B, N)
    linked, cosines, inverse_norms = nearest_proxies(samples, vectors, own, links, positive_bonus)  # (B, k) each
    if collectives is None:
        return Links(linked, cosines, inverse_norms, complete=True)
    ranks = cosines + positive_bonus * (linked // per_class == labels[:, None])
    linked, order = linked.where(collectives.topk_mask(ranks), len(vectors)).sort(dim=1)
    return Links(linked, cosines.gather(1, order), inverse_norms, complete=False)


def propagate(cosines: Tensor, classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse label propagation, Eq. 5: cosines (B, k) and classes (B, k) of the links, ascending.

    Returns the scores (B, k) of the active classes, these classes (B, k), and the column (B, k) of each link's class.
    Unused columns, and classes that are not below `num_classes`, are NO_CLASS.
    """
    new = classes.diff(dim=1, prepend=classes.new_full((len(classes), 1), -1)) != 0  # (B, k)
    column = new.cumsum(dim=1) - 1  # (B, k)
    scores = torch.zeros_like(cosines).scatter_add_(1, column, cosines)
    active_classes = torch.full_like(classes, NO_CLASS).scatter_(1, column, classes)
    return scores, active_classes.masked_fill_(active_classes == num_classes, NO_CLASS), column


def link_gradients(
    samples: Tensor, proxies: Tensor, links: Links, grad_links: Tensor, pool: BufferPool, *, sparse: bool, tangent: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of samples (B, D) and proxies (C, N, D), by the chain rule from those of the cosines (B, k).

    With g = dL/ds of a link, s = x.p / |p|: dx = sum of g p / |p|; dp = sum of g (x - s p / |p|) / |p|. A `sparse`
    gradient has only the rows of linked proxies. Without `tangent`, dp keeps its radial component.
    """
    vectors = proxies.flatten(0, 1)  # (CN, D)
    linked, grads, cosines = links.linked.flatten(), grad_links.flatten(), links.cosines.flatten()  # (L,) each
    sample = torch.arange(len(linked), device=linked.device) // links.linked.shape[1]  # (L,), ascending
    if not links.complete:
        valid = (linked < len(vectors)).nonzero()[:, 0]
        linked, grads, cosines, sample = (values[valid] for values in (linked, grads, cosines, sample))
    weights = grads * links.inverse_norms[linked]  # (L,): g / |p|
    if not sparse and len(linked) > SPARSE_LINKS * len(samples) * len(vectors):
        matrix = weights.new_zeros(len(samples), len(vectors)).index_put_((sample, linked), weights)  # (B, CN)
        gradient = torch.mm(matrix.T, samples, out=pool.empty(len(vectors), samples))  # (CN, D)
        if tangent:
            project_to_tangent(gradient, vectors, links.inverse_norms)
        return matrix @ vectors, gradient.view_as(proxies)

    sample_gradient = _segment_sums(vectors, linked, weights, sample.bincount(minlength=len(samples)))  # (B, D)
    proxy, order = linked.sort()  # (L,): grouped by proxy
    rows = None
    if sparse:
        rows, counts = proxy.unique_consecutive(return_counts=True)  # (R,): the linked proxies
    else:
        counts = proxy.bincount(minlength=len(vectors))  # (CN,)
    sample, link_weights = sample[order], weights[order]  # (L,) each
    if not tangent:
        return sample_gradient, _segment_sums(samples, sample, link_weights, counts).view_as(proxies)

    radial = torch.zeros_like(links.inverse_norms).index_add_(0, linked, weights * cosines)  # (CN,)
    radial *= links.inverse_norms  # sum of g s / |p|^2
    gradient = pool.empty(len(counts), samples)  # (CN or R, D)
    ends = counts.cumsum(0)
    for chunk in chunks(len(counts), rows_per_chunk(vectors)):
        first, last = ends[chunk.start] - counts[chunk.start], ends[chunk.stop - 1]
        sums = _segment_sums(samples, sample[first:last], link_weights[first:last], counts[chunk])
        chosen, factor = (
            values[chunk] if rows is None else values.index_select(0, rows[chunk]) for values in (vectors, radial)
        )
        torch.addcmul(sums, chosen, factor[:, None], value=-1, out=gradient[chunk])
    if rows is None:
        return sample_gradient, gradient.view_as(proxies)
    indices = torch.stack([rows // proxies.shape[1], rows % proxies.shape[1]])  # (2, R)
    return sample_gradient, torch.sparse_coo_tensor(
        indices, gradient, proxies.shape, is_coalesced=True, check_invariants=False
    )


def _segment_sums(vectors: Tensor, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Weighted sums of consecutive segments of rows (L,) of vectors (P, D), with lengths `counts` (S,): (S, D)."""
    return F.embedding_bag(rows, vectors, counts.cumsum(0) - counts, per_sample_weights=weights, mode="sum")
