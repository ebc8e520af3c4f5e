"""Exact ranks by counting the items that precede each positive, without sorting or storing all pairs.

A float32 matrix product bounds every distance from below and above. Only where the bounds do not decide whether an item
precedes a positive, the pair is compared again in float64; of items at equal distance the lower index comes first.
Memory grows with queries, items and positives, never with their pairs.

Axes as in ranks.py. A distance is half a squared Euclidean distance here: |q - g|² / 2.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxygml.distributed.collectives import sum_over_processes
from proxygml.evaluation.validation import check_block


def count_ranks(
    queries: tuple[Tensor, Tensor],
    gallery: tuple[Tensor, Tensor],
    positives: Tensor,
    origin: Tensor,
    depth: int,
    block: int | None,
    process: tuple[int, int],
    progress: Callable[[int, int], None],
) -> Tensor:
    """Ranks (P,) of the positives of all queries; both sides are (vectors, classes) as in `ranks_of_positives`.

    If both sides are the same tensor, one product serves both of its vectors: half of all pairs are compared. Each
    process counts in its own blocks, and the counts are summed.
    """
    rank, world_size = process
    same = queries[0] is gallery[0]
    items = _prepare(*gallery, origin)
    images = items if same else _prepare(*queries, origin)
    counter = _RankCounter(images, items, positives, depth)
    # Large blocks need fewer calls; small ones show sooner which items are too far away to matter.
    block = check_block((1024 if len(items.classes) > 2**14 else 512) if block is None else block)
    blocks = [slice(start, start + block) for start in range(0, len(items.classes), block)]
    buffer = torch.empty(min(block, len(images.classes)) * min(block, len(items.classes)))  # reused: allocation is slow
    for number, start in enumerate(range(0, len(images.classes), block)):
        if number % world_size != rank:
            continue
        rows = slice(start, start + block)
        left = images.rounded[rows]  # (B, D + 2)
        left = torch.cat([-left[:, :-2], left[:, -2:].flip(1)], 1)
        for columns in _block_partners(blocks, number) if same else blocks:
            right = items.rounded[columns]  # (B, D + 2)
            out = buffer[: len(left) * len(right)].view(len(left), len(right))
            bounds = torch.mm(left, right.T, out=out)  # (B, B)
            row, column = _nonzero(bounds <= counter.radius[rows, None])
            counter.add(row + rows.start, column + columns.start, bounds[row, column])
            if same and columns != rows:
                row, column = _nonzero(bounds <= counter.radius[columns])
                counter.add(column + columns.start, row + rows.start, bounds[row, column])
        progress(min(rows.stop, len(positives)), len(positives))
    return counter.ranks(world_size)


def _block_partners(blocks: list[slice], number: int) -> list[slice]:
    """The blocks to compare with block `number`: every two meet once, and the work is spread evenly."""
    count = len(blocks) // 2 + 1 - (len(blocks) % 2 == 0 and number >= len(blocks) // 2)
    return [blocks[(number + step) % len(blocks)] for step in range(count)]


def _nonzero(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every true entry: (B, B) -> (pairs,) each. Faster than torch.nonzero for sparse masks."""
    flat = torch.from_numpy(np.flatnonzero(mask.numpy()))  # (pairs,)
    row = flat // mask.shape[1]
    return row, flat - row * mask.shape[1]


class _Side(NamedTuple):
    """Queries or gallery, and their float32 copy for products that bound distances.

    The product of [-q, 1, bound of q] and [g, bound of g, 1] is a lower bound of the distance of q and g. It is too low
    by at most slack of q + slack of g.
    """

    vectors: Tensor  # (M, D), float64
    classes: Tensor  # (M,)
    rounded: Tensor  # (M, D + 2), float32: [vector - origin, bound, 1]
    slack: Tensor  # (M,)


def _prepare(vectors: Tensor, classes: Tensor, origin: Tensor) -> _Side:
    """One side of the comparison: vectors (M, D), classes (M,), origin (D,)."""
    # Each of the product's D + 2 terms, and each rounding of its factors, adds an error of at most eps / 2 times the
    # sum |q||g| + |q|²/2 + |g|²/2 <= |q|² + |g|². 1e-30 covers values below float32's range.
    relative = 1.01 * (vectors.shape[1] + 8) * torch.finfo(torch.float32).eps
    rounded = torch.ones(len(vectors), vectors.shape[1] + 2)
    for rows, part in zip(rounded.split(2**12), vectors.split(2**12), strict=True):
        centered = part - origin
        rows[:, :-2], rows[:, -2] = centered, centered.square().sum(1) / 2
    error = relative * rounded[:, -2].double() + 1e-30  # (M,)
    rounded[:, -2] -= error
    return _Side(vectors, classes, rounded, 2 * error)


def _distances(left: Tensor, right: Tensor) -> Tensor:
    """Distances of left (..., M, D) and right (..., G, D), by subtraction: (..., M, G); equal for equal vectors."""
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist").square_().div_(2)


def _sort_keys(image: Tensor, distance: Tensor) -> Tensor:
    """Integers that ascend by image, then by distance rounded to float32: (pairs,) each -> (pairs,)."""
    return (image << 32) + distance.float().view(torch.int32)  # the bits of non-negative floats sort like the floats


