"""The SQLite database of an index: its tables, what is read, and changes that are made whole or not at all."""

import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from proxygml.version import __version__

FORM = 1  # of the tables; a newer one is refused
TABLES = """
CREATE TABLE items (id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT UNIQUE, class INTEGER, vector BLOB);
CREATE TABLE classes (id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE removed (number INTEGER PRIMARY KEY AUTOINCREMENT, id INTEGER);
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT);
"""


class Database:
    """The database in a file, or in memory; several processes and threads may use it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        where = ":memory:" if path is None else path
        self.connection = sqlite3.connect(where, timeout=60, isolation_level=None, check_same_thread=False)
        self.close = weakref.finalize(self, self.connection.close)  # to be called, or called when nobody needs it
        # A file that was sent may have views and triggers in place of tables: they may call nothing that does harm.
        self.connection.execute("PRAGMA trusted_schema = OFF")
        self.connection.execute("PRAGMA cell_size_check = ON")

    def begin(self, about: dict[str, str | int]) -> None:
        """Make the tables, with what is to be known about the vectors."""
        self.connection.executescript(TABLES)
        about = {"form": FORM, "version": __version__, "unit_length": 1, **about}
        rows = [(name, str(value)) for name, value in about.items()]
        self.connection.executemany("INSERT INTO about VALUES (?, ?)", rows)

    def about(self) -> dict[str, str]:
        """What is known about the vectors; an error where a newer version wrote it."""
        about = dict(self.rows("SELECT name, value FROM about"))
        missing = {"form", "version", "unit_length", "width", "model", "kind"} - about.keys()
        if missing:
            raise ValueError(f"{self.path} is damaged (no {sorted(missing)[0]}): build the index again")
        if int(about["form"]) > FORM:
            version = about["version"]
            raise ValueError(f"{self.path} was made by proxygml {version}, this is {__version__}: update proxygml")
        return about

    def rows(self, query: str, values: Sequence = ()) -> list[tuple]:
        """All rows that a query gives."""
        try:
            return self.connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise self._explained(error) from error

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Whatever is done inside is done at its end, or not at all."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")  # waits for others; a transaction that begins to read could not
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:  # a full disk may have ended it
                    self.connection.execute("ROLLBACK")
                raise
        except sqlite3.DatabaseError as error:
            raise self._explained(error) from error

    def _explained(self, error: sqlite3.DatabaseError) -> Exception:
        text = str(error)
        if isinstance(error, sqlite3.OperationalError) and "no such" not in text:
            remedy = "make room, then give the command again" if "full" in text else "is another process writing to it?"
            remedy = "the file or its folder cannot be written" if "readonly" in text else remedy
            return OSError(f"{self.path}: {text}: {remedy}")
        return ValueError(f"{self.path} is damaged ({text}): build the index again")
