"""The items of an index in a folder: an SQLite database, and a faiss index that can be rebuilt from it.

Ids ascend and are never reused, so an outdated faiss index needs only the items after its highest id, minus the removed
ones. It is written to disk after many changes; an exact index never, since reading it from the database is as fast.
"""

import json
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from proxygml.embeddings import Embeddings
from proxygml.files import atomic_write, file_checksum, warn
from proxygml.retrieval import validation
from proxygml.retrieval.contents import DATABASE, MODEL_FILES, check_contents, check_new
from proxygml.retrieval.database import SCHEMA_VERSION, Database, item_checksum
from proxygml.retrieval.hits import Hit, cosines
from proxygml.retrieval.validation import BLOCK_ROWS, Block
from proxygml.retrieval.vector_index import CANDIDATES_PER_HIT, KINDS, VectorIndex, suggest_kind

INSERT = "INSERT OR IGNORE INTO items (path, class, vector, checksum) VALUES (?, ?, ?, ?)"
MAX_UNWRITTEN = 1000  # new items: adding fewer is faster than writing the whole faiss index
CANDIDATE_ELEMENTS, QUERY_BLOCK = 2**25, 1024  # candidates' vectors in memory (128 MB), and queries, at a time


class FolderStorage:
    """The items of an `Index` in a folder, or in memory."""

    SCHEMA_VERSION = SCHEMA_VERSION
    MAX_DIM = dict.fromkeys(KINDS, 2**20)
    suggest_kind = staticmethod(suggest_kind)

    def __init__(self, database: Database) -> None:
        self.database, self.rows, self.metadata = database, database.rows, database.metadata
        self.folder = None if database.path is None else database.path.parent  # None: in memory
        self.location = str(self.folder or "the index")
        settings = validation.read_settings(self.metadata(), SCHEMA_VERSION, self.location)
        self.dim, self.model, self.kind = settings
        self.prefix = int(self.metadata().get("prefix", self.dim))  # first dimensions that faiss searches
        self.close, self.check = database.close, database.check
        self._vector_index: VectorIndex | None = None
        self._lock = threading.RLock()

    @classmethod
    def create(cls, folder: str | Path | None, metadata: dict[str, str]) -> "FolderStorage":
        if folder is None:
            return cls(Database(None, metadata))
        check_new(Path(folder))
        with atomic_write(Path(folder) / DATABASE) as draft:
            Database(draft, metadata).close()
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> "FolderStorage":
        path = Path(folder) / DATABASE
        if not path.is_file():
            raise FileNotFoundError(f"no {DATABASE} in {folder}: not an index, `proxygml index build` makes one")
        check_contents(path.parent)
        return cls(Database(path))

    def set_metadata(self, name: str, value: str) -> None:
        with self._lock, self.database.transaction():
            self.database.set_metadata({name: value})

    def contains(self, paths: list[str]) -> set[str]:
        query = "SELECT path FROM items WHERE path IN (SELECT value FROM json_each(?))"
        return {path for (path,) in self.rows(query, [json.dumps(paths)])}

    def add(self, blocks: Iterable[Block]) -> int:
        added = 0
        with self._lock, self.database.transaction() as connection:
            for vectors, classes, paths in blocks:
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
        return added

    def remove(self, paths: list[str]) -> int:
        with self._lock, self.database.transaction() as connection:
            contained = self.contains(paths)
            validation.check_contains(paths, contained, self.location)
            rows = [(path,) for path in contained]
            connection.executemany("INSERT INTO removed (id) SELECT id FROM items WHERE path = ?", rows)
            connection.executemany("DELETE FROM items WHERE path = ?", rows)
        return len(rows)

    def relocate(self, old: str, new: str) -> int:
        relocated = ":new || substr(path, length(:old) + 1)"
        query = (  # damaged items stay as they are
            f"UPDATE items SET path = {relocated}, checksum = item_checksum({relocated}, class, vector) "  # nosec B608 # constants
            "WHERE substr(path, 1, length(:old) + 1) = :old || '/' AND checksum = item_checksum(path, class, vector)"
        )
        with self._lock, self.database.transaction() as connection:
            connection.create_function("item_checksum", 3, item_checksum)
            try:
                return connection.execute(query, {"old": old, "new": new}).rowcount
            except sqlite3.IntegrityError as error:
                raise validation.already_below(new, self.location) from error

    def search(self, vectors: np.ndarray, count: int) -> list[list[Hit]]:
        """Candidates from faiss are ranked again by their full vectors in float64."""
        results: list[list[Hit]] = []
        with self._lock:
            vector_index = self._update()
            wanted = count if self.prefix == self.dim else max(100, CANDIDATES_PER_HIT * count)
            candidates_per_block = CANDIDATE_ELEMENTS // (self.dim * vector_index.num_candidates(wanted))
            block = min(max(1, candidates_per_block), QUERY_BLOCK)
            for start in range(0, len(vectors), block):
                queries = vectors[start : start + block]  # (B, D)
                parts = self._searched(queries)
                while (hits := self._rank(queries, vector_index.search(parts, wanted), count)) is None:
                    vector_index = self._update()
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
            hits = [(rows[row], distance, cosine) for row, distance, cosine in numbers]
            results.append([Hit(row[1], row[2], distance, cosine, row[0]) for row, distance, cosine in hits])
        return results

    def find(self, item: int | str) -> tuple[int, np.ndarray] | None:
        rows = self.database.items("path = ?" if isinstance(item, str) else "items.id = ?", item)
        return (rows[0][0], self._matrix([rows[0][3]])[0]) if rows else None

    def find_all(self, paths: list[str]) -> dict[str, tuple[int, np.ndarray]]:
        rows = self.database.items("path IN (SELECT value FROM json_each(?))", json.dumps(paths))
        vectors = self._matrix([row[3] for row in rows])  # (rows, D)
        return {row[1]: (row[0], vector) for row, vector in zip(rows, vectors, strict=True)}

    def blocks(self) -> Iterator[Embeddings]:
        ((last,),) = self.rows("SELECT MAX(id) FROM items")
        names = [name for (name,) in self.rows("SELECT name FROM classes ORDER BY id")]
        labels = {name: label for label, name in enumerate(names)}
        start = 0
        while rows := self.database.items("items.id > ? AND items.id <= ?", start, last or 0, limit=BLOCK_ROWS):
            yield Embeddings(
                self._matrix([row[3] for row in rows]),
                np.array([labels[row[2]] for row in rows]),
                np.array([row[1] for row in rows], str),
                np.array(names, str),
                self.model,
            )
            start = rows[-1][0]

    def refresh(self, progress: Callable[[int, int], None]) -> None:
        with self._lock:
            self._update(progress)

    def save_model(self, run: Path) -> None:
        if self.folder is None:
            raise ValueError("an index in memory has no folder for a model: create it with one")
        for name in MODEL_FILES:
            with atomic_write(self.folder / "model" / name) as draft:
                shutil.copyfile(run / name, draft)
        self.set_metadata("network", _model_checksum(self.folder / "model"))

    def model_folder(self) -> Path | None:
        folder = None if self.folder is None else self.folder / "model"
        return folder if folder is not None and self.metadata().get("network") == _model_checksum(folder) else None

    def _update(self, progress: Callable[[int, int], None] = lambda done, total: None) -> VectorIndex:
        """The faiss index, with all changes of the database."""
        dim, kind, index = self.prefix, self.kind, self._vector_index
        ((count,),) = self.rows("SELECT COUNT(*) FROM items")
        if index is None and self.folder is not None and kind != "exact":
            index = VectorIndex.read(self.folder, kind, dim)
        if index is not None:
            query = "SELECT number, id FROM removed WHERE number > ? ORDER BY number"
            if removed := self.rows(query, [index.last_removal]):
                index.remove(np.array([item_id for _, item_id in removed], np.int64))
                index.last_removal = removed[-1][0]
        if index is None or not index.fits(kind, count):
            index = VectorIndex.new(kind, dim, count, self._sample)
        missing, added = count - len(index), 0
        while rows := self.database.items("items.id > ?", index.last_id, limit=BLOCK_ROWS):
            vectors = self._matrix([row[3] for row in rows])
            index.add(np.array([row[0] for row in rows], np.int64), self._searched(vectors))
            added += len(rows)
            progress(added, max(missing, added))
        self._vector_index = index
        if added > MAX_UNWRITTEN and self.folder is not None and index.kind != "exact":
            try:
                index.write(self.folder)
            except OSError as error:  # the search itself does not need the file
                warn(f"{error}: the next process builds it again")
        return index

    def _sample(self, count: int) -> np.ndarray:
        """A reproducible pseudo-random sample of vectors: (count, D)."""
        where = "items.id IN (SELECT id FROM items ORDER BY (id * 2654435761) % 4294967296 LIMIT ?)"
        return self._searched(self._matrix([row[3] for row in self.database.items(where, count)]))

    def _searched(self, vectors: np.ndarray) -> np.ndarray:
        """What faiss searches of vectors (M, D): all, or the first dimensions (M, prefix) scaled to length 1."""
        if self.prefix == self.dim:
            return vectors
        part = vectors[:, : self.prefix]
        return part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)

    def _matrix(self, vectors: list[bytes]) -> np.ndarray:
        """Vectors as stored in the database -> (M, D)."""
        if any(not isinstance(vector, bytes) or len(vector) != 4 * self.dim for vector in vectors):
            raise ValueError(f"{self.location} is damaged (vectors of other lengths): build the index again")
        return np.frombuffer(b"".join(vectors), "<f4").reshape(-1, self.dim).astype(np.float32, copy=False)


def _model_checksum(model: Path) -> str:
    paths = [model / name for name in MODEL_FILES]
    return " ".join(f"{file_checksum(path):08x}" if path.exists() else "none" for path in paths)
