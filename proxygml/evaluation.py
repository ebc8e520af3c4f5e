"""How well an embedding finds and groups classes: exact neighbours, recall@n, R-precision, MAP@R and NMI.

Axes: M images that ask, G items that are searched (the M images themselves, or a gallery), B images of one block,
D embedding, K neighbours, C classes. An image's positives are the items that share its label, R of them; all images'
positives, P, stand in one row, image after image and nearest first. Every share follows from the ranks of positives,
and a rank from a count of nearer items, so that nothing is sorted and no more than one block of distances is kept.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ITERATIONS = 25  # of k-means
STARTS = 10  # of which the tightest clustering counts
MANY_CLUSTERS = 200  # beyond, ten starts take too long, and with so many clusters they hardly differ
DRAWN_TOGETHER = 256  # points of a start, beyond that number of clusters
POSITIVES_TOGETHER = 2**22  # bounds the memory where classes are large: 64 bytes each


@dataclass(frozen=True)
class Scores:
    """Shares between 0 and 1, and what they were taken over."""

    recall: dict[int, float]  # n -> share of the images with a hit among their n nearest
    r_precision: float
    map_at_r: float
    nmi: float | None  # None: clustering was not asked for
    images: int
    classes: int
    lone_queries: int  # images whose class nothing else has among what is searched: misses in every share
    nmi_start: str | None  # how k-means was started: NMI depends on it

    def to_json(self) -> dict[str, float | int | str | None]:
        """The scores under flat keys ("recall@1", ..., "nmi", ...), ready for `json.dumps`."""
        rest = asdict(self)
        return {f"recall@{n}": share for n, share in rest.pop("recall").items()} | rest

    @classmethod
    def from_json(cls, entries: dict[str, float | int | str | None]) -> "Scores":
        """The scores that `to_json` wrote."""
        recall = {int(key.removeprefix("recall@")): entries[key] for key in entries if key.startswith("recall@")}
        rest = {key: entries[key] for key in entries if not key.startswith("recall@")}
        expected = {field.name for field in fields(cls)} - {"recall"}
        if wrong := sorted(expected ^ rest.keys()):
            raise ValueError(f"expected recall@n and {sorted(expected)}, but {wrong} differ: pass what to_json wrote")
        return cls(recall=recall, **rest)


def evaluate(
    vectors: np.ndarray | Tensor,
    labels: np.ndarray | Tensor,
    *,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    gallery: np.ndarray | Tensor | None = None,
    gallery_labels: np.ndarray | Tensor | None = None,
    cluster: bool = True,
    seed: int = 0,
    block: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores of vectors (M, D) with integer labels (M,), ranked by Euclidean distance (for unit vectors: by cosine).

    Every image is searched among all others, or in gallery (G, D) with gallery_labels (G,) where that is given; NMI
    is taken over the M images either way. A recall@n with n above the number of items is the recall of all items.
    `progress` is told (images done, M) after every block, and then (iterations done, all) of k-means.
    """
    vectors = _matrix(vectors, "vectors", least=1 if gallery is not None else 2)  # (M, D)
    gallery = None if gallery is None else _matrix(gallery, "gallery", width=vectors.shape[1])  # (G, D)
    labels = _integers(labels, len(vectors), "labels")  # (M,)
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("expected gallery and gallery_labels together, but only one came: pass both or neither")
    searched_labels = labels if gallery is None else _integers(gallery_labels, len(gallery), "gallery_labels")  # (G,)
    if any(n < 1 or n != int(n) for n in recall_at):
        raise ValueError(f"expected whole numbers from 1 in recall_at, but {recall_at} came: each counts neighbours")

    searched = vectors if gallery is None else gallery  # (G, D)
    numbers = torch.cat([labels, searched_labels]).unique(return_inverse=True)[1]  # (M + G,); labels as 0..C-1
    classes, searched_classes = numbers[: len(vectors)], numbers[len(vectors) :]  # (M,), (G,)
    positives = searched_classes.bincount(minlength=len(numbers))[classes] - int(gallery is None)  # (M,); not itself
    depth = int(max(recall_at, default=1))
    of_image = torch.empty(len(recall_at) + 2, len(vectors), dtype=torch.float64)  # (metrics, M)
    for asking, ranks in _ranks(vectors, classes, searched, searched_classes, positives, depth, block, progress):
        of_image[:, asking] = _metrics(ranks, positives[asking], recall_at)
    *recalls, precision, average_precision = of_image.mean(1).tolist()  # (metrics, M) -> (metrics,)
    agreement, start = nmi(vectors, labels, seed=seed, progress=progress) if cluster else (None, None)
    return Scores(
        recall={int(n): share for n, share in zip(recall_at, recalls, strict=True)},
        r_precision=precision,
        map_at_r=average_precision,
        nmi=agreement,
        images=len(vectors),
        classes=len(labels.unique()),
        lone_queries=int((positives == 0).sum()),
        nmi_start=start,
    )


