"""Vectors as points in two dimensions: PCA at once, t-SNE or UMAP in another process.

Axes: M points (images, then proxies), D embedding.
"""

import importlib.util
import multiprocessing
import re
import signal
import sys
import tempfile
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import faiss
import numpy as np

from proxygml.server.jobs import Report

MAX_TSNE_POINTS = 20_000  # more would take t-SNE many minutes; the others are interpolated
REDUCED_DIM = 50  # principal components that t-SNE and UMAP start from
TSNE_ITERATIONS = 1000  # scikit-learn's default
POLL_SECONDS = 0.2


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
    context = multiprocessing.get_context("spawn")  # forking a process with threads may hang
    receiver, sender = context.Pipe(duplex=False)
    # In a file: start() would wait until the process has read its arguments, and nothing could cancel it meanwhile.
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, vectors)
        file.flush()
        process = context.Process(target=_work, args=(layout, file.name, sender), daemon=True)
        # A terminal sends Ctrl-C to all its processes; block it in this one, which we end ourselves. The resource
        # tracker must run before: starting it unblocks the signal.
        resource_tracker.ensure_running()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        sender.close()
        try:
            return _receive(process, receiver, report)
        finally:
            process.terminate()
            process.join()
            receiver.close()


def _receive(process: BaseProcess, connection: Connection, report: Report) -> np.ndarray:
    """The points that a process sends after its progress."""
    done, total = 0, 0
    try:
        while True:
            report(done, total)
            if not connection.poll(POLL_SECONDS):
                continue
            kind, value = connection.recv()
            if kind == "points":
                return value
            if kind == "error":
                raise ValueError(value)
            done, total = value
    except EOFError as error:
        process.join()
        raise ValueError(f"the process that drew the map ended with {process.exitcode}: too little memory?") from error


def _work(layout: str, file: str, connection: Connection) -> None:
    """In the other process: send ("progress", (done, total)), then ("points", (M, 2)) or ("error", text)."""
    sys.stdout = sys.stderr = ProgressStream(connection)
    try:
        connection.send(("points", (tsne if layout == "tsne" else umap)(np.load(file, allow_pickle=False))))
    except Exception as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))


def tsne(vectors: np.ndarray) -> np.ndarray:
    """scikit-learn's t-SNE: (M, D) -> (M, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(30, (len(vectors) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0, verbose=2).fit_transform(vectors)


def umap(vectors: np.ndarray) -> np.ndarray:
    """UMAP: (M, D) -> (M, 2)."""
    from umap import UMAP

    return UMAP(n_neighbors=min(15, len(vectors) - 1), random_state=0, n_jobs=1, verbose=True).fit_transform(vectors)


class ProgressStream:
    """A stream that sends the progress it reads in the output of libraries: t-SNE's iterations, a bar's percentage."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, text: str) -> int:
        for pattern, total in ((r"Iteration (\d+)", TSNE_ITERATIONS), (r"(\d+)%\|", 100)):
            if match := re.search(pattern, text):
                self._connection.send(("progress", (int(match[1]), total)))
        return len(text)

    def flush(self) -> None:
        pass
