"""Vectors and labels as they come, checked; and what their comparison needs to know of them."""

import hashlib

import numpy as np
import torch
from torch import Tensor


def matrix(vectors: np.ndarray | Tensor, name: str, *, least: int = 1, width: int | None = None) -> Tensor:
    """Finite vectors (M, D) as float64 on the CPU, at least so many and, where it is given, so wide."""
    if isinstance(vectors, Tensor):  # numpy has no bfloat16
        vectors = (vectors.double() if vectors.is_floating_point() else vectors).detach().cpu().numpy()
    vectors = np.asarray(vectors)
    right = vectors.ndim == 2 and vectors.dtype.kind in "fiu" and len(vectors) >= least and vectors.size
    if not right or vectors.shape[1] != (width or vectors.shape[1]):
        shape, came = f"({least} or more, {width or 'dimensions'})", f"{vectors.dtype} of shape {vectors.shape}"
        raise ValueError(f"expected {name} of shape {shape}, real numbers, but {came} came: pass one row per image")
    vectors = np.require(vectors, np.float64, ["C", "W"])
    if not (vectors.max() < 1e150 and vectors.min() > -1e150):  # squares have to stay finite too
        bad = ~(np.abs(vectors) < 1e150).all(axis=1)  # (M,)
        came = f"{bad.sum()} of {len(bad)} rows are not, first row {bad.argmax()}"
        raise ValueError(f"expected finite {name} (no NaN, all below 1e150), but {came}: check what made them")
    return torch.from_numpy(vectors)


def integers(labels: np.ndarray | Tensor, length: int, name: str) -> Tensor:
    """Labels (M,) as int64; never through floats, which would merge labels above 2**24 or 2**53."""
    labels = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if labels.dtype.kind not in "iu" or labels.shape != (length,):
        came = f"{labels.dtype} of shape {labels.shape}"
        raise ValueError(f"expected {name} of shape ({length},), integers, but {came} came: one integer per vector")
    if labels.dtype == np.uint64 and length and labels.max() >= 2**63:
        raise ValueError(f"expected {name} below 2**63, but {labels.max()} came: number the classes anew")
    return torch.from_numpy(labels.astype(np.int64))


def checked_block(block: int) -> int:
    """The block, if it holds anything."""
    if block < 1:
        raise ValueError(f"expected a block of 1 or more queries, but {block} came: leave it out to have it chosen")
    return block


def middle(vectors: Tensor) -> Tensor:
    """Of vectors (M, D) the one nearest to their mean: (D,).

    Products of vectors cancel least with the origin there. An item, not the mean: differences of integers, and nearly
    always of float32, are exact in float64, so that ties stay ties.
    """
    return vectors[torch.linalg.vector_norm(vectors - vectors.mean(0), dim=1).argmin()]


def first_equal(vectors: np.ndarray) -> Tensor:
    """Index of the first row equal to each row: vectors (M, D) -> (M,)."""
    seen: dict[bytes, int] = {}  # digest -> index; 16 bytes of a row instead of all of it. Adding 0 turns -0 into 0.
    digests = (hashlib.blake2b(vector + 0, digest_size=16).digest() for vector in vectors)
    return torch.tensor([seen.setdefault(digest, place) for place, digest in enumerate(digests)])
