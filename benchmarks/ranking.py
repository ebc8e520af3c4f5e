"""What query expansion, augmentation and re-ranking gain on classes unseen in training, and what they cost.

    OMP_NUM_THREADS=1 python -m benchmarks.ranking --cub FEATURES.npz --cars INDEX --glyphs RUN [--only gain] [--quick]

FEATURES.npz, INDEX and RUN as for `benchmarks.tasks`. An index of 70 % of the photos of each class is asked for the
other 30 %, in three random splits. The constants of proxygml/retrieval/ranking.py and the numbers of neighbors were
chosen on the second quarter of the classes ("choice"), as features and as `ProxyGMLEmbedding` fitted on the first
quarter. "gain" scores them once on the second half; "cost" times searches in the features of all classes and in
synthetic vectors. Writes results/bench/ranking.json; --quick uses synthetic features and writes nothing.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product

import numpy as np

from benchmarks.features import synthetic_features
from benchmarks.profiling import load, save, time_interleaved
from benchmarks.search import synthetic_vectors
from benchmarks.tasks import spaces, subset
from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbors
from proxygml.paper.tables import Table
from proxygml.retrieval import Index
from proxygml.retrieval.ranking import augment, reciprocal_distances, weighted_means
from proxygml.vectors import open_vectors, read_all

SEEDS, QUERY_FRACTION = 3, 0.3
EXPAND, AUGMENT, RERANK = 1, 10, 100
METHODS: dict[str, dict[str, int]] = {
    "plain": {},
    f"expand {EXPAND}": {"expand": EXPAND},
    "expand 5": {"expand": 5},  # a usual number
    f"augment {AUGMENT}": {"augment": AUGMENT},
    f"rerank {RERANK}": {"rerank": RERANK},
    f"expand {EXPAND}, rerank {RERANK}": {"expand": EXPAND, "rerank": RERANK},
    f"expand {EXPAND}, augment {AUGMENT}": {"expand": EXPAND, "augment": AUGMENT},
    f"augment {AUGMENT}, rerank {RERANK}": {"augment": AUGMENT, "rerank": RERANK},
    "all three": {"expand": EXPAND, "augment": AUGMENT, "rerank": RERANK},
}
CHOICE_QUERIES, COUNTED = 400, 100  # queries and ranks for the choice: classes have at most 100 photos in the index
TIMED_QUERIES, SHOWN, LARGE = 50, 10, 100_000


def split(items: Embeddings, seed: int) -> tuple[Embeddings, Embeddings]:
    """An index and queries, of classes with photos in both."""
    asked = np.random.default_rng(seed).random(len(items)) < QUERY_FRACTION  # (M,)
    indexed, queries = subset(items, ~asked), subset(items, asked)
    return indexed, subset(queries, np.isin(queries.labels, indexed.labels))


def scores(found: np.ndarray, indexed: Embeddings, queries: Embeddings) -> tuple[float, float]:
    """Recall@1 and MAP@R in percent of ranked labels (M, K), -1 where there is none."""
    classes, counts = np.unique(indexed.labels, return_counts=True)
    positives = counts[np.searchsorted(classes, queries.labels)]  # (M,): R
    ranks = np.arange(1, found.shape[1] + 1)  # (K,)
    hits = (found == queries.labels[:, None]) & (ranks <= positives[:, None])  # (M, K)
    precision = np.cumsum(hits, axis=1) / ranks  # (M, K)
    return 100 * hits[:, 0].mean(), 100 * ((precision * hits).sum(axis=1) / positives).mean()


def gain(items: Embeddings) -> dict[str, dict[str, list[float]]]:
    """Recall@1 and MAP@R of every method on each split."""
    rows: dict[str, dict[str, list[float]]] = {}
    for seed in range(SEEDS):
        indexed, queries = split(items, seed)
        index, labels = Index.from_embeddings(indexed), dict(zip(indexed.paths, indexed.labels, strict=True))
        count = int(np.unique(indexed.labels, return_counts=True)[1].max())
        for name, options in METHODS.items():
            found = np.full((len(queries), count), -1)
            for row, hits in enumerate(index.search(queries.vectors, count, **options)):
                found[row, : len(hits)] = [labels[hit.path] for hit in hits]
            recall, precision = scores(found, indexed, queries)
            row_of = rows.setdefault(name, {"recall": [], "map_at_r": []})
            row_of["recall"].append(round(recall, 2))
            row_of["map_at_r"].append(round(precision, 2))
    return rows


def cost(items: Embeddings) -> dict[str, dict[str, float]]:
    """Milliseconds per query of every method, in batches; augmentation is done before, and timed alone."""
    indexed, queries = split(items, 0)
    started = time.perf_counter()
    augmented = augment(indexed, AUGMENT)
    seconds = time.perf_counter() - started
    indexes = {False: Index.from_embeddings(indexed), True: Index.from_embeddings(augmented)}
    vectors = queries.vectors[:TIMED_QUERIES]

    def call(options: dict[str, int]) -> Callable[[], object]:
        rest = {name: value for name, value in options.items() if name != "augment"}
        return lambda: indexes["augment" in options].search(vectors, SHOWN, **rest)

    timed = time_interleaved({name: call(options) for name, options in METHODS.items()}, seconds=60)
    per_query = {
        name: {key: round(row[key] / len(vectors), 3) for key in ("ms", "low", "high")} | {"ratio": row["ratio"]}
        for name, row in timed.items()
    }
    return per_query | {"augmenting": {"seconds": round(seconds, 2), "items": len(indexed), "dim": indexed.dim}}


def choice(items: Embeddings) -> dict[str, list[float]]:
    """Recall@1 and MAP@R of settings by name."""
    indexed, queries = split(items, 0)
    queries = subset(queries, np.random.default_rng(0).permutation(len(queries))[:CHOICE_QUERIES])
    paths = np.arange(len(indexed)).astype(str)
    vectors, rows = indexed.vectors, {}

    def ranked(queries: np.ndarray, items: np.ndarray) -> np.ndarray:
        return neighbors(queries, items, count=COUNTED)[0]

    def add(name: str, nearest: np.ndarray) -> None:
        rows[name] = [round(score, 2) for score in scores(indexed.labels[nearest], indexed, queries)]

    plain = ranked(queries.vectors, vectors)  # (Q, K)
    add("plain", plain)
    for count, alpha in product((1, 3, 5, 10), (0, 1, 3)):
        means = weighted_means(queries.vectors, vectors[plain[:, :count]], alpha)
        add(f"expand {count}, alpha {alpha}", ranked(means, vectors))
        augmented = augment(Embeddings(vectors, indexed.labels, paths), count, alpha).vectors
        add(f"augment {count}, alpha {alpha}", ranked(queries.vectors, augmented))
    for k1, k2, weight in product((10, 20, 30), (1, 3, 6), (0.3, 0.5, 0.7)):
        pairs = zip(queries.vectors, plain, strict=True)
        order = [near[np.argsort(reciprocal_distances(query, vectors[near], k1, k2, weight))] for query, near in pairs]
        add(f"rerank {COUNTED}, k1 {k1}, k2 {k2}, lambda {weight}", np.array(order))
    return rows


def gain_table(rows: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """Means over the splits."""
    cells = [
        (
            method,
            *(
                f"{np.mean(row[method]['recall']):.1f} / {np.mean(row[method]['map_at_r']):.1f}"
                for row in rows.values()
            ),
        )
        for method in METHODS
    ]
    return Table(("Recall@1 / MAP@R, %", *rows), tuple(cells)).to_markdown()


def cost_table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    cells = [
        (method, *(f"{row[method]['ms']:.2f} ms ({row[method]['ratio']:.1f})" for row in rows.values()))
        for method in METHODS
    ]
    augmenting = [f"{row['augmenting']['seconds']:.1f} s" for row in rows.values()]
    sizes = [f"{name}, {row['augmenting']['items']:,} x {row['augmenting']['dim']}" for name, row in rows.items()]
    return Table(("search", *sizes), (*cells, ("means for augment, once", *augmenting))).to_markdown()


def choice_table(rows: dict[str, dict[str, list[float]]]) -> str:
    """The best settings of each method, by the mean of both scores over all spaces."""
    means = {name: np.mean([row[name] for row in rows.values()], axis=0) for name in next(iter(rows.values()))}
    best = sorted(means, key=lambda name: -means[name].mean())
    methods = "plain", "expand", "augment", "rerank"
    chosen = [name for method in methods for name in [name for name in best if name.startswith(method)][:5]]
    cells = [(name, *(f"{score:.1f}" for score in means[name])) for name in chosen]
    return Table(("on training classes", "Recall@1, %", "MAP@R, %"), tuple(cells)).to_markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cub", help="vectors of CUB-200-2011: an .npz or an index")
    parser.add_argument("--cars", help="vectors of Cars196: an .npz or an index")
    parser.add_argument("--glyphs", help="a run of the preset glyphs")
    parser.add_argument("--only", choices=("choice", "gain", "cost"), help="one part")
    parser.add_argument("--quick", action="store_true", help="synthetic features; writes nothing")
    options = parser.parse_args()
    located = {"CUB-200-2011": options.cub, "Cars196": options.cars}
    photos = {name: read_all(open_vectors(path)) for name, path in located.items() if path is not None}
    if options.quick:
        vectors, labels = synthetic_features()
        photos["synthetic"] = Embeddings(vectors, labels, np.arange(len(labels)).astype(str))
    results = {} if options.quick else load("ranking")

    def add(part: str, name: str, value: dict) -> None:
        results.setdefault(part, {})[name] = value
        print(part, name, flush=True)
        if not options.quick:
            save("ranking", results | {"seeds": list(range(SEEDS))})

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    for name, items in photos.items() if wanted("choice") else ():
        first = subset(items, items.labels < np.median(np.unique(items.labels)))
        for title, space in spaces(name, first).items():
            add("choice", title, choice(space))
    for name, items in photos.items() if wanted("gain") else ():
        for title, space in spaces(name, items).items():
            add("gain", title, gain(space))
    if options.glyphs is not None:
        photos["glyphs"] = read_all(open_vectors(options.glyphs, split="test"))
        if wanted("gain"):
            add("gain", "glyphs, trained network", gain(photos["glyphs"]))
    if wanted("cost"):
        if not options.quick:
            vectors, _ = synthetic_vectors(True, LARGE)
            photos["clusters of fifty"] = Embeddings(vectors, np.zeros(LARGE, int), np.arange(LARGE).astype(str))
        for name, items in photos.items():
            add("cost", name, cost(items))
    for part, table in (("choice", choice_table), ("gain", gain_table), ("cost", cost_table)):
        if results.get(part):
            print(table(results[part]))


if __name__ == "__main__":
    main()
