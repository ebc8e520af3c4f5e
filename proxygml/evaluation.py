"""How well an embedding finds and groups classes: exact neighbours, recall@n, R-precision, MAP@R and NMI.

Axes: M images that ask, G items that are searched (the M images themselves, or a gallery), B images of one block,
D embedding, K neighbours. "Hits" (M, K) say which of an image's neighbours, nearest first, share its label;
"positives" (M,), the R of R-precision, how many items that share its label there are to be found.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
from torch import Tensor

ITERATIONS = 25  # of k-means
STARTS = 10  # of which the tightest clustering counts
MOST_CLUSTERS_WITH_RESTARTS = 200  # beyond, ten starts take too long, and with so many clusters they hardly differ


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
    `progress` is told (images done, M) after every block.
    """
    vectors = _matrix(vectors, "vectors", least=1 if gallery is not None else 2)  # (M, D)
    gallery = None if gallery is None else _matrix(gallery, "gallery", width=vectors.shape[1])  # (G, D)
    labels = _integers(labels, len(vectors), "labels")  # (M,)
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("expected gallery and gallery_labels together, but only one came: pass both or neither")
    searched_labels = labels if gallery is None else _integers(gallery_labels, len(gallery), "gallery_labels")  # (G,)
    if any(n < 1 or n != int(n) for n in recall_at):
        raise ValueError(f"expected whole numbers from 1 in recall_at, but {recall_at} came: each counts neighbours")

    itself = int(gallery is None)  # not to be found
    present, count = searched_labels.unique(return_counts=True)  # the labels there are, ascending, and how often
    place = torch.searchsorted(present, labels).clamp_max(len(present) - 1)  # (M,)
    positives = count[place] * (present[place] == labels) - itself  # (M,)
    depth = min(max(1, int(positives.max()), *map(int, recall_at)), len(searched_labels) - itself)  # K

    of_image = torch.empty(len(recall_at) + 2, len(vectors), dtype=torch.float64)  # (metrics, M)
    for asking, indices, _ in _search(vectors, gallery, depth, block):
        hits = searched_labels[indices] == labels[asking, None]  # (B, K)
        of_image[:, asking] = _metrics(hits, positives[asking], recall_at)
        if progress is not None:
            progress(asking.stop, len(vectors))
    *recalls, precision, average_precision = of_image.mean(1).tolist()  # (metrics, M) -> (metrics,)
    agreement, start = nmi(vectors, labels, seed=seed) if cluster else (None, None)
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


def recall_at(hits: Tensor, n: int) -> Tensor:
    """1 for every image with a hit among its n nearest, else 0: hits (M, K) -> (M,)."""
    return hits[:, :n].any(1).double()


def r_precision(hits: Tensor, positives: Tensor) -> Tensor:
    """Share of hits among the R nearest of every image: hits (M, K), positives (M,) -> (M,); 0 where R is 0."""
    counted = hits & (torch.arange(hits.shape[1]) < positives[:, None])  # (M, K)
    return counted.sum(1).double() / positives.clamp_min(1)


def map_at_r(hits: Tensor, positives: Tensor) -> Tensor:
    """Precision at each hit among the R nearest, summed, over R: hits (M, K), positives (M,) -> (M,); 0 where R is 0.

    As in "A Metric Learning Reality Check" (Musgrave et al. 2020); unlike R-precision it sees the order of the hits.
    """
    ranks = torch.arange(1, hits.shape[1] + 1)  # (K,)
    counted = hits & (ranks <= positives[:, None])  # (M, K)
    return (counted.cumsum(1) * counted / ranks.double()).sum(1) / positives.clamp_min(1)


def _metrics(hits: Tensor, positives: Tensor, recall_counts: Sequence[int]) -> Tensor:
    """Every recall@n, R-precision and MAP@R of each image: hits (B, K), positives (B,) -> (metrics, B)."""
    recalls = (recall_at(hits, int(n)) for n in recall_counts)
    return torch.stack([*recalls, r_precision(hits, positives), map_at_r(hits, positives)])


