"""The SQLite database of an index: its tables, what is read, and changes that are made whole or not at all."""

import json
import sqlite3
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from proxygml.version import __version__

FORM = 2  # of the tables; another one is refused
TABLES = """
CREATE TABLE items
    (id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT UNIQUE, class INTEGER, vector BLOB, checksum INTEGER);
CREATE TABLE classes (id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE removed (number INTEGER PRIMARY KEY AUTOINCREMENT, id INTEGER);
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT);
"""
REMEDIES = {  # by what SQLite says
    "full": "make room, then give the command again",
    "readonly": "the file or its folder cannot be written",
    "unable to open": "the file or its folder cannot be read and written",
    "disk I/O": "the disk or its folder fails",
    "locked": "is another process writing to it?",
}
FAILURES = (sqlite3.DatabaseError, UnicodeDecodeError)  # the second where SQLite's own message holds damaged bytes


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
        with self.change():
            self.tell({"form": FORM, "version": __version__, "unit_length": 1, **about})

    def tell(self, more: dict[str, str | int]) -> None:
        """Keep more about the vectors, within a change, with a checksum of all that is kept about them."""
        insert = "INSERT OR REPLACE INTO about VALUES (?, ?)"
        self.connection.executemany(insert, [(name, str(value)) for name, value in more.items()])
        known = self.rows("SELECT name, value FROM about WHERE name != 'checksum' ORDER BY name")
        self.connection.execute(insert, ("checksum", _checksum(json.dumps(known))))

    def about(self) -> dict[str, str]:
        """What is known about the vectors; an error where another version wrote it in another form."""
        about = dict(self.rows("SELECT name, value FROM about ORDER BY name"))
        missing = {"form", "version", "unit_length", "width", "model", "kind"} - about.keys()
        if missing:
            raise self.damaged(f"no {sorted(missing)[0]}")
        if about["form"] != str(FORM):
            version = about["version"]
            raise ValueError(
                f"{self.path} was made by proxygml {version}, this is {__version__}: update proxygml, or build it again"
            )
        if about.pop("checksum", "") != str(_checksum(json.dumps([list(row) for row in about.items()]))):
            raise self.damaged("what is known about it was altered")
        return about

    def rows(self, query: str, values: Sequence = ()) -> list[tuple]:
        """All rows that a query gives."""
        try:
            return self.connection.execute(query, values).fetchall()
        except FAILURES as error:
            raise self._explained(error) from error

    def items(self, where: str, values: Sequence = ()) -> list[tuple[int, str, int, bytes]]:
        """Id, path, class and vector of the items for which something holds, in ascending order; none is altered."""
        query = f"SELECT id, path, class, vector, checksum FROM items WHERE {where}"  # nosec B608 # where: our own words
        rows = self.rows(query, values)
        for number, path, label, vector, checksum in rows:
            try:
                sound = item_checksum(path, label, vector) == checksum
            except (TypeError, AttributeError, OverflowError):  # altered so that they are something else
                sound = False
            if not sound:
                raise self.damaged(f"item {number} was altered")
        return [row[:4] for row in rows]

    def check(self) -> None:
        """An error where its tables and what they are searched by are not as they were written."""
        ((found,), *_) = self.rows("PRAGMA integrity_check(1)")
        if found != "ok":
            raise self.damaged(found)

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
        except FAILURES as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> Exception:
        text = str(error)
        for words, remedy in REMEDIES.items():
            if isinstance(error, sqlite3.OperationalError) and words in text:
                return OSError(f"{self.path}: {text}: {remedy}")
        return self.damaged(text)

    def damaged(self, what: str) -> ValueError:
        place = "it" if self.path is None else self.path.parent
        return ValueError(f"{self.path} is damaged ({what}): remove {place} and build the index again")


def item_checksum(path: str, label: int, vector: bytes) -> int:
    """Of an item as it is kept: SQLite has none of its own."""
    return zlib.crc32(vector, zlib.crc32(path.encode(), label))


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())
