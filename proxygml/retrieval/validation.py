"""Checks of what goes into an index, of queries and of settings, whatever stores the items."""

from collections.abc import Iterator

import numpy as np

from proxygml.display import counted
from proxygml.embeddings import Embeddings
from proxygml.version import __version__

BLOCK_ROWS = 10_000  # vectors in memory at a time
MAX_VALUE = 1e15  # of a vector's elements: squared distances must stay finite in float32

Block = tuple[np.ndarray, list[str], list[str]]  # vectors (BLOCK_ROWS, D) as float32, class names, paths


def read_settings(metadata: dict[str, str], schema_version: int, location: str) -> tuple[int, str, str]:
    """dim, model and kind of an index; an error if another version of the package has written it."""
    if metadata["schema_version"] != str(schema_version):
        versions = f"{metadata['version']}, this is {__version__}"
        raise ValueError(f"{location} was written by proxygml {versions}: update proxygml or build the index again")
    return int(metadata["dim"]), metadata["model"], metadata["kind"]


def check_vectors(vectors: np.ndarray, dim: int, location: object) -> np.ndarray:
    """Vectors (M, D) as float32; an error if they do not fit the index at `location`."""
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or vectors.shape[1] != dim or vectors.dtype.kind not in "fiu":
        got = f"{vectors.dtype} {vectors.shape}"
        raise ValueError(f"expected real vectors (M, {dim}), as in {location}, got {got}")
    with np.errstate(over="ignore"):  # overflow gives inf, which is rejected below
        vectors = np.ascontiguousarray(vectors, np.float32)
    invalid = ~(np.abs(vectors) < MAX_VALUE).all(axis=1)  # (M,)
    if invalid.any():
        first = f"{invalid.sum()} of {len(invalid)} are not, first row {invalid.argmax()}"
        raise ValueError(f"expected finite vectors (no NaN, all below {MAX_VALUE:g}), but {first}")
    return vectors


def check_model(model: str, expected: str, location: object) -> None:
    """An error if vectors come from another model than those of the index at `location`."""
    if model != expected:
        theirs, ours = (f"model {model_id}" if model_id else "an unknown model" for model_id in (expected, model))
        remedy = "embed them with the same model" + (" and --space" if "+" in model + expected else "")
        raise ValueError(f"{location} has vectors of {theirs}, these are of {ours}: {remedy}")


def is_text(name: str) -> bool:
    """Whether a file name is valid Unicode."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(text: str, what: str = "paths") -> str:
    """A path or class name that both types of index can store."""
    if not is_text(text):
        raise ValueError(f"expected {what} in valid Unicode, got {text!r}: rename it")
    if "\0" in text:
        raise ValueError(f"expected {what} without a null character, got {text!r}: rename it")
    return text


def already_below(folder: str, location: object) -> ValueError:
    """The error if paths below a folder are taken."""
    return ValueError(f"{location} contains some of these paths below {folder} already: remove the old or the new ones")


def check_contains(paths: list[str], contained: set[str], location: object) -> None:
    """An error if an index does not contain all of the paths."""
    if missing := sorted(set(paths) - contained):
        raise ValueError(
            f"{location} does not contain {len(missing)} of {counted(len(set(paths)), 'path')}, first {missing[0]}"
        )


def checked_blocks(embeddings: Embeddings, dim: int, location: object) -> Iterator[Block]:
    """The embeddings block by block: a memory map stays on disk."""
    for start in range(0, max(len(embeddings.vectors), 1), BLOCK_ROWS):  # once if empty, to check D
        rows = slice(start, start + BLOCK_ROWS)
        vectors = check_vectors(embeddings.vectors[rows], dim, location)
        classes = [check_text(embeddings.class_name(label), "classes") for label in embeddings.labels[rows]]
        yield vectors, classes, [check_text(str(path)) for path in embeddings.paths[rows]]


def have_unit_length(vectors: np.ndarray) -> bool:
    """Whether all vectors (M, D) have length one, to the precision of float16."""
    return bool((np.abs(np.linalg.norm(vectors, axis=1) - 1) < 2e-3).all())
