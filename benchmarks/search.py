"""Search in a million vectors: 1,000 queries in one call, by every kind of index; its recall, building and size.

    python -m benchmarks.search [--quick] [--dry]

1,000,000 vectors of 128 numbers, of unit length: random ones, which are as hard to search as any, and vectors in groups
of fifty, as those of a trained network. Recall@10 is against the exact neighbours. Writes results/bench/search.json, of
which `python -m benchmarks.report` makes docs/performance.md; --quick takes 50,000 vectors.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import save
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
        "recall": float(np.mean(hits)) / COUNT,
        "own_recall": measured,
        "database_mb": round(sizes[".sqlite"] / 1e6),
        "faiss_mb": round(sizes.get(".faiss", 0) / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=VECTORS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} vectors")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    count = QUICK if options.quick else options.vectors
    cases = {}
    for name, grouped in (("random", False), ("in groups", True)):
        vectors, queries = made_up(grouped, count)
        truth, _ = neighbours(queries, vectors, count=COUNT)
        table = Table(title=f"{count:,} vectors, {name}", title_justify="left", box=None)
        cases[name] = {kind: measure(kind, vectors, queries, truth) for kind in KINDS}
        for column in ("", *cases[name]["exact"]):
            table.add_column(column, justify="right" if column else "left")
        for kind, found in cases[name].items():
            table.add_row(kind, *(f"{value:,}" for value in found.values()))
        Console(width=200).print(table)
    if not options.dry:
        case = {"vectors": count, "width": WIDTH, "queries": QUERIES, "count": COUNT}
        print(f"written: {save('search', {**case, 'cases': cases})}")


if __name__ == "__main__":
    main()
