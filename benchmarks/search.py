"""Search in a million vectors: 1,000 queries in one call, by every kind of index; its recall, building and size.

    python -m benchmarks.search [--quick] [--kinds KIND ...] [--dry]

1,000,000 vectors of 128 numbers, of unit length: random ones, which are as hard to search as any, and vectors in groups
of fifty, as those of a trained network. Recall@10 is against the exact neighbours. Writes results/bench/search.json, of
which `python -m benchmarks.report` makes docs/performance.md; --quick takes 50,000 vectors.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measuring import RESULTS, load, save
from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbours
from proxygml.index import KINDS, Index

VECTORS, QUICK, QUERIES, WIDTH, COUNT = 1_000_000, 50_000, 1000, 128, 10
BLOCK = 50_000


def made_up(grouped: bool, vectors: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors (M, D) of unit length, at random or in groups of fifty, and queries (Q, D) of the same kind."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((vectors + QUERIES, WIDTH), dtype=np.float32)
    if grouped:
        centres = random.standard_normal((vectors // 50, WIDTH), dtype=np.float32)
        rows *= 0.5
        rows += centres[random.integers(len(centres), size=len(rows))]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows[:vectors], rows[vectors:]


def measure(kind: str, vectors: np.ndarray, queries: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Build an index of a kind in a folder, open it as another process would, and search."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "index"
        index = Index.create(folder, width=WIDTH, kind=kind)
        began = time.perf_counter()
        for start in range(0, len(vectors), BLOCK):
            names = np.array([str(number) for number in range(start, min(start + BLOCK, len(vectors)))])
            part = vectors[start : start + BLOCK]
            index.add(Embeddings(part, np.zeros(len(part), int), names))
        added = time.perf_counter()
        index.refresh()
        built = time.perf_counter()
        measured = index.recall()
        index.close()
        index = Index.open(folder)
        opening = time.perf_counter()
        index.search(queries[:1], COUNT)
        opened = time.perf_counter()
        index.search(queries[1:2], COUNT)
        single = time.perf_counter()
        found = index.search(queries, COUNT)
        searched = time.perf_counter()
        sizes = {path.suffix: path.stat().st_size for path in folder.iterdir()}
    hits = [len({int(hit.path) for hit in row} & set(near)) for row, near in zip(found, truth.tolist(), strict=True)]
    return {
        "adding_s": round(added - began, 1),
        "building_s": round(built - added, 1),
        "opening_s": round(opened - opening, 2),
        "query_ms": round(1000 * (single - opened), 1),
        "queries_s": round(searched - single, 2),
        "recall": round(float(np.mean(hits)) / COUNT, 4),
        "own_recall": round(measured, 4),
        "database_mb": round(sizes[".sqlite"] / 1e6),
        "faiss_mb": round(sizes.get(".faiss", 0) / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=VECTORS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} vectors")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="others stay as they were measured")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    case = {"vectors": QUICK if options.quick else options.vectors, "width": WIDTH, "queries": QUERIES, "count": COUNT}
    before = load("search") if (RESULTS / "search.json").exists() else {}
    same = all(before.get(name) == value for name, value in case.items())
    cases = before["cases"] if same else {"random": {}, "in groups": {}}
    for name, known in cases.items():
        vectors, queries = made_up(name == "in groups", case["vectors"])
        truth, _ = neighbours(queries, vectors, count=COUNT)
        for kind in options.kinds:
            known[kind] = measure(kind, vectors, queries, truth)
            shown = ", ".join(f"{what} {value:,}" for what, value in known[kind].items())
            print(f"{case['vectors']:,} vectors, {name}, {kind}: {shown}", flush=True)
            if not options.dry:  # at once: a graph takes long
                ordered = {name: {kind: row[kind] for kind in KINDS if kind in row} for name, row in cases.items()}
                save("search", {**case, "cases": ordered})


if __name__ == "__main__":
    main()
