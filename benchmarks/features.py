"""Recall@1 on feature vectors of unseen classes: `ProxyGMLEmbedding`, scikit-learn and metric-learn.

    python -m benchmarks.features [--data FEATURES.npz] [--quick]

Fits on the first half of the classes and evaluates on the second half by cosine, by default on EfficientNet-Lite0
features of CUB-200-2011. LFDA and LMNN get 128 principal components. Writes results/bench/features.json and
features.png; --quick uses synthetic features and writes nothing.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NeighborhoodComponentsAnalysis
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import normalize

from benchmarks.profiling import RESULTS, save
from proxygml import ProxyGMLEmbedding
from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbors
from proxygml.files import atomic_write
from proxygml.paper.tables import Table

DATA = Path("../shared/data/cub_efficientnet_lite0.npz")
REDUCED = 64  # dimensions
SEEDS = 3


def contenders(width: int) -> dict[str, Callable[[int], object]]:
    """Functions from a seed to a transformer, by name; `width` is the dimension of the features."""
    reduced, components = min(REDUCED, width // 2), min(128, width)
    lfda, lmnn = metric_learn()
    return {
        "PCA whitening": lambda seed: PCA(whiten=True, random_state=seed),
        "LDA, shrunk": lambda seed: LinearDiscriminantAnalysis(solver="eigen", shrinkage="auto"),
        "ProxyGMLEmbedding": lambda seed: ProxyGMLEmbedding(random_state=seed),
        f"PCA, {reduced} dimensions": lambda seed: PCA(reduced, random_state=seed),
        f"NCA, {reduced} dimensions": lambda seed: NeighborhoodComponentsAnalysis(
            reduced, init="pca", max_iter=50, random_state=seed
        ),
        f"LFDA of {components} components, {reduced} dimensions": lambda seed: make_pipeline(
            PCA(components, random_state=seed), lfda(n_components=reduced)
        ),
        f"LMNN of {components} components, {reduced} dimensions": lambda seed: make_pipeline(
            PCA(components, random_state=seed), lmnn(n_components=reduced, init="pca", max_iter=50, random_state=seed)
        ),
        f"ProxyGMLEmbedding, {reduced} dimensions": lambda seed: ProxyGMLEmbedding(reduced, random_state=seed),
    }


def metric_learn() -> tuple[type, type]:
    """LFDA and LMNN, patched: metric-learn 0.7 passes force_all_finite, since scikit-learn 1.6 ensure_all_finite."""
    import metric_learn._util as checks
    from metric_learn import LFDA, LMNN

    def patched(check: Callable) -> Callable:
        return lambda *args, force_all_finite=True, **kwargs: check(*args, ensure_all_finite=force_all_finite, **kwargs)

    checks.check_array, checks.check_X_y = patched(checks.check_array), patched(checks.check_X_y)
    return LFDA, LMNN


def recall(vectors: np.ndarray, labels: np.ndarray, *, cosine: bool = True) -> float:
    """Recall@1 by cosine or Euclidean distance, in percent: vectors (M, D), labels (M,)."""
    nearest, _ = neighbors(normalize(vectors) if cosine else vectors, count=1)
    return 100 * float(np.mean(labels[nearest[:, 0]] == labels))


def synthetic_features() -> tuple[np.ndarray, np.ndarray]:
    """Features (M, 32) of 40 classes that differ in 8 dimensions and vary more in the others; labels (M,)."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(40), 15)
    centers = rng.normal(size=(40, 32)) * (np.arange(32) < 8)
    return centers[labels] + rng.normal(size=(len(labels), 32)) * np.where(np.arange(32) < 8, 0.5, 2), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="an .npz with vectors and labels")
    parser.add_argument("--quick", action="store_true", help="synthetic features, one seed; writes nothing")
    options = parser.parse_args()
    if options.quick:
        features, labels = synthetic_features()
    else:
        loaded = Embeddings.load(options.data)
        features, labels = loaded.vectors.astype(np.float32), loaded.labels
    seen = labels < np.median(np.unique(labels))
    rows = {
        name: {"recall": [recall(features[~seen], labels[~seen], cosine=cosine)], "seconds": [0.0]}
        for name, cosine in (("raw features", True), ("raw features, Euclidean distance", False))
    }
    for name, build in contenders(features.shape[1]).items():
        row: dict[str, list[float]] = {"recall": [], "seconds": []}
        for seed in range(1 if options.quick or not name.startswith("ProxyGML") else SEEDS):
            started = time.process_time()
            model = build(seed).fit(features[seen], labels[seen])
            row["seconds"].append(time.process_time() - started)
            row["recall"].append(recall(model.transform(features[~seen]), labels[~seen]))
        rows[name] = row
        print(name, row, flush=True)
    results = {"data": options.data.name, "seen": int(seen.sum()), "unseen": int((~seen).sum()), "rows": rows}
    print(table(results))
    if not options.quick:
        print(f"written: {save('features', results | {'seeds': list(range(SEEDS))})} and {draw(results)}")


def table(results: dict) -> str:
    """The results as a Markdown table."""
    rows = [
        (name, f"{np.mean(row['recall']):.1f}", f"{np.mean(row['seconds']):.0f}")
        for name, row in results["rows"].items()
    ]
    return Table(("", "Recall@1, %", "CPU seconds to fit"), tuple(rows)).to_markdown()


def draw(results: dict) -> Path:
    """A bar chart of the recalls."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axis = figure.subplots()
    recalls = {name: float(np.mean(row["recall"])) for name, row in results["rows"].items()}
    colors = ["C2" if name.startswith("ProxyGML") else "0.7" for name in recalls]
    axis.bar_label(axis.barh(list(recalls), list(recalls.values()), color=colors), fmt="%.1f", padding=3)
    axis.invert_yaxis()
    axis.set(xlabel="Recall@1 on unseen species, %")
    axis.spines[["top", "right"]].set_visible(False)
    path = RESULTS / "features.png"
    with atomic_write(path) as draft:
        figure.savefig(draft, format="png", dpi=110, metadata={"Software": None})
    return path


if __name__ == "__main__":
    main()
