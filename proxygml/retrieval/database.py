"""The SQLite database of an index: tables with checksums, reads, and transactions."""

import json
import sqlite3
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from proxygml.files import UnwritableError, one_line

SCHEMA_VERSION = 3
TABLES = """
CREATE TABLE items
    (id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT UNIQUE, class INTEGER, vector BLOB, checksum INTEGER);
CREATE TABLE classes (id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE removed (number INTEGER PRIMARY KEY AUTOINCREMENT, id INTEGER);
CREATE TABLE metadata (name TEXT PRIMARY KEY, value TEXT);
"""
SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master"
ITEMS = "SELECT items.id, path, name, vector, class, checksum FROM items LEFT JOIN classes ON classes.id = class"
REMEDIES = {  # of OperationalError, by its text: error codes need Python 3.11; any other one means damage
    "full": "free some space, then repeat the command",
    "readonly": "the file or its folder cannot be written",
    "unable to open": "the file or its folder cannot be read and written",
    "disk I/O": "the disk or its folder fails",
    "locked": "is another process writing to it?",
}
DATABASE_ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError)  # the latter if SQLite's message quotes damaged bytes


class Database:
    """The database in a file or in memory, new if metadata are given; processes and threads may share it."""

    def __init__(self, path: Path | None, metadata: dict[str, str] | None = None) -> None:
        self.path = path
        name = ":memory:" if path is None else path
        self.connection = sqlite3.connect(name, timeout=60, isolation_level=None, check_same_thread=False)
        self.close = weakref.finalize(self, self.connection.close)
        # Views and triggers in a file from a stranger must not call functions with side effects.
        self.connection.execute("PRAGMA trusted_schema = OFF")
        self.connection.execute("PRAGMA cell_size_check = ON")
        if metadata is not None:
            self.connection.executescript(TABLES)
            with self.transaction():
                self.set_metadata(metadata)

    def set_metadata(self, values: dict[str, str]) -> None:
        """Add or replace metadata within a transaction, and update its checksum."""
        insert = "INSERT OR REPLACE INTO metadata VALUES (?, ?)"
        self.connection.executemany(insert, list(values.items()))
        rows = self.rows("SELECT name, value FROM metadata WHERE name != 'checksum' ORDER BY name")
        self.connection.execute(insert, ("checksum", _checksum(dict(rows))))

    def metadata(self) -> dict[str, str]:
        """Metadata by name; an error if it is damaged."""
        if set(self.rows(SCHEMA)) != _expected_schema():  # a view may be endless, a trigger change other tables
            raise self.damaged("its tables are not those of an index")
        metadata = dict(self.rows("SELECT name, value FROM metadata ORDER BY name"))
        missing = {"schema_version", "version", "dim", "model", "kind"} - metadata.keys()
        if missing:
            raise self.damaged(f"no {sorted(missing)[0]}")
        checksum = metadata.pop("checksum", "")
        if not all(isinstance(value, str) for value in metadata.values()) or checksum != str(_checksum(metadata)):
            raise self.damaged("its metadata was altered")
        return metadata

    def rows(self, query: str, values: Sequence = ()) -> list[tuple]:
        """All rows of a query."""
        try:
            return self.connection.execute(query, values).fetchall()
        except DATABASE_ERRORS as error:
            raise self._in_one_line(error) from error

    def items(self, where: str, *values: object, limit: int = -1) -> list[tuple[int, str, str, bytes]]:
        """Id, path, class name and vector of the items that match a clause, by id; an error if one is damaged."""
        rows = self.rows(f"{ITEMS} WHERE {where} ORDER BY items.id LIMIT ?", [*values, limit])  # nosec B608 # constants
        for item_id, path, name, vector, class_id, checksum in rows:
            try:
                valid = name is not None and item_checksum(path, class_id, vector) == checksum
            except (TypeError, AttributeError, OverflowError):  # a damaged value may have another type
                valid = False
            if not valid:
                raise self.damaged(f"item {item_id} was altered")
        return [row[:4] for row in rows]

    def check(self) -> None:
        """An error if tables or their B-trees are damaged."""
        ((result,), *_) = self.rows("PRAGMA integrity_check(1)")
        if result != "ok":
            raise self.damaged(result)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit at the end of the block, or roll back on an error."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")  # waits for other writers; an upgraded read could not
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:  # a full disk may have ended it
                    self.connection.execute("ROLLBACK")
                raise
        except DATABASE_ERRORS as error:
            raise self._in_one_line(error) from error

    def damaged(self, reason: str) -> ValueError:
        location = "it" if self.path is None else self.path.parent
        return ValueError(f"{self.path} is damaged ({reason}): remove {location} and build the index again")

    def _in_one_line(self, error: Exception) -> Exception:
        for words, remedy in REMEDIES.items():
            if isinstance(error, sqlite3.OperationalError) and words in str(error):
                error_type = UnwritableError if words in ("full", "readonly") else OSError
                return error_type(f"{self.path}: {error}: {remedy}")
        return self.damaged(one_line(error, 100))  # it may quote the whole schema


def item_checksum(path: str, class_id: int, vector: bytes) -> int:
    """CRC-32 of an item: SQLite has no checksums of its own."""
    return zlib.crc32(vector, zlib.crc32(path.encode(), class_id))


@cache
def _expected_schema() -> set[tuple]:
    connection = sqlite3.connect(":memory:")
    connection.executescript(TABLES)
    try:
        return set(connection.execute(SCHEMA))
    finally:
        connection.close()


def _checksum(metadata: dict[str, str]) -> int:
    return zlib.crc32(json.dumps(list(metadata.items())).encode())
