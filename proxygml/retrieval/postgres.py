"""The items of an index in a PostgreSQL database with pgvector, which a team can share.

Every change is one transaction. Vectors are loaded by COPY; when two processes add the same path, the second waits for
the first and skips it. The HNSW graph is an index of the server, which every change keeps up to date.
"""

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from proxygml.embeddings import Embeddings
from proxygml.files import atomic_write, cache_folder
from proxygml.retrieval import validation
from proxygml.retrieval.contents import MODEL_FILES
from proxygml.retrieval.hits import Hit
from proxygml.retrieval.url import IndexURL, connect, index_exists, one_line_errors, postgres_library
from proxygml.retrieval.validation import Block

if TYPE_CHECKING:
    from psycopg import Connection

MAX_DIM = {"exact": 16_000, "hnsw": 2_000}  # of pgvector, by kind of index
SCHEMA_VERSION = 2
MAX_EXACT_ELEMENTS = 2_500_000  # 20,000 vectors of 128: the server compares one query at a time
MIN_EF_SEARCH, MAX_EF_SEARCH = 128, 1000
QUERY_BLOCK = 1000  # queries per statement
TABLES = """
CREATE TABLE metadata (name text PRIMARY KEY, value text NOT NULL);
CREATE TABLE classes (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text UNIQUE NOT NULL);
CREATE TABLE model (name text PRIMARY KEY, content bytea NOT NULL);
CREATE TABLE items (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, path text UNIQUE NOT NULL,
    class integer NOT NULL REFERENCES classes, vector vector({dim}) NOT NULL
);
"""
SEARCH = """
SELECT queries.number, nearest.path, classes.name, nearest.distance,
    -(l2_normalize(nearest.vector) <#> l2_normalize(queries.vector)), nearest.id
FROM unnest(%b::vector[]) WITH ORDINALITY AS queries (vector, number) CROSS JOIN LATERAL (
    SELECT id, path, class, items.vector, items.vector <-> queries.vector AS distance FROM items
    ORDER BY items.vector <-> queries.vector LIMIT %b
) AS nearest JOIN classes ON classes.id = nearest.class
ORDER BY queries.number, nearest.distance, nearest.id
"""
INSERT_ITEMS = """
INSERT INTO items (path, class, vector)
SELECT DISTINCT ON (path) path, classes.id, vector FROM new_items JOIN classes ON name = class
ORDER BY path, row ON CONFLICT DO NOTHING
"""


def suggest_kind(count: int, dim: int) -> str:
    """The kind of index for vectors (count, dim)."""
    return "exact" if count * dim <= MAX_EXACT_ELEMENTS or dim > MAX_DIM["hnsw"] else "hnsw"


