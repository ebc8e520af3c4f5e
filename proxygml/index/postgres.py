"""An index in a PostgreSQL database with pgvector, which a team shares: the same calls as an index in a folder.

Every change is one transaction. Vectors are loaded by COPY; who adds the same path at the same time as another waits
for them, and finds it there. The graph (hnsw) is an index of the server, which every change keeps up to date.
"""

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from proxygml.embeddings import Embeddings
from proxygml.files import cache_folder, written_whole
from proxygml.index import hits
from proxygml.index.address import Address, connect, driver, exists, explained
from proxygml.index.hits import BLOCK, Hit
from proxygml.version import __version__

if TYPE_CHECKING:
    from psycopg import Connection

KINDS = ("exact", "hnsw")
WIDEST, WIDEST_IN_A_GRAPH = 16_000, 2_000  # numbers in a vector, by pgvector
FORM = 1  # of the tables; a newer one is refused
MODEL_FILES = ("best.pt", "recipe.json")  # of a run, in the order in which they are fetched
MOST_EXACT = 2_500_000  # numbers, that is 20,000 vectors of 128: the server compares one query at a time
EFFORT = 128  # items that a search in the graph looks at, at least; 1,000 is the most
QUERIES = 1000  # in a statement
TABLES = """
CREATE TABLE about (name text PRIMARY KEY, value text NOT NULL);
CREATE TABLE classes (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text UNIQUE NOT NULL);
CREATE TABLE model (name text PRIMARY KEY, content bytea NOT NULL);
CREATE TABLE items (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, path text UNIQUE NOT NULL,
    class integer NOT NULL REFERENCES classes, vector vector({width}) NOT NULL
);
"""
SEARCH = """
SELECT asked.number, found.path, classes.name, found.distance
FROM unnest(%b::vector[]) WITH ORDINALITY AS asked (vector, number) CROSS JOIN LATERAL (
    SELECT id, path, class, items.vector <-> asked.vector AS distance FROM items
    ORDER BY items.vector <-> asked.vector LIMIT %b
) AS found JOIN classes ON classes.id = found.class
ORDER BY asked.number, found.distance, found.id
"""


def suited(count: int, width: int) -> str:
    """The kind of index for so many vectors (count, width)."""
    return "exact" if count * width <= MOST_EXACT or width > WIDEST_IN_A_GRAPH else "hnsw"


