"""Recall@n, R-precision and MAP@R at the size of SOP: proxygml, faiss, pytorch-metric-learning, the products alone.

    python -m benchmarks.evaluation [--quick] [--dry-run] [--threads N]

60,502 synthetic unit vectors of 512 dimensions in 11,316 classes, about as hard as those of a trained network. Every
contender also runs once in a new process, to measure its peak memory above the embeddings. Writes
results/bench/evaluation.json; `python -m benchmarks.report` renders it in docs/performance.md. --quick uses a tenth
of the vectors and takes a minute.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import faiss
import numpy as np
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from threadpoolctl import threadpool_limits

from benchmarks.profiling import peak_resident_mb, print_table, save, time_interleaved
from proxygml.evaluation import evaluate

IMAGES, CLASSES, DIMENSION = 60_502, 11_316, 512
RECALLS = (1, 10, 100, 1000)
OURS = "proxygml: all"


def synthetic_embeddings(images: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors (M, D) around class centers, which lie around twelve others, and labels (M,), at least two each."""
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.tile(np.arange(classes), 2), rng.integers(classes, size=images - 2 * classes)])
    groups = 0.7 * rng.standard_normal((12, DIMENSION), dtype=np.float32)
    centers = rng.standard_normal((classes, DIMENSION), dtype=np.float32) + groups[rng.integers(12, size=classes)]
    vectors = centers[labels] + 2.5 * rng.standard_normal((images, DIMENSION), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels


def with_proxygml(vectors: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    return evaluate(vectors, labels, recall_at=RECALLS, cluster=False).to_json()


def with_faiss(vectors: np.ndarray, labels: np.ndarray, recalls: tuple[int, ...]) -> dict[str, float]:
    """Recalls only, from max(recalls) + 1 neighbors including the query."""
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    nearest = index.search(vectors, max(recalls) + 1)[1]  # (M, K + 1)
    hits = (labels[nearest] == labels[:, None]) & (nearest != np.arange(len(nearest))[:, None])  # (M, K + 1)
    after_query = (nearest == np.arange(len(nearest))[:, None]).cumsum(1)  # (M, K + 1)
    ranks = np.where(hits, np.arange(1, hits.shape[1] + 1) - after_query, len(nearest)).min(1)  # (M,)
    return {f"recall@{n}": float((ranks <= n).mean()) for n in recalls}


def with_pml(vectors: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    names = {"precision_at_1": "recall@1", "r_precision": "r_precision", "mean_average_precision_at_r": "map_at_r"}
    calculator = AccuracyCalculator(include=tuple(names), k="max_bin_count", device=torch.device("cpu"))
    accuracy = calculator.get_accuracy(torch.from_numpy(vectors), torch.from_numpy(labels))
    return {names[name]: accuracy[name] for name in names}


def products(vectors: np.ndarray, labels: np.ndarray, halved: bool, block: int = 1024) -> None:
    """The dot products of all pairs, or each only once (`halved`); nothing else."""
    blocks = torch.from_numpy(vectors).split(block)
    buffer = torch.empty(block, block)
    for number, rows in enumerate(blocks):
        for columns in blocks[number if halved else 0 :]:
            torch.mm(rows, columns.T, out=buffer[: len(rows), : len(columns)])


CONTENDERS: dict[str, Callable[[np.ndarray, np.ndarray], dict[str, float] | None]] = {
    OURS: with_proxygml,
    "faiss: recall@1 to @10": partial(with_faiss, recalls=RECALLS[:2]),
    "faiss: recall@1 to @1000": partial(with_faiss, recalls=RECALLS),
    "PML: recall@1, MAP@R": with_pml,
    "all dot products only": partial(products, halved=False),
    "half of them only": partial(products, halved=True),
}


def peak_mb(name: str, folder: str, threads: int) -> float:
    """Peak memory of a contender above embeddings and libraries. Call it in a new process."""
    vectors, labels = (np.load(Path(folder) / f"{part}.npy", allow_pickle=False) for part in ("vectors", "labels"))
    torch.set_num_threads(threads)
    with threadpool_limits(threads):
        few = labels < 300
        CONTENDERS[name](vectors[few], labels[few])  # loads libraries
        before = peak_resident_mb()
        CONTENDERS[name](vectors, labels)
    return peak_resident_mb() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the vectors")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    divisor = 10 if options.quick else 1
    vectors, labels = synthetic_embeddings(IMAGES // divisor, CLASSES // divisor)
    scores = {}

    def call(name: str) -> None:
        scores[name] = CONTENDERS[name](vectors, labels)

    with threadpool_limits(options.threads):
        calls = {name: partial(call, name) for name in CONTENDERS}
        timings = time_interleaved(calls, seconds=0, min_rounds=3, max_rounds=3)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "vectors.npy", vectors)
        np.save(Path(folder) / "labels.npy", labels)
        context = get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.evaluation"])
        for name in CONTENDERS:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                timings[name]["mb"] = round(pool.submit(peak_mb, name, folder, options.threads).result())

    ours = scores.pop(OURS)
    others = {name: theirs for name, theirs in scores.items() if theirs is not None}
    differences = {
        name: max(abs(ours[key] - theirs[key]) for key in theirs) * len(labels) for name, theirs in others.items()
    }
    rows = [
        (
            name,
            f"{timing['ms'] / 1000:.1f}",
            f"{timing['low'] / 1000:.1f} to {timing['high'] / 1000:.1f}",
            f"{timing['ms'] / timings[OURS]['ms']:.2f}",
            f"{timing['mb']:,}",
            f"{differences[name]:.1f}" if name in differences else "-",
        )
        for name, timing in timings.items()
    ]
    columns = ("", "median s", "quartiles", "relative", "MB", "difference, queries")
    print_table(f"{len(labels):,} vectors, {options.threads} threads", columns, rows)
    print({key: ours[key] for key in ours if key.startswith("recall@")})
    if max(differences.values()) > 1:  # the others compare in float32, which may decide a tie differently
        raise SystemExit(f"error: the contenders disagree by {max(differences.values()):.1f} queries")
    if not options.dry_run:
        case = {"images": len(labels), "classes": ours["classes"], "dimension": DIMENSION}
        results = case | {"contenders": timings, "scores": ours, "query_differences": differences}
        print(f"written: {save('evaluation', results)}")


if __name__ == "__main__":
    main()
