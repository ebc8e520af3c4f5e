"""Ranks by counting the items that come before a positive, without sorting or keeping them.

Products in float32 bound distances from below and above. An item of which the bounds do not tell whether it comes
before a positive is compared again in float64; of items equally far the lower index comes first. What is kept grows
with images, items and positives, never with their pairs.

Axes as in ranks.py. "Far" is half a squared distance, |q - g|² / 2.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxygml.evaluation.vectors import checked_block
from proxygml.gathering import sum_over_processes


def count_ranks(
    asking: tuple[Tensor, Tensor],
    searched: tuple[Tensor, Tensor],
    positives: Tensor,
    origin: Tensor,
    depth: int,
    block: int | None,
    process: tuple[int, int],
    progress: Callable[[int, int], None],
) -> Tensor:
    """The ranks (P,) of the positives of all images; vectors and classes of both sides as in `ranks_of_positives`.

    Where both sides are the same, a product serves both of its vectors: only half of all pairs are compared. Of several
    processes each counts in other blocks, and what they have counted is added up.
    """
    rank, processes = process
    alone = asking[0] is searched[0]
    items = _side(*searched, origin)
    images = items if alone else _side(*asking, origin)
    tally = _Tally(images, items, positives, depth)
    # Large blocks need fewer calls; with small ones it shows sooner which items are too far to matter.
    block = checked_block((1024 if len(items.classes) > 2**14 else 512) if block is None else block)
    blocks = [slice(start, start + block) for start in range(0, len(items.classes), block)]
    buffer = torch.empty(min(block, len(images.classes)) * min(block, len(items.classes)))  # fresh memory is dear
    for number, start in enumerate(range(0, len(images.classes), block)):
        if number % processes != rank:
            continue
        rows = slice(start, start + block)
        left = images.rounded[rows]  # (B, D + 2)
        left = torch.cat([-left[:, :-2], left[:, -2:].flip(1)], 1)
        for columns in _met(blocks, number) if alone else blocks:
            right = items.rounded[columns]  # (B, D + 2)
            out = buffer[: len(left) * len(right)].view(len(left), len(right))
            bounds = torch.mm(left, right.T, out=out)  # (B, B)
            row, column = _where(bounds <= tally.reach[rows, None])
            tally.count(row + rows.start, column + columns.start, bounds[row, column])
            if alone and columns != rows:
                row, column = _where(bounds <= tally.reach[columns])
                tally.count(column + columns.start, row + rows.start, bounds[row, column])
        progress(min(rows.stop, len(positives)), len(positives))
    return tally.ranks(processes)


def _met(blocks: list[slice], number: int) -> list[slice]:
    """The blocks that this one is compared with, so that every two meet once and each has the same work, or nearly."""
    met = len(blocks) // 2 + 1 - (len(blocks) % 2 == 0 and number >= len(blocks) // 2)
    return [blocks[(number + step) % len(blocks)] for step in range(met)]


def _where(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every true entry, few among many: (B, B) -> (pairs,) each; torch's nonzero is slower."""
    place = torch.from_numpy(np.flatnonzero(mask.numpy()))  # (pairs,)
    row = place // mask.shape[1]
    return row, place - row * mask.shape[1]


class _Side(NamedTuple):
    """Vectors that ask or are searched, and the same rounded, for products that bound how far apart they are.

    The product of [-q, 1, bound of q] and [g, bound of g, 1] is at most as much as they are apart, and falls short of
    that by no more than the doubts of q and of g.
    """

    vectors: Tensor  # (M, D), float64
    classes: Tensor  # (M,)
    rounded: Tensor  # (M, D + 2), float32: [vector from the origin, bound, 1]
    doubt: Tensor  # (M,)


def _side(vectors: Tensor, classes: Tensor, origin: Tensor) -> _Side:
    """One side of the comparison: vectors (M, D), classes (M,), origin (D,)."""
    # Each of the product's D + 2 terms, and each rounding of what it is made from, adds to the error at most eps / 2 of
    # what is summed, |q||g| + |q|²/2 + |g|²/2 <= |q|² + |g|². 1e-30 is for what float32 cannot hold.
    share = 1.01 * (vectors.shape[1] + 8) * torch.finfo(torch.float32).eps
    rounded = torch.ones(len(vectors), vectors.shape[1] + 2)
    for rows, part in zip(rounded.split(2**12), vectors.split(2**12), strict=True):
        near = part - origin
        rows[:, :-2], rows[:, -2] = near, near.square().sum(1) / 2
    error = share * rounded[:, -2].double() + 1e-30  # (M,)
    rounded[:, -2] -= error
    return _Side(vectors, classes, rounded, 2 * error)


def _far(some: Tensor, others: Tensor) -> Tensor:
    """How far some (..., M, D) are from others (..., G, D), by subtraction: (..., M, G); the same for equal vectors."""
    return torch.cdist(some, others, compute_mode="donot_use_mm_for_euclid_dist").square_().div_(2)


def _keys(image: Tensor, far: Tensor) -> Tensor:
    """Whole numbers that ascend by image and then, as far as float32 tells, by distance: (pairs,) each -> (pairs,)."""
    return (image << 32) + far.float().view(torch.int32)  # the bits of floats from 0 on ascend as they do


