"""Checks and conversion of vectors and labels."""

import numpy as np
import torch
from torch import Tensor


def as_matrix(vectors: np.ndarray | Tensor, name: str, *, min_rows: int = 1, width: int | None = None) -> Tensor:
    """Finite vectors (M, D) as float64 on the CPU, with at least `min_rows` rows and, if given, D = width."""
    if isinstance(vectors, Tensor):  # numpy has no bfloat16
        vectors = (vectors.double() if vectors.is_floating_point() else vectors).detach().cpu().numpy()
    vectors = np.asarray(vectors)
    valid = vectors.ndim == 2 and vectors.dtype.kind in "fiu" and len(vectors) >= min_rows and vectors.size
    if not valid or vectors.shape[1] != (width or vectors.shape[1]):
        shape, got = f"({min_rows} or more, {width or 'dimensions'})", f"{vectors.dtype} of shape {vectors.shape}"
        raise ValueError(f"expected {name} of shape {shape}, real numbers, got {got}: pass one row per image")
    vectors = np.require(vectors, np.float64, ["C", "W"])
    largest = max(vectors.max(), -vectors.min())
    if 0 < largest < 1e-100:
        raise ValueError(f"expected {name} with numbers above 1e-100, whose squares are not 0, got up to {largest:.1e}")
    if not largest < 1e150:  # squares must stay finite too
        bad = ~(np.abs(vectors) < 1e150).all(axis=1)  # (M,)
        raise ValueError(
            f"expected finite {name} (no NaN, all below 1e150), got {bad.sum()} of {len(bad)} rows that are not, "
            f"first row {bad.argmax()}"
        )
    return torch.from_numpy(vectors)


def as_labels(labels: np.ndarray | Tensor, length: int, name: str) -> Tensor:
    """Labels (M,) as int64, not -1; never through floats, which would merge labels above 2**24 or 2**53."""
    labels = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if labels.dtype.kind not in "iu" or labels.shape != (length,):
        got = f"{labels.dtype} of shape {labels.shape}"
        raise ValueError(f"expected {name} of shape ({length},), integers, got {got}: pass one integer per vector")
    if labels.dtype == np.uint64 and length and labels.max() >= 2**63:
        raise ValueError(f"expected {name} below 2**63, got {labels.max()}: renumber the classes")
    if missing := int((labels == -1).sum()):
        raise ValueError(
            f"expected {name} for all vectors, but {missing:,} of {length:,} have none (-1): leave these out"
        )
    return torch.from_numpy(labels.astype(np.int64))


def check_block(block: int) -> int:
    """The block size, if it is positive."""
    if block < 1:
        raise ValueError(f"expected a block of 1 or more queries, got {block}: omit it for the default")
    return block


def check_seed(seed: int) -> int:
    """The seed, if faiss can take it."""
    if not 0 <= seed < 2**31:
        raise ValueError(f"expected a seed from 0 to 2**31 - 1, got {seed}")
    return seed
