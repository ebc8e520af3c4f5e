"""Search in a million vectors with every type of index: query time, recall, build time and size.

    python -m benchmarks.search [--quick] [--kinds KIND ...] [--dry-run]

1,000,000 unit vectors of 128 dimensions: random ones, the hardest case, and clusters of fifty, as from a trained
network. Recall@10 is relative to the exact neighbors. Writes results/bench/search.json; `python -m benchmarks.report`
renders it in docs/performance.md. --quick uses 50,000 vectors.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.profiling import load, save
from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbors
from proxygml.retrieval import KINDS, Index

VECTORS, QUICK, QUERIES, WIDTH, COUNT = 1_000_000, 50_000, 1000, 128, 10
BLOCK = 50_000


def synthetic_vectors(clustered: bool, vectors: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors (M, D), random or in clusters of fifty, and queries (Q, D) from the same distribution."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((vectors + QUERIES, WIDTH), dtype=np.float32)
    if clustered:
        centers = rng.standard_normal((vectors // 50, WIDTH), dtype=np.float32)
        rows *= 0.5
        rows += centers[rng.integers(len(centers), size=len(rows))]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows[:vectors], rows[vectors:]


def measure(kind: str, vectors: np.ndarray, queries: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Build an index in a folder, open it again and search."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "index"
        index = Index.create(folder, dim=WIDTH, kind=kind)
        started = time.perf_counter()
        for start in range(0, len(vectors), BLOCK):
            names = np.array([str(number) for number in range(start, min(start + BLOCK, len(vectors)))])
            block = vectors[start : start + BLOCK]
            index.add(Embeddings(block, np.zeros(len(block), int), names))
        added = time.perf_counter()
        index.refresh()
        built = time.perf_counter()
        estimated_recall = index.recall()
        index.close()
        index = Index.open(folder)
        opening = time.perf_counter()
        index.search(queries[:1], COUNT)
        opened = time.perf_counter()
        index.search(queries[1:2], COUNT)
        single = time.perf_counter()
        results = index.search(queries, COUNT)
        searched = time.perf_counter()
        sizes = {path.suffix: path.stat().st_size for path in folder.iterdir()}
    hits = [len({int(hit.path) for hit in row} & set(near)) for row, near in zip(results, truth.tolist(), strict=True)]
    return {
        "adding_s": round(added - started, 1),
        "building_s": round(built - added, 1),
        "opening_s": round(opened - opening, 2),
        "query_ms": round(1000 * (single - opened), 1),
        "queries_s": round(searched - single, 2),
        "recall": round(float(np.mean(hits)) / COUNT, 4),
        "estimated_recall": round(estimated_recall, 4),
        "database_mb": round(sizes[".sqlite"] / 1e6),
        "faiss_mb": round(sizes.get(".faiss", 0) / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=VECTORS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} vectors")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="measure only these")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    options = parser.parse_args()
    case = {"vectors": QUICK if options.quick else options.vectors, "width": WIDTH, "queries": QUERIES, "count": COUNT}
    previous = load("search")
    same = all(previous.get(name) == value for name, value in case.items())
    cases = previous["cases"] if same else {"random": {}, "clustered": {}}
    for name, measured in cases.items():
        vectors, queries = synthetic_vectors(name == "clustered", case["vectors"])
        truth, _ = neighbors(queries, vectors, count=COUNT)
        for kind in options.kinds:
            measured[kind] = measure(kind, vectors, queries, truth)
            shown = ", ".join(f"{key} {value:,}" for key, value in measured[kind].items())
            print(f"{case['vectors']:,} vectors, {name}, {kind}: {shown}", flush=True)
            if not options.dry_run:  # after each index: HNSW takes minutes
                ordered = {name: {kind: row[kind] for kind in KINDS if kind in row} for name, row in cases.items()}
                save("search", {**case, "cases": ordered})


if __name__ == "__main__":
    main()
