"""The space in two dimensions: main directions at once, t-SNE or UMAP in another process.

Axes: M points (images, and after them proxies), D embedding.
"""

import importlib.util
import multiprocessing
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import faiss
import numpy as np

from proxygml.server.jobs import Report

MOST_FOR_TSNE = 20_000  # points; beyond, t-SNE takes more than minutes, and others are placed beside these
WIDTH = 50  # main directions that t-SNE and UMAP begin with
ITERATIONS = 1000  # of t-SNE, scikit-learn's own default
LOOK = 0.2  # seconds between two looks whether the work is still wanted


def layouts() -> dict[str, str]:
    """The ways to draw a map, each with the reason why it is not to be had here, or an empty text."""
    missing = "" if importlib.util.find_spec("umap") else "pip install umap-learn"
    return {"pca": "", "tsne": "", "umap": missing}


def main_directions(vectors: np.ndarray, count: int) -> np.ndarray:
    """Vectors (M, D) along the directions in which they vary most: (M, count); zeros where there are no more."""
    centered = vectors - vectors.mean(axis=0)
    _, directions = np.linalg.eigh(centered.T @ centered)  # (D, D); ascending
    kept = directions[:, ::-1][:, :count]
    # A direction and its opposite are the same one: the entry that is largest is made positive.
    kept = kept * np.where(kept[np.abs(kept).argmax(axis=0), np.arange(kept.shape[1])] < 0, -1, 1)
    return np.pad(centered @ kept, [(0, 0), (0, count - kept.shape[1])]).astype(np.float32)


def draw(layout: str, vectors: np.ndarray, report: Report) -> np.ndarray:
    """Vectors (M, D) as points (M, 2) within -1..1."""
    if layout == "pca" or len(vectors) < 4 or not np.ptp(vectors, axis=0).any():  # too few or all equal: as they are
        return fitted(main_directions(vectors, 2))
    reduced = main_directions(vectors, min(WIDTH, max(vectors.shape[1], 2)))  # (M, up to 50)
    most = MOST_FOR_TSNE if layout == "tsne" else len(reduced)
    chosen = np.sort(np.random.default_rng(0).permutation(len(reduced))[:most])
    points = in_another_process(layout, reduced[chosen], report)  # (most, 2)
    return fitted(_place_beside(points, chosen, reduced))


def fitted(points: np.ndarray) -> np.ndarray:
    """Points (M, 2) moved and scaled into -1..1; both axes alike, since distances are what a map shows."""
    low, high = points.min(axis=0), points.max(axis=0)
    half = max(float((high - low).max()) / 2, 1e-12)
    return ((points - (low + high) / 2) / half).astype(np.float32)


def _place_beside(points: np.ndarray, chosen: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """All vectors (M, D) on a map of some: those not chosen between their three nearest that are, nearer to nearer."""
    every = np.empty((len(vectors), 2), np.float32)
    every[chosen] = points
    rest = np.setdiff1d(np.arange(len(vectors)), chosen)
    if len(rest):
        index = faiss.IndexFlatL2(vectors.shape[1])
        index.add(np.ascontiguousarray(vectors[chosen]))
        squared, found = index.search(np.ascontiguousarray(vectors[rest]), 3)  # (rest, 3)
        weights = 1 / np.maximum(squared, 1e-9)
        every[rest] = (points[found] * (weights / weights.sum(axis=1, keepdims=True))[:, :, None]).sum(axis=1)
    return every


def in_another_process(layout: str, vectors: np.ndarray, report: Report) -> np.ndarray:
    """What `tsne` or `umap` gives; the process is ended as soon as `report` raises."""
    context = multiprocessing.get_context("spawn")  # a copy of a process with threads may hang
    ours, theirs = context.Pipe(duplex=False)
    # In a file: what is handed to a process itself has to wait until it has begun, and nothing could end it meanwhile.
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, vectors)
        file.flush()
        process = context.Process(target=_work, args=(layout, file.name, theirs), daemon=True)
        # Ctrl-C goes to all processes of a terminal; this one is not to hear it, since we end it. What keeps a list of
        # resources is begun first: whoever begins it hears Ctrl-C afterwards.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        try:
            return _result(process, ours, report)
        finally:
            process.terminate()
            process.join()
            ours.close()


def _result(process: BaseProcess, connection: Connection, report: Report) -> np.ndarray:
    """What a process sends in the end; what it tells before is passed on to `report`."""
    done, total = 0, 0
    try:
        while True:
            report(done, total)
            if not connection.poll(LOOK):
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
    """In the other process: sends ("progress", (done, total)), then ("points", (M, 2)) or ("error", text)."""

    def told(done: int, total: int) -> None:
        connection.send(("progress", (done, total)))

    sys.stdout = sys.stderr = Listener(told)
    try:
        connection.send(("points", (tsne if layout == "tsne" else umap)(np.load(file, allow_pickle=False))))
    except Exception as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))


def tsne(vectors: np.ndarray) -> np.ndarray:
    """scikit-learn's t-SNE: (M, D) -> (M, 2). It prints how far it is."""
    from sklearn.manifold import TSNE

    perplexity = min(30, (len(vectors) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0, verbose=2).fit_transform(vectors)


def umap(vectors: np.ndarray) -> np.ndarray:
    """UMAP: (M, D) -> (M, 2). It prints how far it is."""
    from umap import UMAP

    return UMAP(n_neighbors=min(15, len(vectors) - 1), random_state=0, n_jobs=1, verbose=True).fit_transform(vectors)


class Listener:
    """A stream that learns from what libraries print how far they are: t-SNE's iterations, a bar's per cent."""

    def __init__(self, told: Callable[[int, int], None]) -> None:
        self._told = told

    def write(self, text: str) -> int:
        if found := re.search(r"Iteration (\d+)", text):
            self._told(int(found[1]), ITERATIONS)
        elif found := re.search(r"(\d+)%\|", text):
            self._told(int(found[1]), 100)
        return len(text)

    def flush(self) -> None:
        pass