class PostgresIndex:
    """`create` or `open` it, then `add`, `remove` and `search`; several processes and threads may at once."""

    def __init__(self, address: Address) -> None:
        self.address, self.place = address, str(address)
        self._lock = threading.RLock()
        with explained(self.place):
            self._connection = connect(address)
        self.close = weakref.finalize(self, self._connection.close)  # to be called, or called when nobody needs it
        about = self.about
        if int(about["form"]) > FORM:
            version = about["version"]
            raise ValueError(f"{self.place} was made by proxygml {version}, this is {__version__}: update proxygml")
        self.width, self.model, self.kind = int(about["width"]), about["model"], about["kind"]

    @classmethod
    def create(cls, address: str, *, width: int, model: str = "", kind: str = "exact") -> "PostgresIndex":
        """An empty index of vectors (width,) that were made by `model`, a mark of it."""
        if kind not in KINDS:
            raise ValueError(f"expected a kind of index in PostgreSQL among {', '.join(KINDS)}, got {kind!r}")
        widest = WIDEST_IN_A_GRAPH if kind == "hnsw" else WIDEST
        if not 1 <= width <= widest:
            raise ValueError(f"expected vectors of 1 to {widest:,} numbers for {kind} in PostgreSQL, got {width:,}")
        place = Address.parse(address)
        sql = driver("psycopg").sql
        about = {"form": FORM, "version": __version__, "unit_length": 1, "width": width, "model": model, "kind": kind}
        with explained(str(place)), connect(place) as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [place.gallery])  # one creates it
            if exists(connection, place.gallery):
                raise FileExistsError(f"{place} is there already: name another ?gallery=")
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(place.gallery)))
            connection.execute(sql.SQL(TABLES).format(width=sql.Literal(width)))
            if width <= WIDEST_IN_A_GRAPH * 0.9:  # beside the rest of its row, not in a table of its own
                connection.execute("ALTER TABLE items ALTER COLUMN vector SET STORAGE PLAIN")
            with connection.cursor() as cursor:
                rows = [(name, str(value)) for name, value in about.items()]
                cursor.executemany("INSERT INTO about VALUES (%s, %s)", rows)
        return cls.open(address)

    @classmethod
    def open(cls, address: str) -> "PostgresIndex":
        """The index that `create` began."""
        return cls(Address.parse(address))

    def __len__(self) -> int:
        return self._rows("SELECT COUNT(*) FROM items")[0][0]

    @property
    def class_names(self) -> np.ndarray:
        """The names (C,) of all classes that it has held."""
        return np.array([name for (name,) in self._rows("SELECT name FROM classes ORDER BY id")], str)

    @property
    def about(self) -> dict[str, str]:
        """What is known about its vectors: width, model, kind, unit_length (1 or 0), version, and what `note` says."""
        with explained(self.place):
            if not exists(self._connection, self.address.gallery):
                raise FileNotFoundError(f"no index at {self.place}: `proxygml index build` makes one")
        return dict(self._rows("SELECT name, value FROM about"))

    def note(self, name: str, value: str) -> None:
        """Keep a remark in `about`."""
        note = "INSERT INTO about VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value"
        with self._change() as connection:
            connection.execute(note, [name, value])

    def holds(self, paths: Sequence[str]) -> set[str]:
        """Those of the paths that it holds."""
        wanted = [hits.checked_text(str(path)) for path in paths]
        return {path for (path,) in self._rows("SELECT path FROM items WHERE path = ANY(%b)", [wanted])}

    def add(self, embeddings: Embeddings) -> int:
        """Take in what it does not hold yet, by path, all or none of it; how many items that were."""
        hits.checked_model(embeddings.model, self.model, self.place)
        unit_length, place = True, 0
        with self._change() as connection, connection.cursor() as cursor:
            cursor.execute(
                "CREATE TEMPORARY TABLE coming (place bigint, path text, class text, vector vector) ON COMMIT DROP"
            )
            with cursor.copy("COPY coming FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["int8", "text", "text", "vector"])
                for vectors, classes, paths in hits.in_blocks(embeddings, self.width, self.place):
                    unit_length &= hits.are_unit_length(vectors)
                    for row in zip(paths, classes, vectors, strict=True):
                        copy.write_row((place, *row))
                        place += 1
            # In one order, so that of two who add the same neither waits for the other for ever.
            cursor.execute(
                "INSERT INTO classes (name) SELECT DISTINCT class FROM coming ORDER BY class ON CONFLICT DO NOTHING"
            )
            cursor.execute(
                "INSERT INTO items (path, class, vector) "
                "SELECT DISTINCT ON (path) path, classes.id, vector FROM coming JOIN classes ON name = class "
                "ORDER BY path, place ON CONFLICT DO NOTHING"
            )
            added = cursor.rowcount
            if not unit_length:
                cursor.execute("UPDATE about SET value = '0' WHERE name = 'unit_length' AND value <> '0'")
        return added

    def remove(self, paths: Sequence[str]) -> int:
        """Take out items by their paths, all or none of them; how many that were."""
        wanted = [hits.checked_text(str(path)) for path in paths]
        with self._change() as connection:
            locked = "SELECT path FROM items WHERE path = ANY(%b) ORDER BY path FOR UPDATE"
            held = {path for (path,) in connection.execute(locked, [wanted])}
            hits.all_held(wanted, held, self.place)
            connection.execute("DELETE FROM items WHERE path = ANY(%b)", [wanted])
        return len(held)

    def search(self, vectors: np.ndarray, count: int) -> list[list[Hit]]:
        """The items nearest to each query (M, D), nearest first; fewer than `count` where there are no more."""
        vectors = hits.checked_vectors(vectors, self.width, self.place)
        hits.checked_count(count)
        found: list[list[Hit]] = [[] for _ in vectors]
        with self._change() as connection:  # a transaction, for settings that end with it
            if self.kind == "hnsw":
                effort = str(min(max(EFFORT, 2 * count), 1000))
                for name, value in [("ef_search", effort), ("iterative_scan", "strict_order")]:
                    connection.execute("SELECT set_config('hnsw.' || %s, %s, true)", [name, value])
                connection.execute("SELECT set_config('enable_seqscan', 'off', true)")
            for start in range(0, len(vectors), QUERIES):
                asked = list(vectors[start : start + QUERIES])
                for number, path, name, distance in connection.execute(SEARCH, [asked, count]):
                    found[start + number - 1].append(Hit(path, name, distance))
        return found

    def blocks(self) -> Iterator[Embeddings]:
        """All that it holds, some thousand items at a time; labels number `class_names`."""
        from psycopg import IsolationLevel

        with (
            explained(self.place),
            connect(self.address) as connection,
        ):  # its own: others may change the index meanwhile
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            with connection.transaction(), connection.cursor("blocks", binary=True) as cursor:
                names = connection.execute("SELECT id, name FROM classes ORDER BY id").fetchall()
                labels = {number: label for label, (number, _) in enumerate(names)}
                class_names = np.array([name for _, name in names], str)
                cursor.execute("SELECT path, class, vector FROM items ORDER BY id")
                while rows := cursor.fetchmany(BLOCK):
                    yield Embeddings(
                        np.stack([vector.to_numpy() for _, _, vector in rows]),
                        np.array([labels[number] for _, number, _ in rows]),
                        np.array([path for path, _, _ in rows], str),
                        class_names,
                        self.model,
                    )

    def recall(self, count: int = 10, queries: int = 200) -> float:
        """Of the items truly nearest to some of its own, the share that `search` finds."""
        return hits.recall_of(self, count, queries)

    def refresh(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Make the graph of hnsw, if it is not there: until then all vectors are compared."""
        if self.kind == "hnsw":
            if progress is not None:
                progress(0, 1)
            with self._change() as connection:
                connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [self.address.gallery])
                connection.execute("CREATE INDEX IF NOT EXISTS nearest ON items USING hnsw (vector vector_l2_ops)")
            if progress is not None:
                progress(1, 1)

    def keep_model(self, run: Path) -> None:
        """Keep what embeds a query beside the vectors: best.pt and recipe.json of a run's folder."""
        keep = "INSERT INTO model VALUES (%s, %b) ON CONFLICT (name) DO UPDATE SET content = EXCLUDED.content"
        with self._change() as connection:
            for name in MODEL_FILES:
                connection.execute(keep, [name, (run / name).read_bytes()])

    def model_folder(self) -> Path | None:
        """The folder of the run that embeds a query, fetched into the user's cache, if it is kept."""
        # Others write to this database: neither what they call a model nor a file's name may say where files go.
        known_as = hashlib.sha256(f"{self.address} {self.model}".encode()).hexdigest()[:32]
        folder = cache_folder() / "models" / known_as
        if not (folder / "recipe.json").is_file():
            contents = dict(self._rows("SELECT name, content FROM model"))
            for name in MODEL_FILES if contents.keys() >= set(MODEL_FILES) else ():
                with written_whole(folder / name) as draft:
                    draft.write_bytes(contents[name])
        return folder if (folder / "recipe.json").is_file() else None

    def _rows(self, query: str, values: Sequence = ()) -> list[tuple]:
        with self._lock, explained(self.place):
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _change(self) -> "Iterator[Connection]":
        """Whatever is done inside is done at its end, or not at all."""
        with self._lock, explained(self.place), self._connection.transaction():
            yield self._connection
