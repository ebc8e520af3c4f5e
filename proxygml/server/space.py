"""The embedding space that the page displays: vectors with classes and images, their neighbors, the trained proxies.

Axes: M images, D embedding, C classes, N proxies per class, K neighbors, Q queries.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import faiss
import numpy as np
import torch
from PIL import Image

from proxygml.display import counted
from proxygml.embeddings import Embeddings
from proxygml.losses.proxygml.chunked import link, propagate
from proxygml.retrieval import Hit, Index
from proxygml.retrieval.hits import cosines
from proxygml.retrieval.validation import have_unit_length
from proxygml.server.items import Encoder
from proxygml.tasks.classify import Calibration


@dataclass(frozen=True)
class Subgraph:
    """The proxies that a sample is linked to, and the class probabilities that follow."""

    linked: np.ndarray  # (k,): proxies, 0..CN-1
    cosines: np.ndarray  # (k,)
    own_class: int | None  # the sample's class, if it has proxies
    active_classes: np.ndarray  # (A,): classes with at least one link, ascending
    scores: np.ndarray  # (A,): Z, the sum of a class's cosines
    probabilities: np.ndarray  # (A,): P, the softmax of the scores


@dataclass(frozen=True)
class Proxies:
    """The proxies that a network was trained with; proxy j belongs to class j // N."""

    vectors: np.ndarray  # (C, N, D), of any norm
    class_names: tuple[str, ...]  # (C,)
    labels: np.ndarray  # (C,): the label of each class in the embeddings; -1: not among them
    links: int  # k: proxies that a sample is linked to
    positive_bonus: float  # ranks proxies of a sample's own class first, Eq. 3
    scale: float = 1.0  # of the scores in the softmax

    @property
    def unit_vectors(self) -> np.ndarray:
        """All proxies (CN, D), normalized."""
        vectors = self.vectors.reshape(-1, self.vectors.shape[-1])
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def subgraph(self, vector: np.ndarray, label: int | None) -> Subgraph:
        """The subgraph of a sample (D,), Eq. 2 to 6. Without a label, or with another one, no proxy is positive."""
        own = np.flatnonzero(self.labels == label).tolist() if label is not None and label >= 0 else []
        sample = torch.nn.functional.normalize(torch.from_numpy(vector.astype(np.float32))[None], dim=1)  # (1, D)
        labels, bonus = torch.tensor(own[:1] or [0]), self.positive_bonus if own else 0.0
        linked, cosines, *_ = link(sample, torch.from_numpy(self.vectors), labels, self.links, bonus)  # (1, k) each
        scores, classes, _ = propagate(cosines, linked // self.vectors.shape[1], len(self.vectors))  # (1, k) each
        active = classes >= 0
        scores, classes = scores[active], classes[active]  # (A,) each
        probabilities = torch.softmax(self.scale * scores, dim=0)
        arrays = (tensor.numpy() for tensor in (classes, scores, probabilities))
        return Subgraph(linked[0].numpy(), cosines[0].numpy(), own[0] if own else None, *arrays)


class Space:
    """Embeddings to display. Classes are numbered 0..C-1, whatever their labels are.

    `open_image(i)` returns image i; None if there are no images. `encoder` embeds uploads; None for the reason
    `no_upload`. `no_errors` is the reason why nothing is right or wrong, or empty.
    """

    writer: Index | None = None
    read_only = "this server shows the items that were there when it started: `proxygml serve` can change them"

    def __init__(
        self,
        name: str,
        embeddings: Embeddings,
        *,
        open_image: Callable[[int], Image.Image] | None = None,
        encoder: Encoder | None = None,
        no_upload: str = "",
        proxies: Proxies | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.name, self.open_image, self.encoder, self.calibration = name, open_image, encoder, calibration
        self.no_upload, self.proxies = no_upload, proxies
        vectors = np.ascontiguousarray(embeddings.vectors, np.float32)  # (M, D)
        if not vectors.size:
            raise ValueError(f"{name} has no vectors to display")
        invalid = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(invalid):
            rows = f"{len(invalid)} of {len(vectors)} are not, first row {invalid[0]}"
            raise ValueError(f"expected finite vectors (no NaN, all within float32), but {rows}")
        self.vectors, self.original_labels = vectors, embeddings.labels
        self.dim, self.model = embeddings.dim, embeddings.model
        self.labels, self.classes = np.unique(embeddings.labels, return_inverse=True)  # (C,), (M,)
        self.class_names = [valid_text(embeddings.class_name(label)) for label in self.labels.tolist()]
        missing = embeddings.unlabeled
        self.no_errors = f"{missing:,} of {counted(len(vectors), 'image')} without a label" if missing else ""
        self.class_sizes = np.bincount(self.classes)  # (C,)
        self.paths = [valid_text(str(path)) for path in embeddings.paths]
        self._texts = np.array(  # for filters: path and class name in lower case
            [f"{path}\n{self.class_names[c]}".lower() for path, c in zip(self.paths, self.classes, strict=True)]
        )
        self.unit = have_unit_length(vectors)
        self._origin = vectors.mean(axis=0)  # (D,); with the origin there, products of vectors cancel least
        self._centered = vectors - self._origin  # (M, D)

    def __len__(self) -> int:
        return len(self.vectors)

    def nearest(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The images nearest to vectors (Q, D), exactly: numbers (Q, K) and Euclidean distances (Q, K)."""
        queries = np.ascontiguousarray(vectors, np.float32) - self._origin
        squared, nearest = faiss.knn(queries, self._centered, min(count, len(self)))
        return nearest, np.sqrt(np.maximum(squared, 0))

    def nearest_others(self, images: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """As `nearest`, for images (Q,) by number, each without itself."""
        count = min(count, len(self) - 1)
        nearest, distances = self.nearest(self.vectors[images], count + 1)  # (Q, K + 1)
        # Among many equal vectors the image itself may be missing: then drop the last one.
        others = nearest != np.asarray(images)[:, None]
        others[others.all(axis=1), -1] = False
        return nearest[others].reshape(len(nearest), count), distances[others].reshape(len(nearest), count)

    def search(self, vectors: np.ndarray, count: int) -> list[list[Hit]]:
        """As `nearest`, as hits with the numbers of the images for ids."""
        results = []
        for vector, numbers, distances in zip(vectors, *self.nearest(vectors, count), strict=True):
            similarities = cosines(vector, self.vectors[numbers])
            columns = zip(numbers.tolist(), distances.tolist(), similarities.tolist(), strict=True)
            results.append(
                [Hit(self.paths[i], self.class_names[self.classes[i]], d, cosine, i) for i, d, cosine in columns]
            )
        return results

    def find(self, item: int | str) -> tuple[int, np.ndarray] | None:
        """Number and vector (D,) of an image, by its number or path; of several with the same path, the first."""
        number = item if isinstance(item, int) else self.paths.index(item) if item in self.paths else -1
        return (number, self.vectors[number]) if 0 <= number < len(self) else None

    def matching(self, text: str, class_number: int | None) -> np.ndarray:
        """Numbers of the images of a class, or of all, with every word of a text in their path or class name."""
        selected = np.ones(len(self), bool) if class_number is None else self.classes == class_number  # (M,)
        for word in text.lower().split():
            selected[selected] = np.char.find(self._texts[selected], word) >= 0
        return np.flatnonzero(selected)

    def subgraph_of(self, image: int) -> Subgraph | None:
        """The subgraph of an image, given its class; None without proxies."""
        if self.proxies is None:
            return None
        return self.proxies.subgraph(self.vectors[image], int(self.original_labels[image]))


def valid_text(text: str) -> str:
    """A text without lone surrogates, which file names may contain and JSON cannot."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
