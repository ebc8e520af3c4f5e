"""Fixtures for tasks: embeddings of classes that lie around random directions."""

import numpy as np

from proxygml.embeddings import Embeddings


def blobs(classes: int, size: int, *, spread: float = 0.2, dim: int = 16, seed: int = 0) -> Embeddings:
    """Unit vectors around random directions, `size` of each class, with paths CLASS/NUMBER.jpg."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), size)
    vectors = rng.normal(size=(classes, dim))[labels] + spread * rng.normal(size=(len(labels), dim)) * dim**0.5
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    names = np.array([f"class{label}" for label in range(classes)])
    paths = np.array([f"{names[label]}/{number}.jpg" for number, label in enumerate(labels)])
    return Embeddings(vectors.astype(np.float32), labels, paths, names)
