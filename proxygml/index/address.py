"""Where an index in PostgreSQL is: postgresql://USER@HOST/DATABASE?gallery=NAME."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from proxygml.extras import library

if TYPE_CHECKING:
    from psycopg import Connection

OLDEST = (0, 8)  # version of pgvector: earlier ones may end a search in a graph before enough is found


@dataclass(frozen=True)
class Address:
    """A database and the gallery in it, which is a schema with tables of its own."""

    url: str  # as libpq reads it
    gallery: str

    @classmethod
    def parse(cls, text: str) -> "Address":
        """An address as a person gives it: a URL of libpq, to which ?gallery=NAME may be added."""
        parts = urlsplit(text)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        gallery = options.pop("gallery", "proxygml")
        if not 1 <= len(gallery.encode()) <= 63 or gallery.startswith("pg_"):
            raise ValueError(f"expected ?gallery= with a name of 1 to 63 letters, not pg_..., got {gallery!r}")
        return cls(urlunsplit(parts._replace(query=urlencode(options))), gallery)

    def __str__(self) -> str:
        """For people: without the password."""
        parts = urlsplit(self.url)
        user, at, host = parts.netloc.rpartition("@")
        shown = parts._replace(netloc=user.split(":")[0] + at + host, query="")
        return f"{urlunsplit(shown)}?gallery={self.gallery}"


def is_address(place: str | Path) -> bool:
    """Whether this names a database rather than a folder."""
    return str(place).startswith(("postgresql://", "postgres://"))


def driver(name: str) -> ModuleType:
    """A part of what speaks to PostgreSQL."""
    return library(name, extra="postgres", user="an index in PostgreSQL")


def connect(address: Address) -> "Connection":
    """A connection that finds the tables of the gallery, and pgvector with its types."""
    psycopg, pgvector = driver("psycopg"), driver("pgvector.psycopg")
    connection = psycopg.connect(address.url, autocommit=True, connect_timeout=20)
    try:
        path = psycopg.sql.SQL("SET search_path TO {}, public").format(psycopg.sql.Identifier(address.gallery))
        connection.execute(path)
        find = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
        if connection.execute(find).fetchone() is None:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
        (version,) = connection.execute(find).fetchone()
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise ValueError(f"{address} has pgvector {version}, 0.8 or later is needed: ALTER EXTENSION vector UPDATE")
        pgvector.register_vector(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def exists(connection: "Connection", gallery: str) -> bool:
    """Whether the database holds an index of this name."""
    find = "SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'about'"
    return connection.execute(find, [gallery]).fetchone() is not None


@contextmanager
def explained(place: str) -> Iterator[None]:
    """What goes wrong in the database inside, in one line."""
    psycopg = driver("psycopg")
    try:
        yield
    except psycopg.OperationalError as error:  # no server, no more of it, a full disk
        raise OSError(f"{place}: {_first_line(error)}") from error
    except psycopg.Error as error:
        raise ValueError(f"{place}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