class _Tally:
    """Counts the items of other classes that come before the positives of all images.

    An item is counted once, at the first of the positives that it comes before: `gain` (P,) is how much higher a
    positive's rank is than that of the positive before it. `reach` (M,) is how far an item may be and still matter.
    """

    def __init__(self, images: _Side, items: _Side, positives: Tensor, depth: int) -> None:
        self.images, self.items = images, items
        self.end = positives.cumsum(0)  # (M,); where in (P,) an image's positives end
        self.begin = self.end - positives  # (M,)
        self.image = torch.arange(len(positives)).repeat_interleave(positives)  # (P,)
        self.far = torch.empty(len(self.image), dtype=torch.float64)  # (P,)
        self.item = torch.empty(len(self.image), dtype=torch.int64)  # (P,)
        self._find_positives()
        self.keys = _keys(self.image, self.far)  # (P,)
        self.gain = torch.ones(len(self.image), dtype=torch.int64)  # (P,); the positive itself
        self.most = positives[self.image]  # (P,); the highest rank that has to be known
        nearest = self.begin[positives > 0]
        self.most[nearest] = self.most[nearest].clamp_min(depth)
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self.pairs = 0  # that wait, to be counted many at a time
        self.fresh = 0  # items counted since reach was set
        self._set_reach()

    def _find_positives(self) -> None:
        """Sets items and distances of all positives, classes of equal size together."""
        sides = self.images.classes, self.items.classes
        most = 1 + int(torch.cat(sides).max())
        asking, found = (classes.bincount(minlength=most) for classes in sides)  # (C,) each
        image_order, item_order = (classes.argsort(stable=True) for classes in sides)  # (M,), (G,)
        itself = self.images is self.items
        for ask, find in torch.stack([asking, found], 1).unique(dim=0).tolist():
            count = find - itself  # R
            if not ask or not count:
                continue
            alike = ((asking == ask) & (found == find)).nonzero()[:, 0]
            for classes in alike.split(max(1, 2**18 // (self.items.vectors.shape[1] * (ask + find)))):
                image = image_order[(asking.cumsum(0) - ask)[classes, None] + torch.arange(ask)]  # (classes, ask)
                item = item_order[(found.cumsum(0) - find)[classes, None] + torch.arange(find)]  # (classes, find)
                far = _far(self.images.vectors[image], self.items.vectors[item])  # (classes, ask, find)
                if itself:
                    far.diagonal(dim1=1, dim2=2).fill_(torch.inf)  # last, and left out
                far, order = far.sort(dim=2, stable=True)
                place = self.begin[image][:, :, None] + torch.arange(count)  # (classes, ask, R)
                self.far[place] = far[:, :, :count]
                self.item[place] = item[:, None].expand(order.shape).gather(2, order)[:, :, :count]

    def count(self, image: Tensor, item: Tensor, bound: Tensor) -> None:
        """Takes in pairs of an image and an item with the lower bound of how far apart they are: (pairs,) each."""
        self.waiting.append((image, item, bound))
        self.pairs += len(image)
        if self.pairs > 2**15:
            self._count_waiting()
        if 8 * self.fresh > len(self.gain):  # enough to be worth the work
            self._set_reach()

    def _count_waiting(self) -> None:
        image, item, bound = (torch.cat(parts) for parts in zip(*self.waiting, strict=True))  # (pairs,) each
        self.waiting, self.pairs = [], 0
        other = self.images.classes[image] != self.items.classes[item]
        image, item, bound = image[other], item[other], bound[other].double()
        low = (bound * (1 - 2**-22)).clamp_min(0)  # keys are rounded by 2**-24
        place = torch.searchsorted(self.keys, _keys(image, low))  # all positives before it surely come first
        before = place < self.end[image]
        image, item, bound, place = image[before], item[before], bound[before], place[before]
        unsure = self.far[place] <= bound + self.images.doubt[image] + self.items.doubt[item]
        place = torch.cat([place[~unsure], self._exact_place(image[unsure], item[unsure])])
        self.gain.index_add_(0, place, torch.ones_like(place))
        self.fresh += len(place)

    def _exact_place(self, image: Tensor, item: Tensor) -> Tensor:
        """Where in (P,) the first positive is that each item comes before; items that come last are left out."""
        far = torch.empty(len(image), dtype=torch.float64)  # (pairs,)
        few = max(1, 2**16 // self.items.vectors.shape[1])  # as many as a cache holds
        for some, others, out in zip(image.split(few), item.split(few), far.split(few), strict=True):
            asking, found = self.images.vectors.index_select(0, some), self.items.vectors.index_select(0, others)
            out[:] = _far(asking[:, None], found[:, None])[:, 0, 0]  # (few, 1, D) each -> (few,)
        low, high = self.begin[image], self.end[image]
        while (low < high).any():  # bisection
            middle = ((low + high) // 2).clamp_max(len(self.far) - 1)
            later = (self.far[middle] < far) | ((self.far[middle] == far) & (self.item[middle] < item))
            later &= low < high
            low, high = torch.where(later, middle + 1, low), torch.where(later, high, middle)
        return low[low < self.end[image]]

    def _set_reach(self) -> None:
        """Items matter up to the last positive whose rank may still be low enough."""
        far = self.far.where(self._ranks_so_far() <= self.most, -torch.inf) * (1 + 2**-22)  # (P,); rounded up
        reach = torch.full(self.end.shape, -torch.inf, dtype=torch.float64)  # (M,)
        self.reach = reach.scatter_reduce(0, self.image, far, "amax").float()
        self.fresh = 0

    def _ranks_so_far(self) -> Tensor:
        ranks = self.gain.cumsum(0)  # (P,); counted from the first image on
        return ranks - torch.cat([ranks.new_zeros(1), ranks])[self.begin][self.image]

    def ranks(self, processes: int) -> Tensor:
        """The ranks (P,), once all items have come, to this process or to another."""
        if self.waiting:
            self._count_waiting()
        if processes > 1:
            self.gain = 1 + sum_over_processes(self.gain - 1)
        return self._ranks_so_far()
