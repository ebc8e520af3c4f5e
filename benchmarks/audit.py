"""Wrong labels that `proxygml.tasks.audit` finds, beside cleanlab, and what mending them gains.

    OMP_NUM_THREADS=1 python -m benchmarks.audit --cub FEATURES.npz --glyphs RUN [--only mended] [--quick]

A fraction of the labels is replaced at random: of EfficientNet-Lite0 features of the first 100 species of
CUB-200-2011, and of the test letters of `proxygml train glyphs`, of which its network has seen no label. cleanlab
(which you install yourself) gets probabilities from the same vectors, over five folds: of the ten nearest
neighbors, and of a logistic regression, as it recommends. `ProxyGMLEmbedding` is then fitted to such labels of the
first half of the classes as they are, and after a user has looked at the listed ones; Recall@1 is on the other half.
Rows are added to results/bench/audit.json; --quick uses synthetic features and writes nothing.
"""

import argparse
import warnings
from collections.abc import Iterator

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import normalize

from benchmarks.features import recall, synthetic_features
from benchmarks.profiling import load, save
from proxygml import ProxyGMLEmbedding
from proxygml.embeddings import Embeddings
from proxygml.paper.tables import Table
from proxygml.tasks.audit import doubtful_labels
from proxygml.vectors import open_vectors, read_all

RATES = (0.02, 0.05, 0.1)
SEEDS = 3  # of replaced labels and of `ProxyGMLEmbedding`, for what mending gains


def flipped(labels: np.ndarray, rate: float, seed: int = 0) -> np.ndarray:
    """Labels (M,) of which a fraction is replaced by others, at random."""
    rng, classes = np.random.default_rng(seed), int(labels.max()) + 1
    wrong = rng.random(len(labels)) < rate
    return np.where(wrong, (labels + rng.integers(1, classes, len(labels))) % classes, labels)


def lists(vectors: np.ndarray, labels: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Rows of vectors (M, D) whose labels (M,) look wrong, by each method."""
    margins, _, wrong = doubtful_labels(vectors, labels)
    yield "audit", np.argsort(margins, kind="stable")[:wrong]
    try:
        from cleanlab.filter import find_label_issues
    except ImportError:
        print("cleanlab is not installed, so it is left out: pip install cleanlab")
        return
    models = {
        "neighbors": KNeighborsClassifier(10, weights="distance"),
        "logistic regression": LogisticRegression(C=10),
    }
    for name, model in models.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # small classes, iterations
            probabilities = cross_val_predict(model, vectors, labels, cv=5, method="predict_proba")
            yield f"cleanlab, {name}", np.flatnonzero(find_label_issues(labels, probabilities))


def compare(vectors: np.ndarray, labels: np.ndarray, rate: float) -> Iterator[tuple[str, dict[str, float]]]:
    """Precision and recall of the list of each method."""
    given = flipped(labels, rate)
    wrong = given != labels
    for name, listed in lists(vectors, given):
        hits, count = int(wrong[listed].sum()), int(wrong.sum())
        yield name, {"listed": len(listed), "wrong": count, "precision": hits / len(listed), "recall": hits / count}


def mend(items: Embeddings, rate: float, seed: int) -> list[float]:
    """Recall@1 on the second half of the classes after fitting on the first: with wrong labels, and mended."""
    seen = items.labels < np.median(np.unique(items.labels))
    vectors, labels = items.vectors[seen], items.labels[seen].astype(int)

    def score(given: np.ndarray) -> float:
        fitted = ProxyGMLEmbedding(random_state=seed).fit(vectors, given)
        return recall(fitted.transform(items.vectors[~seen]), items.labels[~seen])

    given = flipped(labels, rate, seed)
    if rate == 0:
        return [score(given)]
    margins, _, wrong = doubtful_labels(normalize(vectors), given)
    listed = np.argsort(margins, kind="stable")[:wrong]
    mended = given.copy()
    mended[listed] = labels[listed]
    return [score(given), score(mended)]


def lists_table(results: dict) -> str:
    cells = [
        (
            *(f"{dataset}, {100 * float(rate):g} %", name, f"{row['listed']} of {row['wrong']}"),
            *(f"{100 * row[key]:.1f}" for key in ("precision", "recall")),
        )
        for dataset, rates in results["lists"].items()
        for rate, rows in sorted(rates.items())
        for name, row in rows.items()
    ]
    return Table(
        ("labels replaced", "method", "listed, of wrong", "precision, %", "recall, %"), tuple(cells)
    ).to_markdown()


def mended_table(results: dict) -> str:
    def described(scores: list[float]) -> str:
        bounds = f" ({min(scores):.1f} to {max(scores):.1f})" if len(scores) > 1 else ""
        return f"{np.mean(scores):.1f}{bounds}"

    cells = []
    for dataset, rates in results["mended"].items():
        (clean,) = zip(*rates["0"].values(), strict=True)
        cells += [
            (
                f"{dataset}, {100 * float(rate):g} %",
                *map(described, zip(*seeds.values(), strict=True)),
                described(clean),
            )
            for rate, seeds in sorted(rates.items())
            if rate != "0"
        ]
    return Table(
        ("labels replaced", "Recall@1, uncorrected", "corrected", "without wrong labels"), tuple(cells)
    ).to_markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cub", help="vectors of CUB-200-2011: an .npz or an index")
    parser.add_argument("--glyphs", help="a run of the preset glyphs")
    parser.add_argument("--only", choices=("lists", "mended"), help="one part")
    parser.add_argument("--quick", action="store_true", help="synthetic features; writes nothing")
    options = parser.parse_args()
    results: dict = {}

    def add(part: str, *keys: str, value: object) -> None:
        if not options.quick:
            results.update(load("audit"))
        place = results.setdefault(part, {})
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        print(part, *keys, value, flush=True)
        if not options.quick:
            save("audit", results | {"seeds": list(range(SEEDS))})

    photos: dict[str, Embeddings] = {}
    letters: dict[str, Embeddings] = {}
    if options.quick:
        vectors, labels = synthetic_features()
        photos["synthetic"] = Embeddings(vectors, labels, np.arange(len(labels)).astype(str))
    elif options.cub is not None:
        photos["CUB-200-2011"] = read_all(open_vectors(options.cub))
    if options.glyphs is not None:
        letters["glyphs"] = read_all(open_vectors(options.glyphs, split="test"))
    measured: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, items in photos.items():
        seen = items.labels < np.median(np.unique(items.labels))
        measured[name] = normalize(items.vectors[seen].astype(np.float32)), items.labels[seen].astype(int)
    for name, items in letters.items():
        measured[name] = items.vectors, items.labels
    for name, (vectors, labels) in measured.items() if options.only != "mended" else ():
        for rate in RATES:
            for method, row in compare(vectors, labels, rate):
                add("lists", name, str(rate), method, value=row)
    rates = (0, 0.1) if options.quick else (0, *RATES)
    for name, items in (photos | letters).items() if options.only != "lists" else ():
        for seed in range(1 if options.quick else SEEDS):
            for rate in rates:
                add("mended", name, str(rate), str(seed), value=mend(items, rate, seed))
    for part, table in (("lists", lists_table), ("mended", mended_table)):
        if part in results:
            print(table(results))


if __name__ == "__main__":
    main()
