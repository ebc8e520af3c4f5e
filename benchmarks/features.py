"""Feature vectors of classes never seen: `ProxyGMLEmbedding` beside what scikit-learn and metric-learn offer.

    python -m benchmarks.features [--data FEATURES.npz] [--quick]

Learned from the first half of the classes, Recall@1 on the second half; by default EfficientNet-Lite0's features of
CUB-200-2011. LFDA and LMNN get their 128 principal components. Writes
results/bench/features.json and draws features.png beside it; --quick takes made-up features and writes nothing.
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

from benchmarks.measuring import RESULTS, save
from proxygml import ProxyGMLEmbedding
from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbours
from proxygml.experiments.tables import Table
from proxygml.files import written_whole

DATA = Path("../shared/data/cub_efficientnet_lite0.npz")
FEWER = 64  # dimensions
SEEDS = 3


def contenders(width: int) -> dict[str, Callable[[int], object]]:
    """By name, what makes a transformer from a seed; width is that of the features."""
    fewer, some = min(FEWER, width // 2), min(128, width)
    local, margin = metric_learn()
    return {
        "PCA whitening": lambda seed: PCA(whiten=True, random_state=seed),
        "LDA, shrunk": lambda seed: LinearDiscriminantAnalysis(solver="eigen", shrinkage="auto"),
        "ProxyGMLEmbedding": lambda seed: ProxyGMLEmbedding(random_state=seed),
        f"PCA, {fewer} dimensions": lambda seed: PCA(fewer, random_state=seed),
        f"NCA, {fewer} dimensions": lambda seed: NeighborhoodComponentsAnalysis(
            fewer, init="pca", max_iter=50, random_state=seed
        ),
        f"LFDA of {some} components, {fewer} dimensions": lambda seed: make_pipeline(
            PCA(some, random_state=seed), local(n_components=fewer)
        ),
        f"LMNN of {some} components, {fewer} dimensions": lambda seed: make_pipeline(
            PCA(some, random_state=seed), margin(n_components=fewer, init="pca", max_iter=50, random_state=seed)
        ),
        f"ProxyGMLEmbedding, {fewer} dimensions": lambda seed: ProxyGMLEmbedding(fewer, random_state=seed),
    }


def metric_learn() -> tuple[type, type]:
    """LFDA and LMNN. Version 0.7 says force_all_finite, which scikit-learn calls ensure_all_finite since 1.6."""
    import metric_learn._util as checks
    from metric_learn import LFDA, LMNN

    def renamed(check: Callable) -> Callable:
        return lambda *given, force_all_finite=True, **more: check(*given, ensure_all_finite=force_all_finite, **more)

    checks.check_array, checks.check_X_y = renamed(checks.check_array), renamed(checks.check_X_y)
    return LFDA, LMNN


def recall(vectors: np.ndarray, labels: np.ndarray) -> float:
    """Recall@1 by cosine, in percent: vectors (M, D), labels (M,)."""
    nearest, _ = neighbours(normalize(vectors), count=1)
    return 100 * float(np.mean(labels[nearest[:, 0]] == labels))


def made_up() -> tuple[np.ndarray, np.ndarray]:
    """Features (M, 32) of 40 classes that differ in few directions and vary more in others; labels (M,)."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(40), 15)
    centres = random.normal(size=(40, 32)) * (np.arange(32) < 8)
    return centres[labels] + random.normal(size=(len(labels), 32)) * np.where(np.arange(32) < 8, 0.5, 2), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="an .npz with vectors and labels")
    parser.add_argument("--quick", action="store_true", help="made-up features, one seed, and write nothing")
    options = parser.parse_args()
    if options.quick:
        features, labels = made_up()
    else:
        loaded = Embeddings.load(options.data)
        features, labels = loaded.vectors.astype(np.float32), loaded.labels
    seen = labels < np.median(np.unique(labels))
    rows = {"the features themselves": {"recall": [recall(features[~seen], labels[~seen])], "seconds": [0.0]}}
    for name, make in contenders(features.shape[1]).items():
        found: dict[str, list[float]] = {"recall": [], "seconds": []}
        for seed in range(1 if options.quick or not name.startswith("ProxyGML") else SEEDS):
            started = time.perf_counter()
            model = make(seed).fit(features[seen], labels[seen])
            found["seconds"].append(time.perf_counter() - started)
            found["recall"].append(recall(model.transform(features[~seen]), labels[~seen]))
        rows[name] = found
        print(name, found, flush=True)
    found = {"data": options.data.name, "seen": int(seen.sum()), "unseen": int((~seen).sum()), "rows": rows}
    print(table(found))
    if not options.quick:
        print(f"written: {save('features', found)} and {draw(found)}")


def table(found: dict) -> str:
    """What was found, as Markdown."""
    rows = [
        (name, f"{np.mean(row['recall']):.1f}", f"{np.mean(row['seconds']):.0f}") for name, row in found["rows"].items()
    ]
    return Table(("", "Recall@1, %", "seconds to fit"), tuple(rows)).to_markdown()


def draw(found: dict) -> Path:
    """A bar for every row."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axis = figure.subplots()
    recalls = {name: float(np.mean(row["recall"])) for name, row in found["rows"].items()}
    colours = ["C2" if name.startswith("ProxyGML") else "0.7" for name in recalls]
    axis.bar_label(axis.barh(list(recalls), list(recalls.values()), color=colours), fmt="%.1f", padding=3)
    axis.invert_yaxis()
    axis.set(xlabel="Recall@1 on unseen species, %")
    axis.spines[["top", "right"]].set_visible(False)
    path = RESULTS / "features.png"
    with written_whole(path) as draft:
        figure.savefig(draft, format="png", dpi=110, metadata={"Software": None})
    return path


if __name__ == "__main__":
    main()
