"""Vectors as points in two dimensions: PCA at once, t-SNE or UMAP in another process.

Axes: M points (images, then proxies), D embedding.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import faiss
import numpy as np

from proxygml.server.jobs import Report

MAX_TSNE_POINTS = 20_000  # more would take t-SNE many minutes; the others are interpolated
REDUCED_DIM = 50  # principal components that t-SNE and UMAP start from
TSNE_ITERATIONS = 1000  # scikit-learn's default
POLL_SECONDS = 0.2
LAYOUT_SCRIPT = Path(__file__).with_name("layout.py")


def layouts() -> dict[str, str]:
    """The available layouts, each with how to install it, or an empty string if it is installed."""
    return {"pca": "", "tsne": "", "umap": "" if importlib.util.find_spec("umap") else "pip install umap-learn"}


def principal_components(vectors: np.ndarray, count: int) -> np.ndarray:
    """Vectors (M, D) on their first principal components: (M, count), zeros beyond D."""
    centered = vectors - vectors.mean(axis=0)
    _, axes = np.linalg.eigh(centered.T @ centered)  # (D, D); ascending
    axes = axes[:, ::-1][:, :count]
    # The sign of an axis is arbitrary: make its largest entry positive.
    axes = axes * np.where(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])] < 0, -1, 1)
    return np.pad(centered @ axes, [(0, 0), (0, count - axes.shape[1])]).astype(np.float32)


def draw(layout: str, vectors: np.ndarray, report: Report) -> np.ndarray:
    """Vectors (M, D) as points (M, 2) within -1..1."""
    if layout == "pca" or len(vectors) < 4 or not np.ptp(vectors, axis=0).any():  # t-SNE fails on few or equal vectors
        return scale_to_square(principal_components(vectors, 2))
    reduced = principal_components(vectors, min(REDUCED_DIM, max(vectors.shape[1], 2)))  # (M, up to 50)
    max_points = MAX_TSNE_POINTS if layout == "tsne" else len(reduced)
    sample = np.sort(np.random.default_rng(0).permutation(len(reduced))[:max_points])
    points = np.empty((len(reduced), 2), np.float32)
    points[sample] = run_in_process(layout, reduced[sample], report)
    rest = np.setdiff1d(np.arange(len(reduced)), sample)
    if len(rest):  # between their three nearest, weighted by inverse squared distance
        squared, nearest = faiss.knn(reduced[rest], reduced[sample], 3)  # (rest, 3) each
        weights = 1 / np.maximum(squared, 1e-9)
        weights /= weights.sum(axis=1, keepdims=True)
        points[rest] = (points[sample][nearest] * weights[:, :, None]).sum(axis=1)
    return scale_to_square(points)


def scale_to_square(points: np.ndarray) -> np.ndarray:
    """Points (M, 2) moved and scaled into -1..1, both axes alike."""
    low, high = points.min(axis=0), points.max(axis=0)
    half = max(float((high - low).max()) / 2, 1e-12)
    return ((points - (low + high) / 2) / half).astype(np.float32)


def run_in_process(layout: str, vectors: np.ndarray, report: Report) -> np.ndarray:
    """t-SNE or UMAP of vectors (M, D) in another process, which ends as soon as `report` raises: (M, 2)."""
    with tempfile.TemporaryDirectory(prefix="proxygml-") as folder:
        source, target, log = (Path(folder) / name for name in ("vectors.npy", "points.npy", "log"))
        np.save(source, vectors)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
        with log.open("w") as output:
            command = [sys.executable, str(LAYOUT_SCRIPT), layout, str(source), str(target)]
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
        try:
            while process.poll() is None:
                report(*read_progress(log.read_text(errors="replace")))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
        report(*read_progress(text := log.read_text(errors="replace")))
        if process.returncode < 0:
            raise ValueError(f"the process that drew the map ended with {process.returncode}: too little memory?")
        if process.returncode:
            raise ValueError(text.splitlines()[-1])
        return np.load(target, allow_pickle=False)


def read_progress(text: str) -> tuple[int, int]:
    """(done, total) from the output of a layout: t-SNE's iterations, or the percentage of UMAP's bar."""
    iterations, percentages = re.findall(r"Iteration (\d+)", text), re.findall(r"(\d+)%\|", text)
    if iterations:
        return int(iterations[-1]), TSNE_ITERATIONS
    return (int(percentages[-1]), 100) if percentages else (0, 0)
