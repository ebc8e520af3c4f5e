"""Scoring embeddings of SOP's size: beside faiss, pytorch-metric-learning and the products that no exact way avoids.

    python -m benchmarks.evaluation [--quick] [--dry] [--threads N]

60,502 made-up unit vectors of 512 numbers in 11,316 classes, about as hard as those of a trained network. Every
contender also runs once in a process of its own, for its peak memory above the embeddings. Writes
results/bench/evaluation.json, of which `python -m benchmarks.report` makes docs/performance.md; --quick takes a tenth
of the vectors, a minute in all.
"""

import argparse
import os
import re
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
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from benchmarks.measuring import save, take_turns
from proxygml.evaluation import evaluate

IMAGES, CLASSES, DIMENSION = 60_502, 11_316, 512
RECALLS = (1, 10, 100, 1000)
OURS = "proxygml: all"


def made_up(images: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors (M, D) round a centre for each class, the centres round twelve others; labels (M,), two or more."""
    random = np.random.default_rng(0)
    labels = np.concatenate([np.tile(np.arange(classes), 2), random.integers(classes, size=images - 2 * classes)])
    kinds = 0.7 * random.standard_normal((12, DIMENSION), dtype=np.float32)
    centres = random.standard_normal((classes, DIMENSION), dtype=np.float32) + kinds[random.integers(12, size=classes)]
    vectors = centres[labels] + 2.5 * random.standard_normal((images, DIMENSION), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels


def by_proxygml(vectors: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    return evaluate(vectors, labels, recall_at=RECALLS, cluster=False).to_json()


def by_faiss(vectors: np.ndarray, labels: np.ndarray, recalls: tuple[int, ...]) -> dict[str, float]:
    """Recalls alone, from the nearest max(recalls) + 1, of which one is the query."""
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    nearest = index.search(vectors, max(recalls) + 1)[1]  # (M, K + 1)
    hits = (labels[nearest] == labels[:, None]) & (nearest != np.arange(len(nearest))[:, None])  # (M, K + 1)
    itself = (nearest == np.arange(len(nearest))[:, None]).cumsum(1)  # (M, K + 1); 1 once it has been passed
    ranks = np.where(hits, np.arange(1, hits.shape[1] + 1) - itself, len(nearest)).min(1)  # (M,)
    return {f"recall@{n}": float((ranks <= n).mean()) for n in recalls}


def by_metric_learning(vectors: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    names = {"precision_at_1": "recall@1", "r_precision": "r_precision", "mean_average_precision_at_r": "map_at_r"}
    calculator = AccuracyCalculator(include=tuple(names), k="max_bin_count", device=torch.device("cpu"))
    found = calculator.get_accuracy(torch.from_numpy(vectors), torch.from_numpy(labels))
    return {names[name]: found[name] for name in names}


def products(vectors: np.ndarray, labels: np.ndarray, halved: bool, block: int = 1024) -> None:
    """Every product of two vectors, or one of each two that are the same, and nothing else."""
    blocks = torch.from_numpy(vectors).split(block)
    buffer = torch.empty(block, block)
    for number, rows in enumerate(blocks):
        for columns in blocks[number if halved else 0 :]:
            torch.mm(rows, columns.T, out=buffer[: len(rows), : len(columns)])


CONTENDERS: dict[str, Callable[[np.ndarray, np.ndarray], dict[str, float] | None]] = {
    OURS: by_proxygml,
    "faiss: recall@1 to @10": partial(by_faiss, recalls=RECALLS[:2]),
    "faiss: recall@1 to @1000": partial(by_faiss, recalls=RECALLS),
    "PML: recall@1, MAP@R": by_metric_learning,
    "all products alone": partial(products, halved=False),
    "half of them alone": partial(products, halved=True),
}


def peak_megabytes(name: str, folder: str, threads: int) -> float:
    """What a contender takes above embeddings and libraries; to be called in a fresh process."""
    vectors, labels = (np.load(Path(folder) / f"{part}.npy", allow_pickle=False) for part in ("vectors", "labels"))
    torch.set_num_threads(threads)
    with threadpool_limits(threads):
        few = labels < 300
        CONTENDERS[name](vectors[few], labels[few])  # loads what it needs
        before = highest_megabytes()
        CONTENDERS[name](vectors, labels)
    return highest_megabytes() - before


def highest_megabytes() -> float:
    """The most memory that this process has held; getrusage would begin with that of the process that started it."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the vectors")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    part = 10 if options.quick else 1
    vectors, labels = made_up(IMAGES // part, CLASSES // part)
    scores = {}

    def call(name: str) -> None:
        scores[name] = CONTENDERS[name](vectors, labels)

    with threadpool_limits(options.threads):
        found = take_turns({name: partial(call, name) for name in CONTENDERS}, seconds=0, least=3, most=3)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "vectors.npy", vectors)
        np.save(Path(folder) / "labels.npy", labels)
        context = get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.evaluation"])  # what all of them import, once
        for name in CONTENDERS:
            with ProcessPoolExecutor(1, mp_context=context) as fresh:
                found[name]["mb"] = round(fresh.submit(peak_megabytes, name, folder, options.threads).result())

    ours = scores.pop(OURS)
    others = {name: theirs for name, theirs in scores.items() if theirs is not None}
    apart = {name: max(abs(ours[key] - theirs[key]) for key in theirs) * len(labels) for name, theirs in others.items()}
    table = Table(title=f"{len(labels):,} vectors, {options.threads} threads", title_justify="left", box=None)
    for column in ("", "median s", "quartiles", "times ours", "MB", "queries apart"):
        table.add_column(column, justify="right" if column else "left")
    for name, entry in found.items():
        spread = f"{entry['low'] / 1000:.1f} to {entry['high'] / 1000:.1f}"
        ratio = f"{entry['ms'] / found[OURS]['ms']:.2f}"
        differs = f"{apart[name]:.1f}" if name in apart else "-"
        table.add_row(name, f"{entry['ms'] / 1000:.1f}", spread, ratio, f"{entry['mb']:,}", differs)
    Console().print(table)
    Console().print({key: ours[key] for key in ours if key.startswith("recall@")})
    if max(apart.values()) > 1:  # float32, in which the others compare, may turn a tie
        raise SystemExit(f"error: the contenders disagree by {max(apart.values()):.1f} queries")
    case = {"images": len(labels), "classes": ours["classes"], "dimension": DIMENSION}
    if not options.dry:
        print(f"written: {save('evaluation', {**case, 'contenders': found, 'scores': ours, 'queries_apart': apart})}")


if __name__ == "__main__":
    main()
