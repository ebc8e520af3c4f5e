"""What the API searches in: vectors with paths and classes, and the network that embeds queries."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from PIL import Image

from proxygml.retrieval import Hit, Index
from proxygml.tasks.classify import Calibration, read_calibration


class Encoder(Protocol):
    """Embeds images in two steps, as a `Model` does: decodes each in any thread, then encodes several."""

    def crop(self, image: Image.Image) -> np.ndarray: ...

    def encode_crops(self, crops: Sequence[np.ndarray]) -> np.ndarray:
        """Vectors (M, D)."""


class Items(Protocol):
    """Items to search in: an index, or the space that a page displays."""

    dim: int
    model: str
    encoder: Encoder | None
    no_upload: str  # why images are not embedded, if there is no encoder
    writer: Index | None
    read_only: str  # why items are neither added nor removed, if `writer` is None

    def __len__(self) -> int: ...

    @property
    def calibration(self) -> Calibration | None:
        """From which score on an image is of a known class; None: always."""

    def search(self, vectors: np.ndarray, count: int) -> list[list[Hit]]:
        """The `count` nearest to each query (M, D), nearest first."""

    def find(self, item: int | str) -> tuple[int, np.ndarray] | None:
        """Id and vector (D,) of an item, by its id or path; None if there is none."""


class IndexItems:
    """The items of an index, which other processes may change meanwhile.

    `writer` is the same index, opened again: while it waits for another process, searches go on.
    """

    def __init__(
        self,
        index: Index,
        *,
        encoder: Encoder | None = None,
        no_upload: str = "",
        writer: Index | None = None,
        read_only: str = "",
    ) -> None:
        self.dim, self.model = index.dim, index.model
        self.encoder, self.no_upload = encoder, no_upload
        self.writer, self.read_only = writer, read_only
        self.search, self.find, self._index = index.search, index.find, index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def calibration(self) -> Calibration | None:
        return read_calibration(self._index)
