"""An index in a folder: a database with what counts, and a faiss index that is made of it.

Ids ascend and none is used twice, so that a faiss index that lags behind needs only what came after its highest id, and
to leave out what was removed. It is written where it has lagged far behind; the exact one never, since reading it from
the database takes little longer.
"""

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from proxygml.embeddings import Embeddings
from proxygml.files import written_whole
from proxygml.index import hits
from proxygml.index.database import Database, item_checksum
from proxygml.index.finder import KINDS, Finder
from proxygml.index.hits import BLOCK, Hit
from proxygml.index.places import MODEL, network_checksum, refuse_taken

INSERT = "INSERT OR IGNORE INTO items (path, class, vector, checksum) VALUES (?, ?, ?, ?)"
FAR_BEHIND = 1000  # items: fewer are added in less time than all are written
HELD, QUERIES = 2**25, 1024  # numbers of candidates' vectors at a time, 128 MB; and queries at most


class Index:
    """`create` or `open` it, then `add`, `remove` and `search`; several processes and threads may at once."""

    def __init__(self, database: Database) -> None:
        self.database = database
        about = database.about()
        self.width, self.model, self.kind = int(about["width"]), about["model"], about["kind"]
        self.folder = None if database.path is None else database.path.parent  # None: in memory
        self.place = str(self.folder or "the index")
        self._finder: Finder | None = None
        self._lock = threading.RLock()
        self.close = database.close

    @classmethod
    def create(cls, folder: Path | None, *, width: int, model: str = "", kind: str = "exact") -> "Index":
        """An empty index of vectors (width,) that were made by `model`, a mark of it; without a folder in memory."""
        if kind not in KINDS:
            raise ValueError(f"expected a kind of index among {', '.join(KINDS)}, got {kind!r}")
        if width < 1:
            raise ValueError(f"expected vectors of 1 number or more, got {width}")
        about: dict[str, str | int] = {"width": width, "model": model, "kind": kind}
        if folder is None:
            database = Database(None)
            database.begin(about)
            return cls(database)
        refuse_taken(folder)
        with written_whole(folder / "items.sqlite") as draft:
            database = Database(draft)
            database.begin(about)
            database.close()
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> "Index":
        """The index that `create` began."""
        path = Path(folder) / "items.sqlite"
        if not path.is_file():
            raise FileNotFoundError(f"no items.sqlite in {folder}: that is no index, `proxygml index build` makes one")
        return cls(Database(path))

    @classmethod
    def of(cls, embeddings: Embeddings) -> "Index":
        """An index of embeddings in memory."""
        index = cls.create(None, width=embeddings.vectors.shape[1], model=embeddings.model)
        index.add(embeddings)
        return index

    def __len__(self) -> int:
        return self.database.rows("SELECT COUNT(*) FROM items")[0][0]

    @property
    def class_names(self) -> np.ndarray:
        """The names (C,) of all classes that it has held."""
        return np.array([name for (name,) in self.database.rows("SELECT name FROM classes ORDER BY id")], str)

    @property
    def about(self) -> dict[str, str]:
        """What is known about its vectors: width, model, kind, unit_length (1 or 0), version, and what `note` says."""
        return self.database.about()

    def note(self, name: str, value: str) -> None:
        """Keep a remark in `about`."""
        with self._lock, self.database.change():
            self.database.tell({name: value})

    def holds(self, paths: Sequence[str]) -> set[str]:
        """Those of the paths that it holds."""
        query = "SELECT path FROM items WHERE path IN (SELECT value FROM json_each(?))"
        return {path for (path,) in self.database.rows(query, [json.dumps([str(path) for path in paths])])}

    def add(self, embeddings: Embeddings) -> int:
        """Take in what it does not hold yet, by path, all or none of it; how many items that were."""
        hits.checked_model(embeddings.model, self.model, self.place)
        added = 0
        with self._lock, self.database.change() as change:
            for vectors, classes, paths in hits.in_blocks(embeddings, self.width, self.place):
                names = [(name,) for name in dict.fromkeys(classes)]
                change.executemany("INSERT OR IGNORE INTO classes (name) VALUES (?)", names)
                numbers = dict(change.execute("SELECT name, id FROM classes"))
                rows = [
                    (path, numbers[name], vector.astype("<f4").tobytes())
                    for vector, name, path in zip(vectors, classes, paths, strict=True)
                ]
                before = change.total_changes
                change.executemany(INSERT, [(*row, item_checksum(*row)) for row in rows])
                added += change.total_changes - before
                if not hits.are_unit_length(vectors):
                    self.database.tell({"unit_length": 0})
        return added

    def remove(self, paths: Sequence[str]) -> int:
        """Take out items by their paths, all or none of them; how many that were."""
        with self._lock, self.database.change() as change:
            wanted = hits.all_held(paths, self.holds(paths), self.place)
            each = [(path,) for path in wanted]
            change.executemany("INSERT INTO removed (id) SELECT id FROM items WHERE path = ?", each)
            change.executemany("DELETE FROM items WHERE path = ?", each)
        return len(wanted)

    def search(self, vectors: np.ndarray, count: int) -> list[list[Hit]]:
        """The items nearest to each query (M, D), nearest first; fewer than `count` where there are no more.

        Candidates of faiss are compared again by their own vectors, in float64.
        """
        vectors = hits.checked_vectors(vectors, self.width, self.place)
        hits.checked_count(count)
        found: list[list[Hit]] = []
        with self._lock:
            finder = self._up_to_date(None)
            names = dict(self.database.rows("SELECT id, name FROM classes"))
            if not len(finder):
                return [[] for _ in vectors]
            block = min(max(1, HELD // (self.width * finder.depth(count))), QUERIES)
            for start in range(0, len(vectors), block):
                asked = vectors[start : start + block]  # (B, D)
                found += self._nearest(asked, finder.search(asked, count), count, names)
        return found

    def _nearest(self, asked: np.ndarray, candidates: np.ndarray, count: int, names: dict) -> list[list[Hit]]:
        """The nearest to queries (B, D) among candidates' ids (B, K), of which -1 is none."""
        wanted = np.unique(candidates[candidates >= 0]).tolist()
        rows = self.database.items("id IN (SELECT value FROM json_each(?)) ORDER BY id", [json.dumps(wanted)])
        if any(row[2] not in names for row in rows):
            raise self.database.damaged("an item of no class")
        ids = np.array([row[0] for row in rows], np.int64)  # those that another process has not removed meanwhile
        known = self._matrix([row[3] for row in rows])  # (rows, D)
        found = []
        for one, row in zip(asked.astype(np.float64), candidates, strict=True):
            places = np.searchsorted(ids, np.sort(row)).clip(max=len(ids) - 1)  # (K,)
            places = places[ids[places] == np.sort(row)]
            far = np.sqrt(np.square(known[places] - one).sum(1))
            best = np.argsort(far, kind="stable")[:count]  # of items equally far the earlier one comes first
            nearest = zip(places[best].tolist(), far[best].tolist(), strict=True)
            found.append([Hit(rows[place][1], names[rows[place][2]], distance) for place, distance in nearest])
        return found

    def blocks(self) -> Iterator[Embeddings]:
        """All that it holds, some thousand items at a time; labels number `class_names`."""
        ((last,),) = self.database.rows("SELECT MAX(id) FROM items")
        names = self.database.rows("SELECT id, name FROM classes ORDER BY id")
        labels = {number: label for label, (number, _) in enumerate(names)}
        class_names = np.array([name for _, name in names], str)
        start = 0
        while rows := self.database.items("id > ? AND id <= ? ORDER BY id LIMIT ?", [start, last or 0, BLOCK]):
            if any(row[2] not in labels for row in rows):
                raise self.database.damaged("an item of no class")
            yield Embeddings(
                self._matrix([row[3] for row in rows]),
                np.array([labels[row[2]] for row in rows]),
                np.array([row[1] for row in rows], str),
                class_names,
                self.model,
            )
            start = rows[-1][0]

    def recall(self, count: int = 10, queries: int = 200) -> float:
        """Of the items truly nearest to some of its own, the share that `search` finds."""
        return hits.recall_of(self, count, queries)

    def check(self) -> None:
        """An error where what it holds is not as it was written; each item is also checked when it is read."""
        self.database.check()

    def refresh(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Do now what the next search would begin with: bring the faiss index up to date, and write it."""
        with self._lock:
            self._up_to_date(progress)

    def keep_model(self, run: Path) -> None:
        """Keep what embeds a query beside the vectors: best.pt and recipe.json of a run's folder."""
        if self.folder is None:
            raise ValueError("an index in memory has no folder to keep a model in: create it with one")
        for name in MODEL:
            with written_whole(self.folder / "model" / name) as draft:
                shutil.copyfile(run / name, draft)
        self.note("network", network_checksum(self.folder / "model"))

    def model_folder(self) -> Path | None:
        """The folder of the run that embeds a query, if it is kept and unaltered."""
        folder = None if self.folder is None else self.folder / "model"
        return folder if folder is not None and self.about.get("network") == network_checksum(folder) else None

    def _up_to_date(self, progress: Callable[[int, int], None] | None) -> Finder:
        """The faiss index of what the database holds now."""
        count = len(self)
        finder = self._finder
        if finder is None and self.folder is not None and self.kind != "exact":
            finder = Finder.read(self.folder, self.kind, self.width)
        if finder is not None:
            self._leave_out_removed(finder)
        if finder is None or not finder.fits(self.kind, count):
            finder = Finder.new(self.kind, self.width, count, self._sample)
        behind, done = count - len(finder), 0
        while rows := self.database.items("id > ? ORDER BY id LIMIT ?", [finder.last, BLOCK]):
            finder.add(np.array([row[0] for row in rows], np.int64), self._matrix([row[3] for row in rows]))
            done += len(rows)
            if progress is not None:
                progress(done, max(behind, done))
        self._finder = finder
        if done > FAR_BEHIND and self.folder is not None and finder.kind != "exact":
            try:
                finder.write(self.folder)
            except OSError as error:  # what was asked can be answered all the same
                warnings.warn(f"{error}: it is made again by the next process", stacklevel=4)
        return finder

    def _leave_out_removed(self, finder: Finder) -> None:
        gone = self.database.rows("SELECT number, id FROM removed WHERE number > ? ORDER BY number", [finder.forgotten])
        if gone:
            finder.remove(np.array([item for _, item in gone], np.int64))
            finder.forgotten = gone[-1][0]

    def _sample(self, count: int) -> np.ndarray:
        """Vectors of so many items, as good as drawn at random, but always the same: (count, D)."""
        drawn = "id IN (SELECT id FROM items ORDER BY (id * 2654435761) % 4294967296 LIMIT ?) ORDER BY id"
        return self._matrix([row[3] for row in self.database.items(drawn, [count])])

    def _matrix(self, vectors: list[bytes]) -> np.ndarray:
        """Vectors of the database as an array (M, D)."""
        if any(not isinstance(vector, bytes) or len(vector) != 4 * self.width for vector in vectors):
            raise ValueError(f"{self.place} is damaged (vectors of other lengths): build the index again")
        return np.frombuffer(b"".join(vectors), "<f4").reshape(-1, self.width).astype(np.float32, copy=False)
