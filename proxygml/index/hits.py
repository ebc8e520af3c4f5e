"""What every kind of index shares: what it finds, which vectors it takes, and how much of what is nearest it finds."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import faiss
import numpy as np

from proxygml.embeddings import Embeddings

BLOCK = 10_000  # vectors at a time, however large a gallery is
LARGEST = 1e15  # of a vector's numbers: squares of its distances have to stay finite in float32


class Hit(NamedTuple):
    """An item that was found."""

    path: str
    label: str  # the name of its class
    distance: float  # Euclidean

    @property
    def similarity(self) -> float:
        """The cosine, where vectors are of unit length."""
        return 1 - self.distance**2 / 2


def checked_vectors(vectors: np.ndarray, width: int, place: object) -> np.ndarray:
    """Vectors (M, D) as they are compared, float32; an error where they are not what the index at `place` holds."""
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or vectors.shape[1] != width or vectors.dtype.kind not in "fiu":
        came = f"{vectors.dtype} {vectors.shape}"
        raise ValueError(f"expected vectors (M, {width}), real numbers, as {place} holds, got {came}")
    with np.errstate(over="ignore"):  # becomes infinite, which is refused
        vectors = np.ascontiguousarray(vectors, np.float32)
    wrong = ~(np.abs(vectors) < LARGEST).all(axis=1)  # (M,)
    if wrong.any():
        first = f"{wrong.sum()} of {len(wrong)} are not, first number {wrong.argmax()}"
        raise ValueError(f"expected finite vectors (no NaN, all below {LARGEST:g}), but {first}: check what made them")
    return vectors


def checked_model(model: str, expected: str, place: object) -> None:
    """An error where vectors were made by another model than those of the index at `place`."""
    if model != expected:
        theirs, ours = (f"the model {mark}" if mark else "an unknown model" for mark in (expected, model))
        raise ValueError(f"{place} holds vectors of {theirs}, these are of {ours}: embed them with the same one")


def checked_count(count: int) -> int:
    """How many items to find, if that is any."""
    if count < 1:
        raise ValueError(f"expected to find 1 item or more, got {count}")
    return count


def checked_text(text: str, what: str = "paths") -> str:
    """A path, or the name of a class, if both kinds of index can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected {what} that are text, got {text!r}: rename it") from None
    if "\0" in text:
        raise ValueError(f"expected {what} without a null character, got {text!r}: rename it")
    return text


def all_held(paths: Sequence[str], held: set[str], place: object) -> set[str]:
    """The paths, if all of them are held."""
    wanted = {str(path) for path in paths}
    missing = sorted(wanted - held)
    if missing:
        raise ValueError(f"{place} does not hold {len(missing)} of {len(wanted)} paths, first {missing[0]}")
    return wanted


def in_blocks(embeddings: Embeddings, width: int, place: object) -> Iterator[tuple[np.ndarray, list[str], list[str]]]:
    """Vectors (B, D) as they are compared, classes and paths, so many at a time: memory maps stay where they are."""
    for start in range(0, max(len(embeddings.vectors), 1), BLOCK):  # once for none, whose width is checked
        some = slice(start, start + BLOCK)
        vectors = checked_vectors(embeddings.vectors[some], width, place)
        classes = [checked_text(embeddings.class_name(label), "classes") for label in embeddings.labels[some]]
        yield vectors, classes, [checked_text(str(path)) for path in embeddings.paths[some]]


def are_unit_length(vectors: np.ndarray) -> bool:
    """Whether vectors (M, D) are all of length one, to the precision of float16."""
    lengths = np.linalg.norm(vectors, axis=1)
    return bool((np.abs(lengths - 1) < 2e-3).all())


class Gallery(Protocol):
    """What an index in a folder and one in PostgreSQL have in common."""

    def __len__(self) -> int: ...

    def blocks(self) -> Iterator[Embeddings]: ...

    def search(self, vectors: np.ndarray, count: int) -> list[list[Hit]]: ...


def recall_of(index: Gallery, count: int, queries: int) -> float:
    """Of the `count` items truly nearest to some of an index's own items, the share that its search finds.

    None finds itself. What is as near as the last of the truly nearest counts as found.
    """
    total = len(index)
    count = min(count, total - 1)
    if count < 1:
        return 1.0
    drawn = np.unique(np.linspace(0, total - 1, min(queries, total)).astype(int))  # (Q,)
    asked, paths = _at(drawn, index.blocks())
    nearest = np.full((len(drawn), count), np.inf)  # (Q, K); squared distances
    start = 0
    for block in index.blocks():
        vectors = block.vectors
        near = faiss.knn(asked, vectors, min(count + 1, len(vectors)))[1]  # (Q, up to K + 1)
        squared = np.square(vectors[near].astype(np.float64) - asked[:, None]).sum(2)  # float32 products are too coarse
        squared[near + start == drawn[:, None]] = np.inf
        nearest = np.sort(np.hstack([nearest, squared]), axis=1)[:, :count]
        start += len(vectors)
    limits = np.sqrt(nearest[:, -1]) * (1 + 1e-5)  # (Q,)
    found = 0
    for path, limit, hits in zip(paths, limits, index.search(asked, count + 1), strict=True):
        others = [hit for hit in hits if hit.path != path][:count]
        found += sum(hit.distance <= limit for hit in others)
    return found / (len(drawn) * count)


def _at(places: np.ndarray, blocks: Iterable[Embeddings]) -> tuple[np.ndarray, list[str]]:
    """The vectors (Q, D) and paths of the items at some places (Q,), ascending."""
    vectors, paths, start = [], [], 0
    for block in blocks:
        here = places[(places >= start) & (places < start + len(block.vectors))] - start
        vectors.append(block.vectors[here])
        paths += block.paths[here].tolist()
        start += len(block.vectors)
    return np.concatenate(vectors), paths
