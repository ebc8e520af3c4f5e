"""What `proxygml.tasks` achieves on photos of classes that no network was trained on.

    OMP_NUM_THREADS=1 python -m benchmarks.tasks --cub FEATURES.npz --cars INDEX --glyphs RUN [--only unknown] [--quick]

FEATURES.npz and INDEX have EfficientNet-Lite0 features of CUB-200-2011 and of Cars196 (docs/tasks.md has the commands).
`ProxyGMLEmbedding` is fitted on the first half of their classes; RUN is `proxygml train glyphs`. Everything is measured
on the other classes. Rows are added to results/bench/tasks.json; --quick uses synthetic features and writes nothing.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from sklearn.preprocessing import normalize

from benchmarks.features import synthetic_features
from benchmarks.profiling import load, save
from proxygml import ProxyGMLEmbedding
from proxygml.embeddings import Embeddings
from proxygml.evaluation.intervals import auroc
from proxygml.paper.tables import Table
from proxygml.retrieval import Index
from proxygml.tasks.calibrate import calibrate, calibration_error
from proxygml.tasks.classify import classify
from proxygml.tasks.cluster import agreement, find_clusters
from proxygml.vectors import open_vectors, read_all

SEEDS = 3
FEW, TESTED = (2, 5, 20), 30  # classes to calibrate on, and unknown ones


def subset(items: Embeddings, rows: np.ndarray) -> Embeddings:
    """The items in rows (M,), by number or mask."""
    return replace(items, vectors=items.vectors[rows], labels=items.labels[rows], paths=items.paths[rows])


def spaces(name: str, items: Embeddings) -> dict[str, Embeddings]:
    """The second half of the classes, as features and as `ProxyGMLEmbedding` fitted on the first half; unit vectors."""
    seen = items.labels < np.median(np.unique(items.labels))
    fitted = ProxyGMLEmbedding(random_state=0).fit(items.vectors[seen], items.labels[seen])
    unseen = subset(items, ~seen)
    vectors = {"features": unseen.vectors, "ProxyGMLEmbedding": fitted.transform(unseen.vectors)}
    return {f"{name}, {each}": replace(unseen, vectors=normalize(vectors[each])) for each in vectors}


def unknown(items: Embeddings, seeds: int = SEEDS) -> dict[str, list[float]]:
    """An index of half of the classes, calibrated by itself, is asked for new images of these and of the other half."""
    rows: dict[str, list[float]] = {}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        halves = np.array_split(rng.permutation(np.unique(items.labels)), 2)
        new = rng.random(len(items)) < 0.3
        for half in halves:
            own = np.isin(items.labels, half)
            indexed, known, others = (subset(items, mask) for mask in (own & ~new, own & new, ~own))
            measured = calibrate(indexed)
            index = Index.from_embeddings(indexed)
            answers = [classify(index, each.vectors, measured.calibration) for each in (known, others)]
            plain = classify(index, known.vectors)
            ours, theirs = (np.array([answer.score for answer in each]) for each in answers)
            nearest = [[hits[0].similarity for hits in index.search(each.vectors, 1)] for each in (known, others)]
            right = np.array(
                [
                    each.candidates[0].label == known.class_name(label)
                    for each, label in zip(plain, known.labels, strict=True)
                ]
            )
            before, after = (
                np.array([answer.candidates[0].probability for answer in each]) for each in (plain, answers[0])
            )
            values = {
                "auroc": auroc(ours, theirs),
                "auroc_similarity": auroc(*map(np.array, nearest)),
                "accepted": np.mean([answer.label is not None for answer in answers[1]]),
                "refused": np.mean([answer.label is None for answer in answers[0]]),
                "refused_at_5": np.mean(ours < np.quantile(theirs, 0.95)),
                "accuracy": right.mean(),
                "error_before": calibration_error(before, right),
                "error_after": calibration_error(after, right),
            }
            for name, value in values.items():
                rows.setdefault(name, []).append(round(100 * float(value), 2))
    return rows


def unknown_table(rows: dict[str, dict[str, list[float]]]) -> str:
    columns = {
        "auroc": "AUROC",
        "auroc_similarity": "of the similarity alone",
        "accepted": "unknown accepted (1 wanted)",
        "refused": "known refused",
        "accuracy": "right class",
        "error_before": "calibration error before",
        "error_after": "after",
    }
    cells = [(name, *(f"{np.mean(row[key]):.1f}" for key in columns)) for name, row in rows.items()]
    return Table(("%", *columns.values()), tuple(cells)).to_markdown()


def few(items: Embeddings, repeats: int = 20) -> dict[str, dict[str, float]]:
    """Calibrated on a few classes for 5 % of false accepts: how many unknown images of 30 others are accepted."""
    rows, every = {}, np.unique(items.labels)
    for count in (number for number in FEW if number + TESTED <= len(every)):
        measured = []
        for repeat in range(repeats):
            chosen = np.random.default_rng(repeat).permutation(every)
            own, others = chosen[:count], chosen[-TESTED:]
            indexed, unknown = (subset(items, np.isin(items.labels, each)) for each in (own, others))
            found = calibrate(indexed, false_accepts=0.05)
            answers = classify(Index.from_embeddings(indexed), unknown.vectors, found.calibration)
            accepted = np.mean([answer.label is not None for answer in answers])
            low, high = found.false_accepts_interval
            measured.append((found.calibration.false_accepts, low, high, accepted, low <= accepted <= high))
        names = ("measured", "low", "high", "accepted", "covered")
        rows[str(count)] = dict(zip(names, np.mean(measured, axis=0).tolist(), strict=True))
        rows[str(count)]["most"] = float(max(accepted for *_, accepted, _ in measured))
    return rows


def few_table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    cells = [
        (
            name,
            count,
            f"{100 * row['measured']:.1f} ({100 * row['low']:.1f} to {100 * row['high']:.1f})",
            f"{100 * row['accepted']:.1f}",
            f"{100 * row['most']:.1f}",
            f"{100 * row['covered']:.0f}",
        )
        for name, counts in rows.items()
        for count, row in counts.items()
    ]
    columns = ("%", "classes", "accepted by calibrate", "of new classes", "at most", "interval covers")
    return Table(columns, tuple(cells)).to_markdown()


def clusters(items: Embeddings) -> dict[str, dict[str, float]]:
    """Agreement with the labels of as many k-means clusters as classes, and of HDBSCAN."""
    rows = {}
    for name, count in (("k-means", len(np.unique(items.labels))), ("HDBSCAN", None)):
        started = time.process_time()
        found = find_clusters(items.vectors, count)
        rows[name] = agreement(items.labels, found) | {"seconds": time.process_time() - started}
        rows[name] |= {"clusters": int(found.max()) + 1, "classes": len(np.unique(items.labels))}
        rows[name] |= {"clustered": float(np.mean(found >= 0))}
        inside = agreement(items.labels[found >= 0], found[found >= 0])
        rows[name] |= {"clustered_ami": inside["ami"]}
    return rows


def clusters_table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    keys = ("nmi", "ami", "b_cubed", "clustered", "clustered_ami")
    cells = [
        (f"{name}, {method}", f"{row['clusters']} of {row['classes']}", *(f"{100 * row[key]:.1f}" for key in keys))
        for name, methods in rows.items()
        for method, row in methods.items()
    ]
    columns = ("%", "clusters, classes", "NMI", "AMI", "B-cubed F1", "images in clusters", "AMI of these")
    return Table(columns, tuple(cells)).to_markdown()


PARTS: dict[str, tuple[Callable[[Embeddings], dict], Callable[[dict], str]]] = {
    "unknown": (unknown, unknown_table),
    "few": (few, few_table),
    "clusters": (clusters, clusters_table),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cub", help="vectors of CUB-200-2011: an .npz or an index")
    parser.add_argument("--cars", help="vectors of Cars196: an .npz or an index")
    parser.add_argument("--glyphs", help="a run of the preset glyphs")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--quick", action="store_true", help="synthetic features; writes nothing")
    options = parser.parse_args()
    measured: dict[str, Embeddings] = {}
    if options.quick:
        vectors, labels = synthetic_features()
        measured = spaces("synthetic", Embeddings(vectors, labels, np.arange(len(labels)).astype(str)))
    for name, location in (("CUB-200-2011", options.cub), ("Cars196", options.cars)):
        if location is not None:
            measured |= spaces(name, read_all(open_vectors(location)))
    if options.glyphs is not None:
        measured["glyphs, trained network"] = read_all(open_vectors(options.glyphs, split="test"))
    results = {} if options.quick else load("tasks")
    for part in PARTS if options.only is None else [options.only]:
        measure, table = PARTS[part]
        for name, items in measured.items():
            results.setdefault(part, {})[name] = measure(items)
        print(table(results[part]), flush=True)
    if not options.quick:
        print(f"written: {save('tasks', results | {'seeds': list(range(SEEDS))})}")


if __name__ == "__main__":
    main()
