"""What the page shows: vectors with their classes and images, which are nearest to which, and the trained proxies.

Axes: M images, D embedding, C classes, N proxies per class, K neighbors, Q queries.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import faiss
import numpy as np
import torch
from PIL import Image

from proxygml.embeddings import Embeddings
from proxygml.losses.proxygml.chunked import link, propagate


@dataclass(frozen=True)
class Proxies:
    """The proxies that a network was trained with; proxy j is of class j // N."""

    vectors: np.ndarray  # (C, N, D), of any length
    class_names: tuple[str, ...]  # C of them
    labels: np.ndarray  # (C,): the labels that these classes have among the embeddings; -1: none is shown
    links: int  # k: as many proxies as a sample is linked to
    positive_bonus: float  # what ranks proxies of a sample's own class first, Eq. 3
    scale: float = 1.0  # of the scores in the softmax

    @property
    def unit_vectors(self) -> np.ndarray:
        """All of them (CN, D) at unit length."""
        vectors = self.vectors.reshape(-1, self.vectors.shape[-1])
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def subgraph(self, vector: np.ndarray, label: int | None) -> "Subgraph":
        """The links of a sample (D,): Eq. 2 to 6. A label that no proxy has, or None, has no positive proxies."""
        (own,) = np.nonzero(self.labels == label) if label is not None and label >= 0 else (np.empty(0, int),)
        sample = torch.nn.functional.normalize(torch.from_numpy(vector.astype(np.float32))[None], dim=1)  # (1, D)
        known = torch.tensor([own[0] if len(own) else 0])
        bonus = self.positive_bonus if len(own) else 0.0
        linked, cosines, *_ = link(sample, torch.from_numpy(self.vectors), known, self.links, bonus)  # (1, k) each
        scores, reached, _ = propagate(cosines, linked // self.vectors.shape[1], len(self.vectors))  # (1, k) each
        there = reached[0] >= 0
        shares = torch.softmax(self.scale * scores[0, there], dim=0)
        return Subgraph(
            linked[0].numpy(),
            cosines[0].numpy(),
            int(own[0]) if len(own) else None,
            reached[0, there].numpy(),
            scores[0, there].numpy(),
            shares.numpy(),
        )


@dataclass(frozen=True)
class Subgraph:
    """What a sample is linked to, and what the links say of its class."""

    linked: np.ndarray  # (k,): proxies, counted 0..CN-1
    cosines: np.ndarray  # (k,)
    own_class: int | None  # the sample's own, where proxies have it
    reached: np.ndarray  # classes that links reach, ascending
    scores: np.ndarray  # of each of them Z, the sum of its links' cosines
    shares: np.ndarray  # of each of them P, the softmax over them


class Space:
    """Embeddings as they are shown. Classes are counted 0..C-1 here, whatever their labels are.

    `open_image(i)` gives image i; without it there are no images. `embed_image` turns an uploaded image into a vector
    (D,); without it `no_upload` says why.
    """

    def __init__(
        self,
        name: str,
        embeddings: Embeddings,
        *,
        open_image: Callable[[int], Image.Image] | None = None,
        embed_image: Callable[[Image.Image], np.ndarray] | None = None,
        no_upload: str = "",
        proxies: Proxies | None = None,
    ) -> None:
        self.name, self.open_image, self.embed_image = name, open_image, embed_image
        self.no_upload, self.proxies = no_upload, proxies
        vectors = np.ascontiguousarray(embeddings.vectors, np.float32)  # (M, D)
        if not vectors.size:
            raise ValueError(f"{name} holds no vectors: there is nothing to look at")
        if not np.isfinite(vectors).all():
            bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))  # (rows,)
            raise ValueError(
                f"expected finite vectors, but {len(bad)} of {len(vectors)} hold NaN, infinity or what float32 cannot: "
                f"first row {bad[0]}"
            )
        self.vectors, self.original_labels = vectors, embeddings.labels
        labels, self.classes = np.unique(embeddings.labels, return_inverse=True)  # (C,), (M,)
        self.class_names = [shown(embeddings.class_name(int(label))) for label in labels]
        self.class_sizes = np.bincount(self.classes)  # (C,)
        self.paths = [shown(str(path)) for path in embeddings.paths]
        self._texts = np.array(  # to filter by: path and class name, without case
            [f"{path}\n{self.class_names[c]}".lower() for path, c in zip(self.paths, self.classes, strict=True)]
        )
        lengths = np.linalg.norm(vectors, axis=1)  # (M,)
        self.unit = bool(np.abs(lengths - 1).max() < 1e-3)
        self._origin = vectors.mean(axis=0)  # (D,); products cancel least with the origin there
        self._index = faiss.IndexFlatL2(vectors.shape[1])
        self._index.add(vectors - self._origin)

    def __len__(self) -> int:
        return len(self.vectors)

    def nearest(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of vectors (Q, D) the nearest images (Q, K) and their Euclidean distances (Q, K), exactly, nearest first."""
        squared, found = self._index.search(
            np.ascontiguousarray(vectors, np.float32) - self._origin, min(count, len(self))
        )
        return found, np.sqrt(np.maximum(squared, 0))

    def nearest_others(self, images: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """As `nearest`, of images (Q,) by their number, each without itself."""
        count = min(count, len(self) - 1)
        found, distances = self.nearest(self.vectors[images], count + 1)  # (Q, K + 1)
        # Among many equal vectors the image itself may not be found: then the last one goes.
        others = found != np.asarray(images)[:, None]
        others[others.all(axis=1), -1] = False
        return found[others].reshape(len(found), count), distances[others].reshape(len(found), count)

    def similarity(self, distances: np.ndarray) -> np.ndarray:
        """The cosine of unit vectors so far apart; of other vectors the distance itself."""
        return 1 - np.asarray(distances) ** 2 / 2 if self.unit else np.asarray(distances)

    def matching(self, text: str, class_number: int | None) -> np.ndarray:
        """The numbers of the images whose path or class name has every word of a text, of one class or of all."""
        chosen = np.ones(len(self), bool) if class_number is None else self.classes == class_number  # (M,)
        for word in text.lower().split():
            chosen[chosen] = np.char.find(self._texts[chosen], word) >= 0
        return np.flatnonzero(chosen)

    def subgraph_of(self, image: int) -> Subgraph | None:
        """What an image is linked to, by its own class; None without proxies."""
        if self.proxies is None:
            return None
        return self.proxies.subgraph(self.vectors[image], int(self.original_labels[image]))


def shown(text: str) -> str:
    """A text that can be sent: names of files may hold bytes that are no text."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