def _metrics(ranks: Tensor, positives: Tensor, recall_counts: Sequence[int]) -> Tensor:
    """Every recall@n, R-precision and MAP@R of each image: ranks (P,), positives (B,) -> (metrics, B); 0 where R is 0.

    R-precision is the share of positives among the R nearest; MAP@R, as in "A Metric Learning Reality Check" (Musgrave
    et al. 2020), the precision at each of them, summed, over R: unlike R-precision it sees their order.
    """
    image = torch.arange(len(positives)).repeat_interleave(positives)  # (P,)
    first = positives.cumsum(0) - positives  # (B,)
    precision = (torch.arange(1, len(ranks) + 1) - first[image]) / ranks.double()  # (P,)
    counted = ranks <= positives[image]  # (P,)
    nearest = torch.full(positives.shape, torch.inf, dtype=torch.float64)  # (B,)
    nearest[positives > 0] = ranks[first[positives > 0]].double()
    shares = torch.zeros(2, len(positives), dtype=torch.float64)  # (2, B)
    shares.index_add_(1, image, torch.stack([counted, counted * precision]).double())
    return torch.stack([*(nearest <= n for n in recall_counts), *(shares / positives.clamp_min(1))])


def _ranks(
    vectors: Tensor,
    classes: Tensor,
    searched: Tensor,
    searched_classes: Tensor,
    positives: Tensor,
    depth: int,
    block: int | None,
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[slice, Tensor]]:
    """Group by group: images, by their place in (M,), and the ranks (P,) of their positives.

    Of a rank above R, or of the nearest positive's above `depth` and R, is only known that it is above. Vectors (M, D)
    and searched (G, D) come with classes from 0; where they are one and the same, no image finds itself.
    """
    alone = vectors is searched
    # Large blocks need fewer calls; with small ones it shows sooner which items are out of reach.
    block = _checked_block((1024 if len(searched) > 2**14 else 512) if block is None else block)
    origin = _middle(searched)  # (D,); near it products cancel least
    largest = max(float((side - origin).abs_().max()) for side in ((vectors,) if alone else (vectors, searched)))
    scale = 2.0 ** np.frexp(largest)[1]  # a power of 2 rounds nothing
    dtype = _product_type(int(positives.max()), vectors.shape[1])
    items = _side(searched, searched_classes, origin, scale, dtype)
    images = items if alone else _side(vectors, classes, origin, scale, dtype)
    groups = (positives.cumsum(0) // POSITIVES_TOGETHER).unique_consecutive(return_counts=True)[1].tolist()
    halved = alone and len(groups) == 1  # every product then serves both of its vectors
    blocks = [slice(at, at + block) for at in range(0, len(searched), block)]
    buffer = torch.empty(min(block, len(vectors)) * min(block, len(searched)), dtype=dtype)  # fresh memory is dear
    done = 0
    for size in groups:
        group = slice(done, done + size)
        asking = _Side(vectors[group], classes[group], scale, images.rounded[group], images.doubt[group])
        tally = _Tally(asking, items, done if alone else None, positives[group], depth)
        for number, start in enumerate(range(0, size, block)):
            rows = slice(start, start + block)
            left = asking.rounded[rows]  # (B, D + 2)
            left = torch.cat([-left[:, :-2], left[:, -2:].flip(1)], 1)
            for columns in _met(blocks, number) if halved else blocks:
                right = items.rounded[columns]  # (B, D + 2)
                out = buffer[: len(left) * len(right)].view(len(left), len(right))
                bounds = torch.mm(left, right.T, out=out)  # (B, B)
                row, column = _where(bounds <= tally.reach[rows, None])
                tally.count(rows, row + rows.start, column + columns.start, bounds[row, column])
                if halved and columns != rows:
                    row, column = _where(bounds <= tally.reach[columns])
                    tally.count(columns, column + columns.start, row + rows.start, bounds[row, column])
            if progress is not None:
                progress(min(done + rows.stop, group.stop), len(vectors))
        yield group, tally.ranks(slice(0, size))
        done = group.stop


def _met(blocks: list[slice], number: int) -> list[slice]:
    """The blocks that one of them is compared with, so that each pair meets once and each block as many, but for one."""
    met = len(blocks) // 2 + 1 - (len(blocks) % 2 == 0 and number >= len(blocks) // 2)
    return [blocks[(number + step) % len(blocks)] for step in range(met)]


def _product_type(most_positives: int, width: int) -> torch.dtype:
    """float32, unless its doubt would leave too many items to be compared again: it grows with both."""
    try:
        exact = torch.get_float32_matmul_precision() == "highest"  # else products may be rounder than float32
    except RuntimeError:  # it was set through newer switches
        exact = False
    return torch.float32 if exact and most_positives * width <= 2**16 else torch.float64


class _Side(NamedTuple):
    """Vectors that are compared, and the same rounded, for products that bound how far apart they are.

    "Far" is |q - g|² / 2 in units of `scale`². The product of [-q, 1, bound] and [g, bound, 1] is at most that, and
    less by `doubt` of q and `doubt` of g at most.
    """

    vectors: Tensor  # (M, D), float64
    classes: Tensor  # (M,), from 0
    scale: float
    rounded: Tensor  # (M, D + 2): [vector from the origin, bound, 1]
    doubt: Tensor  # (M,)


def _side(vectors: Tensor, classes: Tensor, origin: Tensor, scale: float, dtype: torch.dtype) -> _Side:
    """One side of a comparison through products of type `dtype`: vectors (M, D), classes (M,), origin (D,)."""
    # Each term and each rounding adds at most eps / 2 of what is summed, |q||g| + |q|²/2 + |g|²/2 <= |q|² + |g|², to
    # the error; distances by subtraction have their own in float64. 1e-30 is for what float32 cannot hold.
    share = (vectors.shape[1] + 8) * (1.01 * torch.finfo(dtype).eps + torch.finfo(torch.float64).eps)
    rounded = torch.ones(len(vectors), vectors.shape[1] + 2, dtype=dtype)
    for rows, part in zip(rounded.split(2**12), vectors.split(2**12), strict=True):
        part = (part - origin) / scale
        rows[:, :-2], rows[:, -2] = part, part.square().sum(1) / 2
    doubt = share * rounded[:, -2].double() + 1e-30  # (M,)
    rounded[:, -2] -= doubt
    return _Side(vectors, classes, scale, rounded, 2 * doubt)


def _far(some: Tensor, others: Tensor, scale: float) -> Tensor:
    """How far some (..., M, D) are from others (..., G, D), by subtraction: (..., M, G); equal for equal vectors."""
    return torch.cdist(some, others, compute_mode="donot_use_mm_for_euclid_dist").div_(scale).square_().div_(2)


def _keys(image: Tensor, far: Tensor) -> Tensor:
    """Whole numbers that ascend by image and then, as far as float32 tells, by distance: (pairs,) each -> (pairs,)."""
    return (image << 32) + far.float().view(torch.int32)  # the bits of floats from 0 ascend as they do


def _where(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every true entry: (B, B) -> (pairs,) each. Where few are, numpy finds them sooner than torch."""
    place = torch.from_numpy(np.flatnonzero(mask.numpy()))  # (pairs,)
    row = place // mask.shape[1]
    return row, place - row * mask.shape[1]


class _Tally:
    """Counts the items of other classes that are nearer than the positives of some images.

    An item counts once, at the nearest of the positives that it beats: `gain` is how much higher a positive's rank is
    than that of the positive before it. Items beyond `reach` no longer matter: no positive that far has a rank to know.
    """

    def __init__(self, images: _Side, items: _Side, first: int | None, positives: Tensor, depth: int) -> None:
        """The images are items from `first` on (None: from elsewhere); `positives` (B,) and `depth` as in `_ranks`."""
        self.images, self.items = images, items
        self.end = positives.cumsum(0)  # (B,); where in (P,) the positives of an image end
        self.begin = self.end - positives  # (B,)
        self.image = torch.arange(len(positives)).repeat_interleave(positives)  # (P,)
        self.far = torch.empty(len(self.image), dtype=torch.float64)  # (P,)
        self.item = torch.empty(len(self.image), dtype=torch.int64)  # (P,)
        self._find_positives(first)
        self.keys = _keys(self.image, self.far)  # (P,)
        self.gain = torch.ones(len(self.image), dtype=torch.int64)  # (P,); before any item has come
        self.most = positives[self.image]  # (P,); the highest rank to know
        nearest = self.begin[positives > 0]
        self.most[nearest] = self.most[nearest].clamp_min(depth)
        self.reach = torch.empty(len(positives), dtype=images.rounded.dtype)  # (B,)
        self.fresh: Counter[int] = Counter()  # items counted since reach was set, by block
        self._set_reach(slice(0, len(positives)))

    def _find_positives(self, first: int | None) -> None:
        """Distances and items of all positives, exactly, classes of equal size together."""
        images, items = self.images, self.items
        most = 1 + int(max(images.classes.max(), items.classes.max()))
        asking, found = (side.classes.bincount(minlength=most) for side in (images, items))  # (C,) each
        asking_order, found_order = (side.classes.argsort(stable=True) for side in (images, items))  # (B,), (G,)
        for ask, find in torch.stack([asking, found], 1).unique(dim=0).tolist():
            count = find - (first is not None)  # R
            if not ask or count < 1:
                continue
            alike = ((asking == ask) & (found == find)).nonzero()[:, 0]
            for classes in alike.split(max(1, 2**18 // (images.vectors.shape[1] * (ask + find)))):
                image = asking_order[(asking.cumsum(0) - ask)[classes, None] + torch.arange(ask)]  # (classes, ask)
                item = found_order[(found.cumsum(0) - find)[classes, None] + torch.arange(find)]  # (classes, find)
                far = _far(images.vectors[image], items.vectors[item], items.scale)  # (classes, ask, find)
                if first is not None:
                    far[image[:, :, None] + first == item[:, None]] = torch.inf  # itself comes last
                far, order = far.sort(dim=2, stable=True)
                place = self.begin[image][:, :, None] + torch.arange(count)  # (classes, ask, R)
                self.far[place] = far[:, :, :count]
                self.item[place] = item[:, None].expand(order.shape).gather(2, order)[:, :, :count]

    def count(self, block: slice, image: Tensor, item: Tensor, bound: Tensor) -> None:
        """Take in pairs of an image of the block and an item, with the bound of how far apart: (pairs,) each."""
        if not len(image):
            return
        other = self.images.classes[image] != self.items.classes[item]
        image, item, bound = image[other], item[other], bound[other].double()
        part = self._part(block)
        sooner = (bound * (1 - 2**-22)).clamp_min(0)  # float32 rounds keys by 2**-24
        place = torch.searchsorted(self.keys[part], _keys(image, sooner)) + part.start  # the first that may be beaten
        beats = place < self.end[image]
        image, item, bound, place = image[beats], item[beats], bound[beats], place[beats]
        unsure = self.far[place] <= bound + self.images.doubt[image] + self.items.doubt[item]
        place = torch.cat([place[~unsure], self._exact_place(image[unsure], item[unsure])])
        self.gain.index_add_(0, place, torch.ones_like(place))
        self.fresh[block.start] += len(place)
        if 8 * self.fresh[block.start] > part.stop - part.start:  # it pays
            self._set_reach(block)

    def _exact_place(self, image: Tensor, item: Tensor) -> Tensor:
        """The first positive that each item beats, by distance in float64 and then by index: (pairs,) each -> (beats,)."""
        far = torch.empty(len(image), dtype=torch.float64)  # (pairs,)
        few = max(1, 2**16 // self.images.vectors.shape[1])  # what a cache holds
        for some, others, out in zip(image.split(few), item.split(few), far.split(few), strict=True):
            pair = (
                self.images.vectors.index_select(0, some),
                self.items.vectors.index_select(0, others),
            )  # (few, D) each
            out[:] = _far(pair[0][:, None], pair[1][:, None], self.items.scale)[:, 0, 0]
        low, high = self.begin[image], self.end[image]
        while (low < high).any():  # bisection
            middle = ((low + high) // 2).clamp_max(len(self.far) - 1)
            before = (self.far[middle] < far) | ((self.far[middle] == far) & (self.item[middle] < item))
            low, high = torch.where(before & (low < high), middle + 1, low), torch.where(before, high, middle)
        return low[low < self.end[image]]

    def _set_reach(self, block: slice) -> None:
        """How far items can be and still matter to the images of a block."""
        part = self._part(block)
        far = self.far[part].where(self.ranks(block) <= self.most[part], -torch.inf) * (1 + 2**-22)  # (P,); to round up
        reach = torch.full(self.reach[block].shape, -torch.inf, dtype=torch.float64)  # (B,)
        self.reach[block] = reach.scatter_reduce(0, self.image[part] - block.start, far, "amax").to(self.reach.dtype)
        self.fresh[block.start] = 0

    def ranks(self, block: slice) -> Tensor:
        """Ranks (P,) of the positives of a block's images."""
        part = self._part(block)
        ranks = self.gain[part].cumsum(0)  # (P,); from the block's first positive on
        before = torch.cat([ranks.new_zeros(1), ranks])[self.begin[block] - part.start]  # (B,)
        return ranks - before[self.image[part] - block.start]

    def _part(self, block: slice) -> slice:
        """Where in (P,) the positives of a block's images are."""
        return slice(int(self.begin[block][0]), int(self.end[block][-1]))


def nmi(
    vectors: np.ndarray | Tensor,
    labels: np.ndarray | Tensor,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, str]:
    """Agreement of k-means clusters, as many as labels, with the labels; and in words how k-means was started.

    Mutual information over the arithmetic mean of both entropies. The start comes back because it moves the value.
    `progress` is told (iterations done, all).
    """
    import faiss
    from sklearn.metrics import normalized_mutual_info_score

    vectors = _matrix(vectors, "vectors")  # (M, D)
    labels = _integers(labels, len(vectors), "labels")  # (M,)
    points = vectors - vectors.mean(0)  # (M, D); centred and scaled, so that float32 keeps any spread
    points = points.div_(max(float(points.max()), -float(points.min()), 1e-150)).float().numpy()
    clusters = min(len(labels.unique()), len(_first_equal(points).unique()))  # k-means needs as many distinct points
    starts, spread = (STARTS, _spread_start) if clusters <= MANY_CLUSTERS else (1, _spread_start_in_rounds)
    random = np.random.default_rng(seed)
    tightest = np.inf
    for start in range(starts):
        centres, looseness = points[spread(points, clusters, random)], None  # (clusters, D)
        for done in range(1, ITERATIONS + 1):  # one by one, so that progress can be told
            means = faiss.Kmeans(points.shape[1], clusters, niter=1, seed=seed)
            means.cp.min_points_per_centroid = 1  # faiss would warn below 39
            means.cp.max_points_per_centroid = len(points)  # and drop points above 256
            before, looseness = looseness, means.train(points, init_centroids=centres)
            centres = means.centroids  # (clusters, D)
            settled = looseness == before  # where faiss would stop of itself
            if progress is not None:
                progress(start * ITERATIONS + (ITERATIONS if settled else done), starts * ITERATIONS)
            if settled:
                break
        distances, nearest = means.index.search(points, 1)  # (M, 1) each
        if distances.sum() < tightest:
            tightest, assigned = distances.sum(), nearest[:, 0]
    start = f"faiss, {ITERATIONS} iterations, best of {starts} k-means++ start{'s' * (starts > 1)}, seed {seed}"
    return float(normalized_mutual_info_score(labels, assigned, average_method="arithmetic")), start


def _spread_start(points: np.ndarray, clusters: int, random: np.random.Generator) -> list[int]:
    """k-means++: which points (M, D) to start from, each drawn by its squared distance to those before it."""
    lengths = np.einsum("md,md->m", points, points)  # (M,)
    chosen = [int(random.integers(len(points)))]
    squared = np.full(len(points), np.inf)  # (M,) to the nearest chosen
    while len(chosen) < clusters:
        newest = points[chosen[-1]]  # (D,)
        squared = np.minimum(squared, (lengths - 2 * (points @ newest) + newest @ newest).clip(0))
        squared[chosen[-1]] = 0
        chances = squared.cumsum(dtype=np.float64)  # (M,)
        chosen.append(
            int(np.searchsorted(chances, random.uniform(0, chances[-1]), side="right").clip(0, len(points) - 1))
        )
    return chosen


def _spread_start_in_rounds(points: np.ndarray, clusters: int, random: np.random.Generator) -> list[int]:
    """k-means++ as above, in law, but many points at a time: a few products instead of a pass for every cluster.

    Points are drawn by their distance before the round, and each is then kept with the chance that its distance to
    those kept before it is of that (rejection sampling).
    """
    lengths = np.einsum("md,md->m", points, points)  # (M,)
    squared = np.full(len(points), np.inf, np.float32)  # (M,) to the nearest chosen
    chosen, newest = [], [int(random.integers(len(points)))]
    while True:
        chosen += newest
        squared = np.minimum(squared, _squared_distances(points, lengths, newest).min(1, initial=np.inf))
        squared[newest] = 0
        if len(chosen) == clusters:
            return chosen
        chances = squared.cumsum(dtype=np.float64)  # (M,)
        if chances[-1] == 0:  # the others are as good as equal to these
            return [*chosen, *np.setdiff1d(np.arange(len(points)), chosen)[: clusters - len(chosen)]]
        count = min(len(chosen), clusters - len(chosen), DRAWN_TOGETHER)
        drawn = np.searchsorted(chances, random.uniform(0, chances[-1], count), side="right").clip(0, len(points) - 1)
        among = _squared_distances(points[drawn], lengths[drawn], np.arange(count))  # (count, count)
        needed = random.uniform(size=count) * squared[drawn]  # (count,)
        kept = []
        for place in range(count):
            if needed[place] < among[place, kept].min(initial=squared[drawn[place]]):
                kept.append(place)
        newest = drawn[kept].tolist()


def _squared_distances(points: np.ndarray, lengths: np.ndarray, chosen: Sequence[int]) -> np.ndarray:
    """Of points (M, D) with squared lengths (M,) to some of them: (M, chosen)."""
    squared = points @ points[chosen].T  # (M, chosen)
    squared *= -2
    squared += lengths[:, None]
    squared += lengths[chosen]
    return squared.clip(0, out=squared)


def neighbours(
    queries: np.ndarray | Tensor, gallery: np.ndarray | Tensor | None = None, *, count: int, block: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest items of queries (M, D): indices (M, K) and Euclidean distances (M, K), nearest first, K = count.

    Searched is gallery (G, D), or without one the queries themselves, each without itself. Of items equally far the
    lower index comes first. `block` queries are compared at a time; by default as many as fit in 64 MB.
    """
    queries = _matrix(queries, "queries", least=1 if gallery is not None else 2)  # (M, D)
    searched = queries if gallery is None else _matrix(gallery, "gallery", width=queries.shape[1])  # (G, D)
    most = len(searched) - (gallery is None)
    if not 1 <= count <= most:
        raise ValueError(f"expected a count from 1 to {most}, the items to be found, but {count} came: change it")
    block = _checked_block(min(max(2**23 // len(searched), 16), 1024) if block is None else block)
    # |q|²/2 - qg + |g|²/2 cancels least near the origin. Differences of integers, and nearly always of float32, are
    # exact in float64, so that ties stay ties.
    origin = _middle(searched)  # (D,)
    searched = searched - origin
    queries = searched if gallery is None else queries - origin
    halves = searched.square().sum(1) / 2  # (G,)
    first = _first_equal(searched.numpy())  # (G,)
    copies = (first != torch.arange(len(first))).nonzero()[:, 0]
    buffer = torch.empty(min(block, len(queries)), len(searched), dtype=torch.float64)  # (B, G); fresh memory is dear
    nearest, distances = np.empty((len(queries), count), np.int64), np.empty((len(queries), count))  # (M, K) each
    for start in range(0, len(queries), block):
        asked = queries[start : start + block]  # (B, D)
        rank = torch.addmm(halves, asked, searched.T, alpha=-1, out=buffer[: len(asked)])  # (B, G); lacks |q|²/2
        if len(copies):  # a matrix product may round equal columns differently, by their place
            rank[:, copies] = rank[:, first[copies]]
        if gallery is None:
            rank[:, start:].fill_diagonal_(torch.inf)  # the query itself, by its index
        indices = _smallest(rank, count)  # (B, K)
        own = asked.square().sum(1, keepdim=True) / 2  # (B, 1)
        squared = 2 * (rank.gather(1, indices) + own)  # (B, K)
        # Where six digits cancelled, the difference itself is taken: equal vectors are then exactly 0 apart.
        rows, columns = (squared < 1e-6 * (own + halves[indices])).nonzero(as_tuple=True)
        for row, column in zip(rows.split(2**14), columns.split(2**14), strict=True):
            squared[row, column] = (asked[row] - searched[indices[row, column]]).square().sum(1)
        squared, order = squared.sort(dim=1, stable=True)
        nearest[start : start + block], distances[start : start + block] = indices.gather(1, order), squared.sqrt()
    return nearest, distances


def _checked_block(block: int) -> int:
    """The block, if there is anything in it."""
    if block < 1:
        raise ValueError(f"expected a block of 1 or more queries, but {block} came: leave it out to have it chosen")
    return block


def _middle(vectors: Tensor) -> Tensor:
    """Of vectors (M, D) the one nearest to their mean: (D,)."""
    return vectors[torch.linalg.vector_norm(vectors - vectors.mean(0), dim=1).argmin()]


def _smallest(rank: Tensor, count: int) -> Tensor:
    """Where every row's smallest entries are, ascending: rank (B, G) -> (B, K); of equal entries the first."""
    values, indices = rank.topk(min(count + 1, rank.shape[1]), largest=False)  # (B, K + 1); (B, K) if K = G
    indices, edge = indices[:, :count], values[:, count - 1 : count]  # (B, K), (B, 1)
    tied = (values[:, count:] == edge).any(1)  # (B,); topk took any of the entries that equal the edge
    if tied.any():
        nearer, level = rank[tied] < edge[tied], rank[tied] == edge[tied]  # (rows that tie, G)
        chosen = nearer | (level & (level.cumsum(1) <= count - nearer.sum(1, keepdim=True)))
        indices[tied] = chosen.nonzero()[:, 1].view(-1, count)
    return indices.sort(dim=1).values


def _first_equal(vectors: np.ndarray) -> Tensor:
    """Index of the first row equal to each row: vectors (M, D) -> (M,)."""
    seen = {}  # digest -> index; 16 bytes of a row instead of all of it. Adding 0 turns -0 into 0.
    digests = (hashlib.blake2b(vector + 0, digest_size=16).digest() for vector in vectors)
    return torch.tensor([seen.setdefault(digest, place) for place, digest in enumerate(digests)])


def _matrix(vectors: np.ndarray | Tensor, name: str, *, least: int = 1, width: int | None = None) -> Tensor:
    """Finite vectors (M, D) as float64 on the CPU, at least so many and, where it is given, so wide."""
    if isinstance(vectors, Tensor):  # numpy has no bfloat16
        vectors = (vectors.double() if vectors.is_floating_point() else vectors).detach().cpu().numpy()
    vectors = np.asarray(vectors)
    right = vectors.ndim == 2 and vectors.dtype.kind in "fiu" and len(vectors) >= least and vectors.size
    if not right or vectors.shape[1] != (width or vectors.shape[1]):
        shape, came = f"({least} or more, {width or 'dimensions'})", f"{vectors.dtype} of shape {vectors.shape}"
        raise ValueError(f"expected {name} of shape {shape}, real numbers, but {came} came: pass one row per image")
    vectors = np.require(vectors, np.float64, ["C", "W"])
    bad = ~(np.abs(vectors) < 1e150).all(axis=1)  # (M,); squares have to stay finite too
    if bad.any():
        came = f"{bad.sum()} of {len(bad)} rows are not, first row {bad.argmax()}"
        raise ValueError(f"expected finite {name} (no NaN, all below 1e150), but {came}: check what made them")
    return torch.from_numpy(vectors)


def _integers(labels: np.ndarray | Tensor, length: int, name: str) -> Tensor:
    """Labels (M,) as int64; never through floats, which would merge labels above 2**24 or 2**53."""
    labels = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if labels.dtype.kind not in "iu" or labels.shape != (length,):
        came = f"{labels.dtype} of shape {labels.shape}"
        raise ValueError(f"expected {name} of shape ({length},), integers, but {came} came: one integer per vector")
    return torch.from_numpy(labels.astype(np.int64))