def nmi(vectors: np.ndarray | Tensor, labels: np.ndarray | Tensor, *, seed: int = 0) -> tuple[float, str]:
    """Agreement of k-means clusters, as many as labels, with the labels; and in words how k-means was started.

    Mutual information over the arithmetic mean of both entropies. The start comes back because it moves the value.
    """
    import faiss
    from sklearn.metrics import normalized_mutual_info_score

    vectors = _matrix(vectors, "vectors")  # (M, D)
    labels = _integers(labels, len(vectors), "labels")  # (M,)
    points = vectors - vectors.mean(0)  # (M, D); centred and scaled, so that float32 keeps any spread
    points = (points / points.abs().max().clamp_min(1e-150)).float().numpy()
    clusters = min(len(labels.unique()), len(_first_equal(points).unique()))  # k-means needs as many distinct points
    starts = STARTS if clusters <= MOST_CLUSTERS_WITH_RESTARTS else 1
    random = np.random.default_rng(seed)
    tightest = np.inf
    for _ in range(starts):
        means = faiss.Kmeans(points.shape[1], clusters, niter=ITERATIONS, seed=seed)
        means.cp.min_points_per_centroid = 1  # faiss would warn below 39
        means.cp.max_points_per_centroid = len(points)  # and drop points above 256
        means.train(points, init_centroids=points[_spread_start(points, clusters, random)])
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


def neighbours(
    queries: np.ndarray | Tensor, gallery: np.ndarray | Tensor | None = None, *, count: int, block: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest items of queries (M, D): indices (M, K) and Euclidean distances (M, K), nearest first, K = count.

    Searched is gallery (G, D), or without one the queries themselves, each without itself. Of items equally far the
    lower index comes first. `block` queries are compared at a time; by default as many as fit in 64 MB.
    """
    queries = _matrix(queries, "queries", least=1 if gallery is not None else 2)  # (M, D)
    gallery = None if gallery is None else _matrix(gallery, "gallery", width=queries.shape[1])  # (G, D)
    most = len(queries) - 1 if gallery is None else len(gallery)
    if not 1 <= count <= most:
        raise ValueError(f"expected a count from 1 to {most}, the items to be found, but {count} came: change it")
    indices, distances = np.empty((len(queries), count), np.int64), np.empty((len(queries), count))  # (M, K) each
    for asking, nearest, squared in _search(queries, gallery, count, block):
        indices[asking], distances[asking] = nearest, squared.sqrt()
    return indices, distances


def _search(queries: Tensor, gallery: Tensor | None, count: int, block: int | None) -> Iterator[tuple]:
    """Block by block: the queries' place in (M,), their nearest items (B, K) in order, squared distances (B, K)."""
    searched = queries if gallery is None else gallery  # (G, D)
    block = min(max(2**23 // len(searched), 16), 1024) if block is None else block
    if block < 1:
        raise ValueError(f"expected a block of 1 or more queries, but {block} came: leave it out to have it chosen")
    # |q|²/2 - qg + |g|²/2 cancels least near the origin. The item nearest to the mean is put there, not the mean:
    # differences of integers, and nearly always of float32, are exact in float64, so that ties stay ties.
    origin = searched[(searched - searched.mean(0)).square().sum(1).argmin()]  # (D,)
    searched = searched - origin
    queries = searched if gallery is None else queries - origin
    halves = searched.square().sum(1) / 2  # (G,)
    first = _first_equal(searched.numpy())  # (G,)
    copies = (first != torch.arange(len(first))).nonzero()[:, 0]
    buffer = torch.empty(min(block, len(queries)), len(searched), dtype=torch.float64)  # (B, G); fresh memory is dear
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
        yield slice(start, start + len(asked)), indices.gather(1, order), squared


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