class _RankCounter:
    """Counts the items of other classes that precede the positives of all images.

    Each item is counted once, at the first positive that it precedes: `gain` (P,) is the rank of a positive minus that
    of the positive before it. Items farther away than `radius` (M,) no longer matter.
    """

    def __init__(self, images: _Side, items: _Side, positives: Tensor, depth: int) -> None:
        self.images, self.items = images, items
        self.end = positives.cumsum(0)  # (M,): where an image's positives end in (P,)
        self.begin = self.end - positives  # (M,)
        self.image = torch.arange(len(positives)).repeat_interleave(positives)  # (P,)
        self.distance = torch.empty(len(self.image), dtype=torch.float64)  # (P,)
        self.item = torch.empty(len(self.image), dtype=torch.int64)  # (P,)
        self._find_positives()
        self.keys = _sort_keys(self.image, self.distance)  # (P,)
        self.gain = torch.ones(len(self.image), dtype=torch.int64)  # (P,); 1 is the positive itself
        self.max_rank = positives[self.image]  # (P,): ranks above need not be exact
        nearest = self.begin[positives > 0]
        self.max_rank[nearest] = self.max_rank[nearest].clamp_min(depth)
        self.queue: list[tuple[Tensor, Tensor, Tensor]] = []
        self.queued = 0  # pairs in the queue
        self.counted = 0  # items since the last update of the radius
        self._update_radius()

    def _find_positives(self) -> None:
        """Set items and distances of all positives, batched over classes of equal size."""
        sides = self.images.classes, self.items.classes
        num_classes = 1 + int(torch.cat(sides).max())
        image_counts, item_counts = (classes.bincount(minlength=num_classes) for classes in sides)  # (C,) each
        image_order, item_order = (classes.argsort(stable=True) for classes in sides)  # (M,), (G,)
        same = self.images is self.items
        for n_images, n_items in torch.stack([image_counts, item_counts], 1).unique(dim=0).tolist():
            count = n_items - same  # R
            if not n_images or not count:
                continue
            equal_size = ((image_counts == n_images) & (item_counts == n_items)).nonzero()[:, 0]
            for classes in equal_size.split(max(1, 2**18 // (self.items.vectors.shape[1] * (n_images + n_items)))):
                image = image_order[(image_counts.cumsum(0) - n_images)[classes, None] + torch.arange(n_images)]
                item = item_order[(item_counts.cumsum(0) - n_items)[classes, None] + torch.arange(n_items)]
                distance = _distances(self.images.vectors[image], self.items.vectors[item])  # (classes, images, items)
                if same:
                    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)  # sorted last and left out
                distance, order = distance.sort(dim=2, stable=True)
                position = self.begin[image][:, :, None] + torch.arange(count)  # (classes, images, R)
                self.distance[position] = distance[:, :, :count]
                self.item[position] = item[:, None].expand(order.shape).gather(2, order)[:, :, :count]

    def add(self, image: Tensor, item: Tensor, bound: Tensor) -> None:
        """Queue pairs of an image and an item with the lower bound of their distance: (pairs,) each."""
        self.queue.append((image, item, bound))
        self.queued += len(image)
        if self.queued > 2**15:
            self._count_queued()
        if 8 * self.counted > len(self.gain):
            self._update_radius()

    def _count_queued(self) -> None:
        image, item, bound = (torch.cat(parts) for parts in zip(*self.queue, strict=True))  # (pairs,) each
        self.queue, self.queued = [], 0
        negative = self.images.classes[image] != self.items.classes[item]
        image, item, bound = image[negative], item[negative], bound[negative].double()
        low = (bound * (1 - 2**-22)).clamp_min(0)  # keys are rounded by 2**-24
        position = torch.searchsorted(self.keys, _sort_keys(image, low))  # positives before it certainly come first
        precedes = position < self.end[image]
        image, item, bound, position = image[precedes], item[precedes], bound[precedes], position[precedes]
        unsure = self.distance[position] <= bound + self.images.slack[image] + self.items.slack[item]
        position = torch.cat([position[~unsure], self._exact_position(image[unsure], item[unsure])])
        self.gain.index_add_(0, position, torch.ones_like(position))
        self.counted += len(position)

    def _exact_position(self, image: Tensor, item: Tensor) -> Tensor:
        """Position in (P,) of the first positive that each item precedes; items behind all positives are dropped."""
        distance = torch.empty(len(image), dtype=torch.float64)  # (pairs,)
        chunk = max(1, 2**16 // self.items.vectors.shape[1])  # fits the CPU cache
        for images, items, out in zip(image.split(chunk), item.split(chunk), distance.split(chunk), strict=True):
            left, right = self.images.vectors.index_select(0, images), self.items.vectors.index_select(0, items)
            out[:] = _distances(left[:, None], right[:, None])[:, 0, 0]  # (chunk, 1, D) each -> (chunk,)
        low, high = self.begin[image], self.end[image]
        while (low < high).any():  # bisection
            middle = ((low + high) // 2).clamp_max(len(self.distance) - 1)
            tied = (self.distance[middle] == distance) & (self.item[middle] < item)
            later = ((self.distance[middle] < distance) | tied) & (low < high)
            low, high = torch.where(later, middle + 1, low), torch.where(later, high, middle)
        return low[low < self.end[image]]

    def _update_radius(self) -> None:
        """Items matter up to the last positive with a rank that may still be needed."""
        distance = self.distance.where(self._current_ranks() <= self.max_rank, -torch.inf) * (1 + 2**-22)  # rounded up
        radius = torch.full(self.end.shape, -torch.inf, dtype=torch.float64)  # (M,)
        self.radius = radius.scatter_reduce(0, self.image, distance, "amax").float()
        self.counted = 0

    def _current_ranks(self) -> Tensor:
        ranks = self.gain.cumsum(0)  # (P,), accumulated over all images
        return ranks - torch.cat([ranks.new_zeros(1), ranks])[self.begin][self.image]

    def ranks(self, world_size: int) -> Tensor:
        """Ranks (P,), after all items were added, here or in another process."""
        if self.queue:
            self._count_queued()
        if world_size > 1:
            self.gain = 1 + sum_over_processes(self.gain - 1)
        return self._current_ranks()
