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

from proxygml.losses.rooms import Room

NUMBERS = 2**20  # of proxies that are multiplied, scaled and projected at a time, while they are in the cache
NUMBERS_ON_GPU = 2**26
HELD = 2**21  # similarities at a time, however many proxies there are: fresh memory costs more time than products do
HELD_ON_GPU = 2**27
FEW_LINKS = 0.1  # of MANY proxies; up to here sums over links take less time than products of mostly zeros
BLOCKS = (16, 8, 4)  # columns of which only the largest takes part in the first round of choosing; all divide the first
MANY = 2**13  # proxies; from here on tiles and two rounds take less time than one product and one round
SHORTEST = 1e-12  # what a vector is divided by at least, as in F.normalize


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
    nearest = _nearest_of_few if len(vectors) < MANY else _nearest_of_many
    if among_all is None:
        return Links(*nearest(samples, vectors, own, links, positive_bonus), complete=True)
    some = min(links + 1, len(vectors))
    linked, cosines, inverse_lengths = nearest(samples, vectors, own, some, positive_bonus)  # (B, k + 1)
    ranks = cosines + positive_bonus * (linked // per_class == labels[:, None])
    lowest = ranks.topk(min(2, some), largest=False).values  # (B, 2): equal where topk had to choose among equals
    for row in (lowest[:, 0] == lowest[:, -1]).nonzero()[:, 0].tolist() if some < len(vectors) else ():
        linked[row], cosines[row], ranks[row] = _nearest_in_order(
            samples[row], vectors, inverse_lengths, own[row], some, positive_bonus
        )
    linked, order = linked.where(among_all(ranks), len(vectors)).sort(dim=1)  # (B, k + 1)
    return Links(linked, cosines.gather(1, order), inverse_lengths, complete=False)


def _nearest_in_order(
    sample: Tensor, vectors: Tensor, inverse_lengths: Tensor, own: Tensor, links: int, positive_bonus: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The k proxies (k,) of one sample (D,) that rank first, of equal ones the first; their cosines and ranks (k,)."""
    cosines = (vectors @ sample).mul_(inverse_lengths)  # (CN,)
    own, here = _within(own, len(vectors))
    ranks = cosines.index_add(0, own, positive_bonus * here.to(cosines.dtype))
    edge = ranks.topk(links, sorted=False).values.amin()
    equal = (ranks == edge).nonzero()[:, 0]
    larger = (ranks > edge).nonzero()[:, 0]
    linked = torch.cat([larger, equal[: links - len(larger)]]).sort().values
    return linked, cosines[linked], ranks[linked]


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
    over_links = sparse or (len(vectors) >= MANY and len(linked) <= FEW_LINKS * len(samples) * len(vectors))
    if not over_links:
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
    for part in parts(len(counts), _rows(vectors)):
        first, last = ends[part.start] - counts[part.start], ends[part.stop - 1]
        sums = _sums_of_rows(samples, sample[first:last], weights[first:last], counts[part])
        chosen, factor = (each[part] if rows is None else each.index_select(0, rows[part]) for each in (vectors, along))
        torch.addcmul(sums, chosen, factor[:, None], value=-1, out=gradient[part])
    return gradient


def _sums_of_rows(vectors: Tensor, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Weighted sums of rows (L,) of vectors (P, D), `counts` (sums,) of them after another in each: (sums, D)."""
    return F.embedding_bag(rows, vectors, counts.cumsum(0) - counts, per_sample_weights=weights, mode="sum")


def _nearest_of_few(
    samples: Tensor, vectors: Tensor, own: Tensor, links: int, positive_bonus: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The k proxies (B, k) of each sample that rank first, ascending, their cosines (B, k), 1 / length of all (CN,).

    Ranked by cosine, to which `positive_bonus` is added for the proxies of a sample's own class, `own` (B, N).
    """
    inverse_lengths = invert_lengths(vectors)
    cosines = (samples @ vectors.T).mul_(inverse_lengths)  # (B, CN), Eq. 2: S
    own, here = _within(own, len(vectors))
    own_cosines = cosines.gather(1, own)  # (B, N)
    cosines.scatter_add_(1, own, positive_bonus * here.to(cosines.dtype))  # Eq. 3: S + S^pos
    linked = cosines.topk(links, sorted=False).indices.sort(dim=1).values  # (B, k), Eq. 4: I
    cosines.scatter_(1, own, own_cosines)  # S again; a difference would round
    return linked, cosines.gather(1, linked), inverse_lengths


def _nearest_of_many(
    samples: Tensor, vectors: Tensor, own: Tensor, links: int, positive_bonus: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same part by part: what has been ranked is forgotten but for the k first so far."""
    total, per_class = len(vectors), own.shape[1]
    inverse_lengths = samples.new_empty(total)
    width = min(total, max(1, at_a_time(vectors) // len(samples)))
    held = _empty_tiles(samples, width)
    own_cosines = samples.new_empty(own.shape)
    nearest, ranks = own[:, :0], samples[:, :0]  # (B, up to k) so far
    for part in parts(total, width):
        values = _cosines(samples, vectors[part], inverse_lengths[part], held)  # (tiles, B, columns of a tile)
        place, here = _within(own - part.start, part.stop - part.start)
        place = _places(values, place)  # (B, N)
        own_cosines = torch.where(here, values.take(place), own_cosines)
        values.view(-1).index_add_(0, place.flatten(), positive_bonus * here.flatten().to(values.dtype))  # Eq. 3
        if ranks.shape[1] < links:
            found, here_ranks = _largest(values, min(links, part.stop - part.start))
        else:  # only what is nearer than the farthest so far can be among the nearest
            found, here_ranks = _larger(values, ranks.amin(1, keepdim=True))
        nearest = torch.cat([nearest, found + part.start], dim=1)
        ranks = torch.cat([ranks, here_ranks], dim=1)
        if ranks.shape[1] > links:
            ranks, kept = ranks.topk(links, sorted=False)
            nearest = nearest.gather(1, kept)
    linked, order = nearest.sort(dim=1)
    place, positive = _within(linked - own[:, :1], per_class)
    cosines = torch.where(positive, own_cosines.gather(1, place), ranks.gather(1, order))  # a difference would round
    return linked, cosines, inverse_lengths


def _within(places: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Places moved into 0..size - 1, and which were there already."""
    moved = places.clamp(0, size - 1)
    return moved, moved == places


def _empty_tiles(samples: Tensor, width: int) -> Tensor:
    """Room for the similarities of samples (B, D) and `width` proxies: (tiles, B, columns of a tile).

    A product in tiles of some hundred columns takes two thirds of the time of a wide one, and the largest entries in
    the same place of some tiles are found along their rows.
    """
    columns = max(1, min(_rows(samples), width) // BLOCKS[0])
    return samples.new_empty(_rounded_up(-(-width // columns)), len(samples), columns)


def _rounded_up(tiles: int) -> int:
    """To as many tiles as whole blocks have."""
    return -(-tiles // BLOCKS[0]) * BLOCKS[0]


def _cosines(samples: Tensor, vectors: Tensor, inverse_lengths: Tensor, tiles: Tensor) -> Tensor:
    """Of unit samples (B, D) and vectors (P, D), in as many of the tiles as it takes, the rest of them -inf.

    1 / length of the vectors goes into (P,). Lengths are made while vectors are in the cache, for the product's sake.
    """
    columns = tiles.shape[2]
    whole = len(vectors) // columns  # tiles
    for part in parts(whole, max(1, _rows(vectors) // columns)):
        rows = slice(part.start * columns, part.stop * columns)
        side = vectors[rows].view(-1, columns, vectors.shape[1])  # (tiles, columns, D)
        invert_lengths(vectors[rows], out=inverse_lengths[rows])
        torch.bmm(samples.expand(len(side), -1, -1), side.transpose(1, 2), out=tiles[part])
        tiles[part] *= inverse_lengths[rows].view(-1, 1, columns)
    rows = slice(whole * columns, len(vectors))  # less than a tile
    tiles = tiles[: _rounded_up(-(-len(vectors) // columns))]
    tiles[whole:] = -torch.inf
    if rows.start < rows.stop:
        invert_lengths(vectors[rows], out=inverse_lengths[rows])
        tiles[whole, :, : rows.stop - rows.start] = (samples @ vectors[rows].T).mul_(inverse_lengths[rows])
    return tiles


def invert_lengths(vectors: Tensor, out: Tensor | None = None) -> Tensor:
    """1 / length of vectors (P, D): (P,)."""
    return torch.linalg.vector_norm(vectors, dim=1, out=out).clamp_min_(SHORTEST).reciprocal_()


def _places(values: Tensor, columns: Tensor) -> Tensor:
    """Where in the memory of values (tiles, B, columns of a tile) the columns (B, K) of each row are: (B, K)."""
    _, batch, width = values.shape
    row = torch.arange(batch, device=columns.device)[:, None]
    return (columns // width * batch + row) * width + columns % width


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Columns (B, count) of the largest entries of each row, in any order, and these: values (tiles, B, columns).

    In two rounds where few are asked for: the blocks with the largest maxima hold all of them.
    """
    tiles, _, columns = values.shape
    size = next((size for size in BLOCKS if tiles * columns >= 4 * count * size), 1)
    if size == 1:
        ranks, found = _along_rows(values).topk(count, sorted=False)
        return found, ranks
    block = _maxima(values, size).topk(count, sorted=False).indices  # (B, count)
    ranks, best = _of_blocks(values, block, size).topk(count, sorted=False)
    return block.gather(1, best % count) + tiles * columns // size * (best // count), ranks


def _larger(values: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Columns (B, some) of all entries of each row that are larger than its edge (B, 1), and these entries.

    As many for every row; others are among them.
    """
    tiles, _, columns = values.shape
    size = BLOCKS[0]
    maxima = _maxima(values, size)
    exceeding = (maxima > edge).nonzero()[:, 0]  # of each such block the row; sum() is slower
    block = maxima.topk(int(exceeding.bincount(minlength=1).amax()), sorted=False).indices  # (B, some)
    first = tiles * columns // size * torch.arange(size, device=block.device)[:, None]
    return (block[:, None] + first).flatten(1), _of_blocks(values, block, size)


def _along_rows(values: Tensor) -> Tensor:
    """(tiles, B, columns) -> (B, tiles * columns)"""
    return values.permute(1, 0, 2).flatten(1)


def _maxima(values: Tensor, size: int) -> Tensor:
    """Of blocks of `size` entries: values (tiles, B, columns) -> (B, blocks). Block j has columns j, j + blocks, ..."""
    return _along_rows(values.unflatten(0, (size, -1)).amax(0))


def _of_blocks(values: Tensor, block: Tensor, size: int) -> Tensor:
    """The entries of blocks (B, count), first those that come first in each: (B, size * count)."""
    step = values.numel() // size * torch.arange(size, device=block.device)[:, None]
    return values.take((_places(values, block)[:, None] + step).flatten(1))


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
    products = (room or Room()).empty(min(len(vectors), _rows(vectors)), vectors)  # (rows, D)
    for part in parts(len(vectors), _rows(vectors)):
        product = torch.mul(gradient[part], vectors[part], out=products[: part.stop - part.start])
        along = product.sum(dim=1) * inverse_lengths[part].square()  # (rows,)
        gradient[part].addcmul_(vectors[part], along[:, None], value=-1)


def at_a_time(vectors: Tensor) -> int:
    """How many similarities are held at a time."""
    return HELD if vectors.device.type == "cpu" else HELD_ON_GPU


def _rows(vectors: Tensor) -> int:
    """How many of them are taken at a time."""
    return max(1, (NUMBERS if vectors.device.type == "cpu" else NUMBERS_ON_GPU) // vectors.shape[1])


def parts(total: int, most: int) -> list[slice]:
    return [slice(first, min(first + most, total)) for first in range(0, total, most)]
