"""Recall@1 of nested embeddings at each width, on CUB-200-2011: trained at once, at that width, or reduced by PCA.

    python -m benchmarks.nested [--data FEATURES.npz] [--quick]

Trains a linear layer, which starts as the principal components, on EfficientNet-Lite0 features of the first half of the
classes and evaluates on the second half. All layers have the same settings; start and learning rate were chosen for
plain layers, on 25 held-out training classes, after a first version with random starts had been scored on the second
half (PCA led there, too). Writes results/bench/nested.json; --quick uses synthetic features and
writes nothing.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import normalize

from benchmarks.features import DATA, recall, synthetic_features
from benchmarks.profiling import save
from proxygml import Index, ProxyGMLLoss
from proxygml.embeddings import Embeddings
from proxygml.losses.nested import NestedProxyGMLLoss
from proxygml.paper.tables import Table

WIDTHS = (32, 64, 128, 256, 512)
SEEDS, EPOCHS, BATCH = 3, 20, 128
RATES = {"head": 3e-4, "proxies": 3e-2}  # of Adam
ROWS = {
    "nested": "nested, first w dimensions",
    "reranked": "the same to find 100, reranked by all 512",
    "own": "trained with w dimensions",
    "pca": "512 dimensions, then PCA",
    "cut": "512 dimensions, first w",
}


def train_head(features: np.ndarray, labels: np.ndarray, loss: ProxyGMLLoss, dim: int, seed: int) -> torch.nn.Linear:
    """A linear layer to `dim` dimensions trained on features (M, F) with labels (M,) in 0..C-1."""
    start = PCA(dim, svd_solver="covariance_eigh").fit(features)
    head = torch.nn.Linear(features.shape[1], dim)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(start.components_))
        head.bias.copy_(torch.from_numpy(-start.components_ @ start.mean_))
    torch.manual_seed(seed)
    groups = [
        {"params": head.parameters(), "lr": RATES["head"]},
        {"params": loss.parameters(), "lr": RATES["proxies"]},
    ]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            loss(head(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        schedule.step()
    return head


def measure(features: np.ndarray, labels: np.ndarray, widths: tuple[int, ...], seed: int) -> dict[str, list[float]]:
    """Recall@1 in percent by row and width: features (M, F), labels (M,)."""
    seen = labels < np.median(np.unique(labels))
    train, test, test_labels = features[seen], features[~seen], labels[~seen]
    classes, train_labels = np.unique(labels[seen], return_inverse=True)
    whole = widths[-1]

    def embed(loss: ProxyGMLLoss, dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Embeddings (M, dim) of training and of test images, of length 1."""
        head = train_head(train, train_labels, loss, dim, seed)
        with torch.no_grad():
            return tuple(normalize(head(torch.from_numpy(part)).numpy()) for part in (train, test))

    torch.manual_seed(seed)  # of the initial proxies
    nested = embed(NestedProxyGMLLoss(len(classes), whole, widths[:-1]), whole)[1]
    own = {}
    for width in widths:
        torch.manual_seed(seed)
        own[width] = embed(ProxyGMLLoss(len(classes), width), width)
    reduced = PCA(whole, svd_solver="covariance_eigh").fit(own[whole][0]).transform(own[whole][1])
    return {
        "nested": [recall(nested[:, :width], test_labels) for width in widths],
        "reranked": [reranked_recall(nested, test_labels, width) for width in widths],
        "own": [recall(own[width][1], test_labels) for width in widths],
        "pca": [recall(reduced[:, :width], test_labels) for width in widths],
        "cut": [recall(own[whole][1][:, :width], test_labels) for width in widths],
    }


def reranked_recall(vectors: np.ndarray, labels: np.ndarray, width: int) -> float:
    """Recall@1 in percent of an index that searches the first `width` dimensions: vectors (M, D), labels (M,)."""
    dim = vectors.shape[1]
    index = Index.create(None, dim=dim, kind="exact", prefix=width if width < dim else None)
    paths = np.arange(len(vectors)).astype(str)
    index.add(Embeddings(vectors, labels, paths))
    hits = [
        next(hit for hit in found if hit.path != path)
        for path, found in zip(paths, index.search(vectors, 2), strict=True)
    ]
    return 100 * float(np.mean([hit.label == str(label) for hit, label in zip(hits, labels, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="an .npz with vectors and labels")
    parser.add_argument("--quick", action="store_true", help="synthetic features, one seed; writes nothing")
    options = parser.parse_args()
    if options.quick:
        features, labels = synthetic_features()
        widths: tuple[int, ...] = (4, 8, 16)
    else:
        loaded = Embeddings.load(options.data)
        features, labels, widths = loaded.vectors, loaded.labels, WIDTHS
    features = features.astype(np.float32)
    runs = []
    for seed in range(1 if options.quick else SEEDS):
        runs.append(measure(features, labels, widths, seed))
        print(seed, runs[-1], flush=True)
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "learning_rates": RATES, "seeds": len(runs)}
    results = {"data": options.data.name, "widths": widths, "settings": settings, "runs": runs}
    print(table(results))
    if not options.quick:
        print(f"written: {save('nested', results)}")


def table(results: dict) -> str:
    """The mean over seeds as a Markdown table."""
    rows = []
    for name, title in ROWS.items():
        means = np.mean([run[name] for run in results["runs"]], axis=0)
        rows.append((title, *(f"{mean:.1f}" for mean in means)))
    return Table(("Recall@1, %", *(f"w = {width}" for width in results["widths"])), tuple(rows)).to_markdown()


if __name__ == "__main__":
    main()
