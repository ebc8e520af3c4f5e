"""Index: vectors with paths and classes to search in, stored in a folder or in PostgreSQL."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from proxygml.display import counted
from proxygml.embeddings import Embeddings, concatenate
from proxygml.retrieval import ranking, validation
from proxygml.retrieval.folder import FolderStorage
from proxygml.retrieval.hits import Hit, measure_recall
from proxygml.retrieval.postgres import PostgresStorage
from proxygml.retrieval.url import is_url
from proxygml.version import __version__


class Index:
    """Vectors with paths and classes to search in; processes and threads may share it.

    Use `create`, `open` or `from_embeddings`, then `add`, `remove` and `search`:

    >>> import numpy as np
    >>> from proxygml import Embeddings, Index
    >>> photos = Embeddings(np.eye(3), labels=np.arange(3), paths=np.array(["crow.jpg", "owl.jpg", "wren.jpg"]))
    >>> hits = Index.from_embeddings(photos).search(np.array([[0.1, 0.9, 0]]), count=1)[0]
    >>> hits[0].path
    'owl.jpg'
    """

    def __init__(self, storage: FolderStorage | PostgresStorage) -> None:
        self.storage, self.location = storage, storage.location
        self.dim, self.model, self.kind = storage.dim, storage.model, storage.kind

    @classmethod
    def create(
        cls,
        location: str | Path | None,
        *,
        dim: int,
        model: str = "",
        kind: str | None = None,
        expected_size: int = 0,
        prefix: int | None = None,
    ) -> "Index":
        """An empty index of vectors (M, dim) from the model with this id.

        `location` is a new folder or a postgresql:// URL; None keeps the index in memory. Without `kind`, the index is
        of the kind that suits `expected_size`. With a `prefix`, a search in a folder compares so many first dimensions,
        scaled to length 1, and ranks ten times as many candidates as wanted, at least 100, by their whole vectors.
        """
        storage = _storage_at(location)
        kind = choose_kind(location, dim=dim, kind=kind, expected_size=expected_size, prefix=prefix)
        values = {"schema_version": storage.SCHEMA_VERSION, "version": __version__}
        values |= {"dim": dim, "model": model, "kind": kind} | ({"prefix": prefix} if prefix else {})
        return cls(storage.create(location, {name: str(value) for name, value in values.items()}))

    @classmethod
    def open(cls, location: str | Path) -> "Index":
        """The existing index in a folder or at a postgresql:// URL."""
        return cls(_storage_at(location).open(location))

    @classmethod
    def from_embeddings(cls, embeddings: Embeddings) -> "Index":
        """An index of embeddings in memory."""
        index = cls.create(None, dim=embeddings.dim, model=embeddings.model, kind="exact")
        index.add(embeddings)
        return index

    def close(self) -> None:
        self.storage.close()

    def __len__(self) -> int:
        return self.storage.rows("SELECT COUNT(*) FROM items")[0][0]

    @property
    def class_names(self) -> np.ndarray:
        """Names (C,) of all classes, including those of removed items."""
        return np.array([name for (name,) in self.storage.rows("SELECT name FROM classes ORDER BY id")], str)

    @property
    def metadata(self) -> dict[str, str]:
        """dim, model, kind, version, and what `set_metadata` added."""
        return self.storage.metadata()

    def set_metadata(self, name: str, value: str) -> None:
        self.storage.set_metadata(name, value)

    def listing(self) -> list[tuple[str, str]]:
        """Path and class name of every item."""
        return self.storage.rows("SELECT path, name FROM items JOIN classes ON classes.id = class ORDER BY items.id")

    def contains(self, paths: Sequence[str]) -> set[str]:
        """The subset of the paths that are in the index."""
        return self.storage.contains([str(path) for path in paths])

    def add(self, embeddings: Embeddings) -> int:
        """Add the items with new paths in one transaction; returns their number."""
        validation.check_model(embeddings.model, self.model, self.location)
        return self.storage.add(validation.checked_blocks(embeddings, self.dim, self.location))

    def remove(self, paths: Sequence[str]) -> int:
        """Remove items by path in one transaction; returns their number."""
        return self.storage.remove([str(path) for path in paths])

    def relocate(self, old: str, new: str) -> int:
        """Replace the folder `old` of all paths below it by `new`, for images that have moved; returns their number."""
        return self.storage.relocate(old, validation.check_text(new))

    def search(
        self,
        vectors: np.ndarray,
        count: int,
        *,
        expand: int | None = None,
        augment: int | None = None,
        rerank: int | None = None,
    ) -> list[list[Hit]]:
        """The `count` items nearest to each query (M, D), nearest first; fewer if the index has fewer.

        Three options change the order, but neither distances nor similarities. `expand` searches for the weighted mean
        of a query and so many of its nearest items; `augment` compares queries with such means of the items, which
        every call computes in memory; `rerank` orders so many of the nearest by their k-reciprocal neighbors.
        """
        if count < 1:
            raise ValueError(f"expected to find 1 item or more, got {count}")
        queries = validation.check_vectors(vectors, self.dim, self.location)
        if all(option is None for option in (expand, augment, rerank)):
            return self.storage.search(queries, count)
        ranking.check_sizes(len(self), expand=expand, augment=augment, rerank=rerank)
        searched = self
        if augment is not None:
            searched = Index.from_embeddings(ranking.augment(concatenate(list(self.blocks())), augment))
        return ranking.search_improved(searched.storage, self.storage, queries, count, expand, rerank)

    def find(self, item: int | str) -> tuple[int, np.ndarray] | None:
        """Id and vector (D,) of an item, by its id or path; None if it is not in the index."""
        return self.storage.find(validation.check_text(item) if isinstance(item, str) else item)

    def blocks(self) -> Iterator[Embeddings]:
        """All items in blocks of some thousand; labels are positions in `class_names`."""
        return self.storage.blocks()

    def recall(self, count: int = 10, queries: int = 200) -> float:
        """The fraction of the true nearest neighbors of some of its own items that `search` finds."""
        return measure_recall(self, count, queries)

    def check(self) -> None:
        """An error if the database is damaged; items are also checked whenever they are read."""
        self.storage.check()

    def refresh(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Bring a graph or inverted lists up to date now rather than at the next search."""
        self.storage.refresh(progress)

    def save_model(self, run: Path) -> None:
        """Copy model.safetensors and recipe.json of a run into the index, to embed queries."""
        self.storage.save_model(run)

    def model_folder(self) -> Path | None:
        """A folder with the files of `save_model`, or None if they are missing or damaged."""
        return self.storage.model_folder()


def choose_kind(
    location: str | Path | None, *, dim: int, kind: str | None, expected_size: int, prefix: int | None
) -> str:
    """The kind of a new index; an error if the settings of `Index.create` do not fit."""
    storage = _storage_at(location)
    if prefix is not None and not 1 <= prefix < dim:
        raise ValueError(
            f"expected a prefix from 1 to below the {counted(dim, 'dimension')} of the vectors, got {prefix}"
        )
    if prefix is not None and storage is PostgresStorage:
        raise ValueError("an index in PostgreSQL searches whole vectors: leave out the prefix, or name a folder")
    kind = kind or storage.suggest_kind(expected_size, prefix or dim)
    if kind not in storage.MAX_DIM:
        raise ValueError(f"expected a kind of index among {', '.join(storage.MAX_DIM)}, got {kind!r}")
    if not 1 <= dim <= storage.MAX_DIM[kind]:
        raise ValueError(f"expected vectors of 1 to {storage.MAX_DIM[kind]:,} dimensions for {kind}, got {dim:,}")
    return kind


def _storage_at(location: str | Path | None) -> type[FolderStorage] | type[PostgresStorage]:
    return PostgresStorage if is_url(location) else FolderStorage
