"""An index in a folder: an SQLite database, and a faiss index that can be rebuilt from it.

Ids ascend and are never reused, so an outdated faiss index needs only the items after its highest id, minus the removed
ones. It is written to disk after many changes; an exact index never, since reading it from the database is as fast.
"""

import json
import shutil
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from proxygml.embeddings import Embeddings
from proxygml.files import atomic_write, file_checksum
from proxygml.retrieval import validation
from proxygml.retrieval.contents import DATABASE, MODEL_FILES, check_contents, check_new
from proxygml.retrieval.database import Database, item_checksum
from proxygml.retrieval.hits import Hit, cosines, measure_recall
from proxygml.retrieval.validation import BLOCK_ROWS
from proxygml.retrieval.vector_index import KINDS, VectorIndex

INSERT = "INSERT OR IGNORE INTO items (path, class, vector, checksum) VALUES (?, ?, ?, ?)"
MAX_UNWRITTEN = 1000  # new items: adding fewer is faster than writing the whole faiss index
CANDIDATE_ELEMENTS, QUERY_BLOCK = 2**25, 1024  # candidates' vectors in memory (128 MB), and queries, at a time


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

    def __init__(self, database: Database) -> None:
        self.database = database
        metadata = database.metadata()
        self.dim, self.model, self.kind = int(metadata["dim"]), metadata["model"], metadata["kind"]
        self.folder = None if database.path is None else database.path.parent  # None: in memory
        self.location = str(self.folder or "the index")
        self._vector_index: VectorIndex | None = None
        self._lock = threading.RLock()
        self.close = database.close

    @classmethod
    def create(cls, folder: str | Path | None, *, dim: int, model: str = "", kind: str = "exact") -> "Index":
        """An empty index of vectors (M, dim) from the model with this id; in memory if `folder` is None."""
        if kind not in KINDS:
            raise ValueError(f"expected a kind of index among {', '.join(KINDS)}, got {kind!r}")
        if dim < 1:
            raise ValueError(f"expected vectors of 1 dimension or more, got {dim}")
        metadata: dict[str, str | int] = {"dim": dim, "model": model, "kind": kind}
        if folder is None:
            database = Database(None)
            database.create_tables(metadata)
            return cls(database)
        folder = Path(folder)
        check_new(folder)
        with atomic_write(folder / DATABASE) as draft:
            database = Database(draft)
            database.create_tables(metadata)
            database.close()
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> "Index":
        """An existing index."""
        path = Path(folder) / DATABASE
        if not path.is_file():
            raise FileNotFoundError(f"no {DATABASE} in {folder}: not an index, `proxygml index build` makes one")
        check_contents(path.parent)
        return cls(Database(path))

    @classmethod
    def from_embeddings(cls, embeddings: Embeddings) -> "Index":
        """An index of embeddings in memory."""
        index = cls.create(None, dim=embeddings.vectors.shape[1], model=embeddings.model)
        index.add(embeddings)
        return index

    def __len__(self) -> int:
        return self.database.rows("SELECT COUNT(*) FROM items")[0][0]

    @property
    def class_names(self) -> np.ndarray:
        """Names (C,) of all classes, including those of removed items."""
        return np.array([name for (name,) in self.database.rows("SELECT name FROM classes ORDER BY id")], str)

    @property
    def metadata(self) -> dict[str, str]:
        """dim, model, kind, unit_length (1 or 0), version, and what `set_metadata` added."""
        return self.database.metadata()

    def set_metadata(self, name: str, value: str) -> None:
        with self._lock, self.database.transaction():
            self.database.set_metadata({name: value})

    def listing(self) -> list[tuple[str, str]]:
        """Path and class name of every item."""
        return self.database.rows("SELECT path, name FROM items JOIN classes ON classes.id = class ORDER BY items.id")

    def contains(self, paths: Sequence[str]) -> set[str]:
        """The subset of the paths that are in the index."""
        query = "SELECT path FROM items WHERE path IN (SELECT value FROM json_each(?))"
        return {path for (path,) in self.database.rows(query, [json.dumps([str(path) for path in paths])])}

    def add(self, embeddings: Embeddings) -> int:
        """Add the items with new paths in one transaction; returns their number."""
        validation.check_model(embeddings.model, self.model, self.location)
        added = 0
        with self._lock, self.database.transaction() as connection:
            for vectors, classes, paths in validation.checked_blocks(embeddings, self.dim, self.location):
                names = [(name,) for name in dict.fromkeys(classes)]
                connection.executemany("INSERT OR IGNORE INTO classes (name) VALUES (?)", names)
                class_ids = dict(connection.execute("SELECT name, id FROM classes"))
                rows = [
                    (path, class_ids[name], vector.astype("<f4").tobytes())
                    for vector, name, path in zip(vectors, classes, paths, strict=True)
                ]
                before = connection.total_changes
                connection.executemany(INSERT, [(*row, item_checksum(*row)) for row in rows])
                added += connection.total_changes - before
                if not validation.have_unit_length(vectors):
                    self.database.set_metadata({"unit_length": 0})
        return added

    def remove(self, paths: Sequence[str]) -> int:
        """Remove items by path in one transaction; returns their number."""
        with self._lock, self.database.transaction() as connection:
            rows = [(path,) for path in validation.check_contains(paths, self.contains(paths), self.location)]
            connection.executemany("INSERT INTO removed (id) SELECT id FROM items WHERE path = ?", rows)
            connection.executemany("DELETE FROM items WHERE path = ?", rows)
        return len(rows)

    def relocate(self, old: str, new: str) -> int:
        """Replace the folder `old` of all paths below it by `new`, for images that have moved; returns their number."""
        relocated = ":new || substr(path, length(:old) + 1)"
        query = (  # damaged items stay as they are
            f"UPDATE items SET path = {relocated}, checksum = item_checksum({relocated}, class, vector) "  # nosec B608 # constants
            "WHERE substr(path, 1, length(:old) + 1) = :old || '/' AND checksum = item_checksum(path, class, vector)"
        )
        with self._lock, self.database.transaction() as connection:
            connection.create_function("item_checksum", 3, item_checksum)
            try:
                return connection.execute(query, {"old": old, "new": validation.check_text(new)}).rowcount
            except sqlite3.IntegrityError as error:
                raise validation.already_below(new, self.location) from error

    def search(self, vectors: np.ndarray, count: int) -> list[list[Hit]]:
        """The `count` items nearest to each query (M, D), nearest first; fewer if the index has fewer.

        Candidates from faiss are ranked again by their full vectors in float64.
        """
        vectors = validation.check_query(vectors, count, self.dim, self.location)
        results: list[list[Hit]] = []
        with self._lock:
            vector_index = self._update(None)
            candidates_per_block = CANDIDATE_ELEMENTS // (self.dim * vector_index.num_candidates(count))
            block = min(max(1, candidates_per_block), QUERY_BLOCK)
            for start in range(0, len(vectors), block):
                queries = vectors[start : start + block]  # (B, D)
                while (hits := self._rank(queries, vector_index.search(queries, count), count)) is None:
                    vector_index = self._update(None)
                results += hits
        return results

    def _rank(self, queries: np.ndarray, candidates: np.ndarray, count: int) -> list[list[Hit]] | None:
        """The nearest to queries (B, D) among candidate ids (B, K), where -1 is no item; None if some were removed."""
        ids = np.unique(candidates[candidates >= 0])
        rows = self.database.items("items.id IN (SELECT value FROM json_each(?))", json.dumps(ids.tolist()))
        if len(rows) < len(ids):  # by another process, since the faiss index was updated
            return None
        vectors = self._matrix([row[3] for row in rows])  # (rows, D)
        results = []
        for query, query_ids in zip(queries.astype(np.float64), np.sort(candidates, axis=1), strict=True):
            positions = np.searchsorted(ids, query_ids[query_ids >= 0])  # (K,)
            distances = np.sqrt(np.square(vectors[positions] - query).sum(1))
            best = np.argsort(distances, kind="stable")[:count]  # ties: the item added first
            similarities = cosines(query, vectors[positions[best]])
            numbers = zip(positions[best].tolist(), distances[best].tolist(), similarities.tolist(), strict=True)
            results.append([Hit(*rows[row][1:3], *values) for row, *values in numbers])
        return results

    def blocks(self) -> Iterator[Embeddings]:
        """All items in blocks of some thousand; labels are positions in `class_names`."""
        ((last,),) = self.database.rows("SELECT MAX(id) FROM items")
        class_names = self.class_names
        labels = {name: label for label, name in enumerate(class_names.tolist())}
        start = 0
        while rows := self.database.items("items.id > ? AND items.id <= ?", start, last or 0, limit=BLOCK_ROWS):
            yield Embeddings(
                self._matrix([row[3] for row in rows]),
                np.array([labels[row[2]] for row in rows]),
                np.array([row[1] for row in rows], str),
                class_names,
                self.model,
            )
            start = rows[-1][0]

    def recall(self, count: int = 10, queries: int = 200) -> float:
        """The fraction of the true nearest neighbors of some of its own items that `search` finds."""
        return measure_recall(self, count, queries)

    def check(self) -> None:
        """An error if the database is damaged; items are also checked whenever they are read."""
        self.database.check()

    def refresh(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Bring the faiss index up to date now rather than at the next search."""
        with self._lock:
            self._update(progress)

    def save_model(self, run: Path) -> None:
        """Copy best.pt and recipe.json of a run into the index, to embed queries."""
        if self.folder is None:
            raise ValueError("an index in memory has no folder for a model: create it with one")
        for name in MODEL_FILES:
            with atomic_write(self.folder / "model" / name) as draft:
                shutil.copyfile(run / name, draft)
        self.set_metadata("network", _model_checksum(self.folder / "model"))

    def model_folder(self) -> Path | None:
        """The folder with the files of `save_model`, or None if they are missing or damaged."""
        folder = None if self.folder is None else self.folder / "model"
        return folder if folder is not None and self.metadata.get("network") == _model_checksum(folder) else None

    def _update(self, progress: Callable[[int, int], None] | None) -> VectorIndex:
        """The faiss index, with all changes of the database."""
        count, index = len(self), self._vector_index
        if index is None and self.folder is not None and self.kind != "exact":
            index = VectorIndex.read(self.folder, self.kind, self.dim)
        if index is not None:
            query = "SELECT number, id FROM removed WHERE number > ? ORDER BY number"
            if removed := self.database.rows(query, [index.last_removal]):
                index.remove(np.array([item_id for _, item_id in removed], np.int64))
                index.last_removal = removed[-1][0]
        if index is None or not index.fits(self.kind, count):
            index = VectorIndex.new(self.kind, self.dim, count, self._sample)
        missing, added = count - len(index), 0
        while rows := self.database.items("items.id > ?", index.last_id, limit=BLOCK_ROWS):
            index.add(np.array([row[0] for row in rows], np.int64), self._matrix([row[3] for row in rows]))
            added += len(rows)
            if progress is not None:
                progress(added, max(missing, added))
        self._vector_index = index
        if added > MAX_UNWRITTEN and self.folder is not None and index.kind != "exact":
            try:
                index.write(self.folder)
            except OSError as error:  # the search itself does not need the file
                warnings.warn(f"{error}: the next process builds it again", stacklevel=4)
        return index

    def _sample(self, count: int) -> np.ndarray:
        """A reproducible pseudo-random sample of vectors: (count, D)."""
        where = "items.id IN (SELECT id FROM items ORDER BY (id * 2654435761) % 4294967296 LIMIT ?)"
        return self._matrix([row[3] for row in self.database.items(where, count)])

    def _matrix(self, vectors: list[bytes]) -> np.ndarray:
        """Vectors as stored in the database -> (M, D)."""
        if any(not isinstance(vector, bytes) or len(vector) != 4 * self.dim for vector in vectors):
            raise ValueError(f"{self.location} is damaged (vectors of other lengths): build the index again")
        return np.frombuffer(b"".join(vectors), "<f4").reshape(-1, self.dim).astype(np.float32, copy=False)


def _model_checksum(model: Path) -> str:
    paths = [model / name for name in MODEL_FILES]
    return " ".join(f"{file_checksum(path):08x}" if path.exists() else "none" for path in paths)
