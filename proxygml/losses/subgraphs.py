"""The two parts of ProxyGML that take time: linking samples to proxies, and classifying the proxies themselves.

Both are equations of proxygml.py with their gradients written out. Autograd would keep a normalised copy of all proxies
and several matrices as large as the similarities (B, CN), although only k of the CN columns of a row have a gradient.
benchmarks/loss.py times them beside the dense equations and beside the matrix products alone; docs/performance.md says
what else was tried.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.losses.nearest import at_a_time, nearest_in_order, nearest_proxies, parts, rows_at_a_time
from proxygml.losses.rooms import Room

FEW_LINKS = 0.1  # of all proxies; up to here sums over links take less time than products of mostly zeros


class Links(NamedTuple):
    """The subgraphs of a batch."""

    linked: Tensor  # (B, k): the proxies, counted 0..CN-1, that each sample is linked to, ascending; CN is none
    cosines: Tensor  # (B, k): of sample and proxy
    inverse_lengths: Tensor  # (CN,): 1 / length of every proxy
    complete: bool  # no link is none


def link(
    samples: Tensor,
    proxies: Tensor,
    labels: Tensor,
    links: int,
    positive_bonus: float,
    among_all: Callable[[Tensor], Tensor] | None = None,
) -> Links:
    """The subgraph of each sample: unit samples (B, D), proxies (C, N, D) of any length, labels (B,).

    Where these are only some of all proxies, `among_all` is told how those that rank first here rank, S + S^pos
    (B, k + 1), and says which of them (B, k + 1) rank among the first k of all; of equal ones it is told of the first.
    """
    per_class, vectors = proxies.shape[1], proxies.flatten(0, 1)  # (CN, D)
    own = labels[:, None] * per_class + torch.arange(per_class, device=labels.device)  # (B, N)
    if among_all is None:
        return Links(*nearest_proxies(samples, vectors, own, links, positive_bonus), complete=True)
    some = min(links + 1, len(vectors))
    linked, cosines, inverse_lengths = nearest_proxies(samples, vectors, own, some, positive_bonus)  # (B, k + 1)
    ranks = cosines + positive_bonus * (linked // per_class == labels[:, None])
    lowest = ranks.topk(min(2, some), largest=False).values  # (B, 2): equal where topk had to choose among equals
    for row in (lowest[:, 0] == lowest[:, -1]).nonzero()[:, 0].tolist() if some < len(vectors) else ():
        linked[row], cosines[row], ranks[row] = nearest_in_order(
            samples[row], vectors, inverse_lengths, own[row], some, positive_bonus
        )
    linked, order = linked.where(among_all(ranks), len(vectors)).sort(dim=1)  # (B, k + 1)
    return Links(linked, cosines.gather(1, order), inverse_lengths, complete=False)


def link_gradients(
    samples: Tensor, proxies: Tensor, links: Links, slopes: Tensor, room: Room, *, sparse: bool, straight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of samples (B, D) and proxies (C, N, D), by the chain rule from those of the cosines (B, k).

    With g = dL/ds of a link, s = x.p / |p|: dx = sum of g p / |p|; dp = sum of g (x - s p / |p|) / |p|. A `sparse`
    gradient has the rows of linked proxies alone. One that is not `straight` lacks the term along p, which
    `straighten` gives it.
    """
    vectors = proxies.flatten(0, 1)  # (CN, D)
    linked, slopes, cosines = links.linked.flatten(), slopes.flatten(), links.cosines.flatten()  # (L,) each
    sample = torch.arange(len(linked), device=linked.device) // links.linked.shape[1]  # (L,), ascending
    if not links.complete:
        there = (linked < len(vectors)).nonzero()[:, 0]
        linked, slopes, cosines, sample = (each[there] for each in (linked, slopes, cosines, sample))
    weights = slopes * links.inverse_lengths[linked]  # (L,): g / |p|
    if not sparse and len(linked) > FEW_LINKS * len(samples) * len(vectors):
        matrix = weights.new_zeros(len(samples), len(vectors)).index_put_((sample, linked), weights)  # (B, CN)
        proxy_gradient = torch.mm(matrix.T, samples, out=room.empty(len(vectors), samples))  # (CN, D)
        if straight:
            straighten(proxy_gradient, vectors, links.inverse_lengths)
        return matrix @ vectors, proxy_gradient.view_as(proxies)

    sample_gradient = _sums_of_rows(vectors, linked, weights, sample.bincount(minlength=len(samples)))  # (B, D)
    along = None  # (CN,): of each proxy the sum of g s / |p|^2
    if straight:
        along = torch.zeros_like(links.inverse_lengths).index_add_(0, linked, weights * cosines)
        along *= links.inverse_lengths
    proxy, order = linked.sort()  # (L,): the links of a proxy beside each other
    links_of_rows = samples, sample[order], weights[order]
    if not sparse:
        counts = proxy.bincount(minlength=len(vectors))  # (CN,)
        return sample_gradient, _row_gradients(*links_of_rows, counts, vectors, None, along, room).view_as(proxies)
    touched, counts = proxy.unique_consecutive(return_counts=True)  # (T,): the proxies that are linked
    class_and_place = torch.stack([touched // proxies.shape[1], touched % proxies.shape[1]])
    values = _row_gradients(*links_of_rows, counts, vectors, touched, along, room)  # (T, D)
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
    along: Tensor | None,
    room: Room,
) -> Tensor:
    """Gradients of these rows of vectors (CN, D), or of all where it is None: sums of samples, less what is `along`.

    Sample (L,) and weight (L,) of each link, row by row; `counts` of them for each row.
    """
    if along is None:
        return _sums_of_rows(samples, sample, weights, counts)
    gradient = room.empty(len(counts), samples)
    ends = counts.cumsum(0)
    for part in parts(len(counts), rows_at_a_time(vectors)):
        first, last = ends[part.start] - counts[part.start], ends[part.stop - 1]
        sums = _sums_of_rows(samples, sample[first:last], weights[first:last], counts[part])
        chosen, factor = (each[part] if rows is None else each.index_select(0, rows[part]) for each in (vectors, along))
        torch.addcmul(sums, chosen, factor[:, None], value=-1, out=gradient[part])
    return gradient


def _sums_of_rows(vectors: Tensor, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Weighted sums of rows (L,) of vectors (P, D), `counts` (sums,) of them after another in each: (sums, D)."""
    return F.embedding_bag(rows, vectors, counts.cumsum(0) - counts, per_sample_weights=weights, mode="sum")


def classify_proxies(
    proxies: Tensor,
    inverse_lengths: Tensor,
    sampled: int | None = None,
    weight: float = 1.0,
    gradient: Tensor | None = None,
    room: Room | None = None,
) -> Tensor:
    """A weight times L^p, the mean cross-entropy of proxies (C, N, D) that all of them classify; 1 / length: (CN,).

    With `sampled`, the mean of so many proxies drawn at random: L^p on average; the classes they are told from are all.
    To `gradient` (C, N, D) is added what the value has, part by part, while the softmax of a part is at hand; and the
    whole is straightened.

    Z^p = (P P^T) Y^p = P (P^T Y^p) takes products with the sums of classes (C, D), no (CN)^2 matrix.
    """
    classes, per_class, _ = proxies.shape
    vectors = proxies.flatten(0, 1)  # (CN, D)
    sums = torch.bmm(inverse_lengths.view(classes, 1, per_class), proxies)[:, 0]  # (C, D): P^T Y^p
    everyone = sampled is None or sampled >= len(vectors)
    order = torch.arange(len(vectors), device=vectors.device)
    if not everyone:
        order = torch.randperm(len(vectors), device=vectors.device)[:sampled]
    drawn, scale = (vectors, inverse_lengths) if everyone else (vectors[order], inverse_lengths[order])
    share = weight / len(drawn)
    loss = vectors.new_zeros(())
    rows_gradient = None if gradient is None else gradient.flatten(0, 1)  # (CN, D)
    sum_gradient = torch.zeros_like(sums)
    for part in parts(len(drawn), max(1, at_a_time(vectors) // classes)):
        scores = (drawn[part] @ sums.T).mul_(scale[part, None])  # (rows, C), Eq. 8, 9: Z^p
        log_probability = scores.log_softmax(dim=1)  # Eq. 10
        own = order[part] // per_class  # (rows,)
        loss += share * F.nll_loss(log_probability, own, reduction="sum")  # Eq. 11
        if rows_gradient is None:
            continue
        error = log_probability.exp_()  # (rows, C): P^p - Y^p, the gradient of Z^p
        error.scatter_add_(1, own[:, None], error.new_full((len(own), 1), -1))
        error *= share * scale[part, None]
        if everyone:
            rows_gradient[part].addmm_(error, sums)
        else:
            rows_gradient.index_add_(0, order[part], error @ sums)
        sum_gradient.addmm_(error.T, drawn[part])
    if gradient is not None and rows_gradient is not None:
        gradient.addcmul_(sum_gradient[:, None], inverse_lengths.view(classes, per_class, 1))
        straighten(rows_gradient, vectors, inverse_lengths, room)
    return loss


def straighten(gradient: Tensor, vectors: Tensor, inverse_lengths: Tensor, room: Room | None = None) -> None:
    """Take from each row of a gradient (P, D) what points along its vector, whose length makes no difference."""
    products = (room or Room()).empty(min(len(vectors), rows_at_a_time(vectors)), vectors)  # (rows, D)
    for part in parts(len(vectors), rows_at_a_time(vectors)):
        product = torch.mul(gradient[part], vectors[part], out=products[: part.stop - part.start])
        along = product.sum(dim=1) * inverse_lengths[part].square()  # (rows,)
        gradient[part].addcmul_(vectors[part], along[:, None], value=-1)
