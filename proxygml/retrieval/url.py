"""URL of an index in PostgreSQL, postgresql://USER@HOST/DATABASE?index=NAME, and the connection to it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

from proxygml.optional import library

if TYPE_CHECKING:
    from psycopg import Connection

CHARACTERS, VALUE = (rf"(?:[^{others}%]|%[0-9A-Fa-f]{{2}})*" for others in (r"\s@/?#", "&@#"))
URL = re.compile(
    rf"(postgres(?:ql)?://)({CHARACTERS}@)?({CHARACTERS}(?:/{CHARACTERS})?)(?:\?((?:[a-z_]+={VALUE}&?)*))?"
)
MIN_PGVECTOR = (0, 8)  # earlier versions may stop an HNSW search before they have found enough items


@dataclass(frozen=True)
class IndexURL:
    """A database and the name of an index in it, which is a schema."""

    database: str  # as libpq reads it
    name: str

    @classmethod
    def parse(cls, text: str) -> "IndexURL":
        """A libpq URL with an optional ?index=NAME."""
        match = URL.fullmatch(text)
        if match is None:  # libpq would quote a part of it, perhaps of the password
            raise ValueError(
                "expected postgresql://USER@HOST/DATABASE?index=NAME, special characters percent-encoded (@ is %40); "
                "yours is not shown, since it may contain a password: ~/.pgpass is the place for that"
            )
        options = dict(option.split("=", 1) for option in (match[4] or "").split("&") if option)
        name = unquote(options.pop("index", "proxygml"))
        if not 1 <= len(name.encode()) <= 63 or name.startswith("pg_"):
            raise ValueError(f"expected ?index= with a name of 1 to 63 letters, not pg_..., got {name!r}")
        others = "&".join(f"{key}={value}" for key, value in options.items())
        return cls(text.split("?")[0] + f"?{others}" * bool(others), name)

    def __str__(self) -> str:
        """The URL without its password."""
        scheme, user, host, _ = cast(re.Match, URL.fullmatch(self.database)).groups()
        return f"{scheme}{re.sub(':.*@', '@', user or '')}{host}?index={self.name}"


def is_url(location: str | Path | None) -> bool:
    """Whether this is the URL of a database rather than a path."""
    return str(location).startswith(("postgresql://", "postgres://"))


def postgres_library(name: str) -> ModuleType:
    """psycopg or pgvector; an error names the extra that installs them."""
    return library(name, extra="postgres", user="an index in PostgreSQL")


def connect(url: IndexURL) -> "Connection":
    """A connection with the schema of the index as search path and pgvector's types registered."""
    psycopg, pgvector = postgres_library("psycopg"), postgres_library("pgvector.psycopg")
    connection = psycopg.connect(url.database, autocommit=True, connect_timeout=20)
    try:
        search_path = psycopg.sql.SQL("SET search_path TO {}, public").format(psycopg.sql.Identifier(url.name))
        connection.execute(search_path)
        select_version = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
        if connection.execute(select_version).fetchone() is None:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
        (version,) = connection.execute(select_version).fetchone()
        if tuple(map(int, version.split(".")[:2])) < MIN_PGVECTOR:
            raise ValueError(f"{url} has pgvector {version}, 0.8 or later is needed: ALTER EXTENSION vector UPDATE")
        pgvector.register_vector(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def index_exists(connection: "Connection", name: str) -> bool:
    """Whether the database contains an index of this name."""
    query = "SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'metadata'"
    return connection.execute(query, [name]).fetchone() is not None


@contextmanager
def one_line_errors(location: str) -> Iterator[None]:
    """Turn errors of the database into OSError (no server, no connections, full disk) or ValueError, in one line."""
    psycopg = postgres_library("psycopg")
    try:
        yield
    except psycopg.Error as error:
        error_type = OSError if isinstance(error, psycopg.OperationalError) else ValueError
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise error_type(f"{location}: {first_line}") from error