class PostgresStorage:
    """The items of an `Index` in a schema of a PostgreSQL database."""

    SCHEMA_VERSION = SCHEMA_VERSION
    MAX_DIM = MAX_DIM
    suggest_kind = staticmethod(suggest_kind)

    def __init__(self, url: IndexURL) -> None:
        self.url, self.location = url, str(url)
        self._lock = threading.RLock()
        with one_line_errors(self.location):
            self._connection = connect(url)
        self.close = weakref.finalize(self, self._connection.close)
        settings = validation.read_settings(self.metadata(), SCHEMA_VERSION, self.location)
        self.dim, self.model, self.kind = settings

    @classmethod
    def create(cls, url: str | Path | None, metadata: dict[str, str]) -> "PostgresStorage":
        parsed = IndexURL.parse(str(url))
        sql, dim = postgres_library("psycopg").sql, int(metadata["dim"])
        with one_line_errors(str(parsed)), connect(parsed) as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [parsed.name])
            if index_exists(connection, parsed.name):
                raise FileExistsError(f"{parsed} exists already: name another ?index=")
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(parsed.name)))
            connection.execute(sql.SQL(TABLES).format(dim=sql.Literal(dim)))
            if dim <= MAX_DIM["hnsw"] * 0.9:  # a row fits into a page: no separate TOAST table
                connection.execute("ALTER TABLE items ALTER COLUMN vector SET STORAGE PLAIN")
            with connection.cursor() as cursor:
                cursor.executemany("INSERT INTO metadata VALUES (%s, %s)", list(metadata.items()))
        return cls(parsed)

    @classmethod
    def open(cls, url: str | Path) -> "PostgresStorage":
        return cls(IndexURL.parse(str(url)))

    def metadata(self) -> dict[str, str]:
        with self._connected() as connection:
            if not index_exists(connection, self.url.name):
                raise FileNotFoundError(f"no index at {self.location}: `proxygml index build` makes one")
        return dict(self.rows("SELECT name, value FROM metadata"))

    def set_metadata(self, name: str, value: str) -> None:
        upsert = "INSERT INTO metadata VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value"
        with self.transaction() as connection:
            connection.execute(upsert, [name, value])

    def contains(self, paths: list[str]) -> set[str]:
        texts = [validation.check_text(path) for path in paths]
        return {path for (path,) in self.rows("SELECT path FROM items WHERE path = ANY(%b)", [texts])}

    def add(self, blocks: Iterable[Block]) -> int:
        row = 0
        with self.transaction() as connection, connection.cursor() as cursor:
            cursor.execute(
                "CREATE TEMPORARY TABLE new_items (row bigint, path text, class text, vector vector) ON COMMIT DROP"
            )
            with cursor.copy("COPY new_items FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["int8", "text", "text", "vector"])
                for vectors, classes, paths in blocks:
                    for values in zip(paths, classes, vectors, strict=True):
                        copy.write_row((row, *values))
                        row += 1
            # Sorted, so that two processes that add the same classes or paths cannot deadlock.
            cursor.execute(
                "INSERT INTO classes (name) SELECT DISTINCT class FROM new_items ORDER BY class ON CONFLICT DO NOTHING"
            )
            cursor.execute(INSERT_ITEMS)
            return cursor.rowcount

    def remove(self, paths: list[str]) -> int:
        texts = [validation.check_text(path) for path in paths]
        with self.transaction() as connection:
            select = "SELECT path FROM items WHERE path = ANY(%b) ORDER BY path FOR UPDATE"
            contained = {path for (path,) in connection.execute(select, [texts])}
            validation.check_contains(texts, contained, self.location)
            connection.execute("DELETE FROM items WHERE path = ANY(%b)", [texts])
        return len(contained)

    def relocate(self, old: str, new: str) -> int:
        query = (
            "UPDATE items SET path = %(new)s::text || substr(path, length(%(old)s::text) + 1) "
            "WHERE starts_with(path, %(old)s::text || '/')"
        )
        with self.transaction() as connection:
            try:
                return connection.execute(query, {"old": old, "new": new}).rowcount
            except postgres_library("psycopg").errors.UniqueViolation as error:
                raise validation.already_below(new, self.location) from error

    def search(self, vectors: np.ndarray, count: int) -> list[list[Hit]]:
        results: list[list[Hit]] = [[] for _ in vectors]
        with self.transaction() as connection:  # the settings below end with it
            if self.kind == "hnsw":
                ef_search = str(min(max(MIN_EF_SEARCH, 2 * count), MAX_EF_SEARCH))
                options = {"hnsw.ef_search": ef_search, "hnsw.iterative_scan": "strict_order", "enable_seqscan": "off"}
                for name, value in options.items():
                    connection.execute("SELECT set_config(%s, %s, true)", [name, value])
            for start in range(0, len(vectors), QUERY_BLOCK):
                queries = list(vectors[start : start + QUERY_BLOCK])
                for number, path, name, distance, cosine, item_id in connection.execute(SEARCH, [queries, count]):
                    hit = Hit(path, name, distance, min(max(cosine, -1.0), 1.0), item_id)
                    results[start + number - 1].append(hit)
        return results

    def find(self, item: int | str) -> tuple[int, np.ndarray] | None:
        column = "path" if isinstance(item, str) else "id"
        rows = self.rows(f"SELECT id, vector FROM items WHERE {column} = %b", [item])  # nosec B608 # constants
        return (rows[0][0], rows[0][1].to_numpy()) if rows else None

    def find_all(self, paths: list[str]) -> dict[str, tuple[int, np.ndarray]]:
        rows = self.rows("SELECT path, id, vector FROM items WHERE path = ANY(%b)", [paths])
        return {path: (item_id, vector.to_numpy()) for path, item_id, vector in rows}

    def blocks(self) -> Iterator[Embeddings]:
        """All items, from one snapshot."""
        from psycopg import IsolationLevel

        with one_line_errors(self.location), connect(self.url) as connection:  # the index may change meanwhile
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            with connection.transaction(), connection.cursor("blocks", binary=True) as cursor:
                names = connection.execute("SELECT id, name FROM classes ORDER BY id").fetchall()
                labels = {class_id: label for label, (class_id, _) in enumerate(names)}
                class_names = np.array([name for _, name in names], str)
                cursor.execute("SELECT path, class, vector FROM items ORDER BY id")
                while rows := cursor.fetchmany(validation.BLOCK_ROWS):
                    yield Embeddings(
                        np.stack([vector.to_numpy() for _, _, vector in rows]),
                        np.array([labels[class_id] for _, class_id, _ in rows]),
                        np.array([path for path, _, _ in rows], str),
                        class_names,
                        self.model,
                    )

    def check(self) -> None:
        """The server checks its pages itself."""

    def refresh(self, progress: Callable[[int, int], None]) -> None:
        """Build the HNSW graph if it is missing; until then every search is exact."""
        if self.kind == "hnsw":
            progress(0, 1)
            with self.transaction() as connection:
                connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [self.url.name])
                connection.execute("CREATE INDEX IF NOT EXISTS nearest ON items USING hnsw (vector vector_l2_ops)")
            progress(1, 1)

    def save_model(self, run: Path) -> None:
        upsert = "INSERT INTO model VALUES (%s, %b) ON CONFLICT (name) DO UPDATE SET content = EXCLUDED.content"
        with self.transaction() as connection:
            for name in MODEL_FILES:
                connection.execute(upsert, [name, (run / name).read_bytes()])

    def model_folder(self) -> Path | None:
        """A folder in the user's cache."""
        # Others write to this database: neither the id of a model nor a file's name may choose where files go.
        cache_key = hashlib.sha256(f"{self.url} {self.model}".encode()).hexdigest()[:32]
        folder = cache_folder() / "models" / cache_key
        if not (folder / "recipe.json").is_file():
            contents = dict(self.rows("SELECT name, content FROM model"))
            for name in MODEL_FILES if contents.keys() >= set(MODEL_FILES) else ():
                with atomic_write(folder / name) as draft:
                    draft.write_bytes(contents[name])
        return folder if (folder / "recipe.json").is_file() else None

    def rows(self, query: str, values: Sequence = ()) -> list[tuple]:
        with self._connected() as connection:
            return connection.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> "Iterator[Connection]":
        """Commit at the end of the block, or roll back on an error."""
        with self._connected() as connection, connection.transaction():
            yield connection

    @contextmanager
    def _connected(self) -> "Iterator[Connection]":
        """The connection; a new one if the server ended it, as when it is restarted."""
        with self._lock, one_line_errors(self.location):
            try:
                self._connection.execute("")
            except postgres_library("psycopg").OperationalError:
                if self.close.alive:  # otherwise the user has closed it
                    self._connection = connect(self.url)
                    self.close.detach()
                    self.close = weakref.finalize(self, self._connection.close)
            yield self._connection
