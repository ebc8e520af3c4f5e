"""The files of an index folder that a stranger may have sent: nothing outside of it is changed, and nothing hangs."""

import os
import sqlite3
import struct
from pathlib import Path

import pytest

from proxygml.retrieval import Index
from proxygml.retrieval.contents import erase
from tests.retrieval.conftest import DIM, random_embeddings


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """The folder of an index."""
    index = Index.create(tmp_path / "sent", dim=DIM, kind="hnsw", model="m")
    index.add(random_embeddings(20))
    index.close()
    return tmp_path / "sent"


@pytest.fixture
def letter(tmp_path: Path) -> Path:
    """A file of the user, which must stay."""
    (tmp_path / "letter.txt").write_text("Dear Anna")
    return tmp_path / "letter.txt"


def hot_journal(database: Path, super_journal: Path) -> bytes:
    """What SQLite rolls back at opening, and then deletes the file that it names."""
    pages, page_size = database.stat().st_size // 4096, 4096
    header = struct.pack(">8s5I", bytes.fromhex("d9d505f920a163d7"), 0, 1, pages, 512, page_size).ljust(512, b"\0")
    name = os.fsencode(super_journal)
    end = struct.pack(">I", 2**30 // page_size + 1) + name + struct.pack(">II", len(name), sum(name))
    return header + end + header[:8]


def test_journal_cannot_delete_another_file(sent: Path, letter: Path) -> None:
    (sent / "items.sqlite-journal").write_bytes(hot_journal(sent / "items.sqlite", letter))
    with pytest.raises(ValueError, match=r"items.sqlite-journal names another file, .*: remove .*sent and build"):
        Index.open(sent)
    assert letter.exists()


def test_journal_of_a_killed_process_is_rolled_back(sent: Path, letter: Path) -> None:
    journal = hot_journal(sent / "items.sqlite", letter)[:512]
    (sent / "items.sqlite-journal").write_bytes(journal)
    assert len(Index.open(sent)) == 20
    assert not (sent / "items.sqlite-journal").exists()


OURS = ["items.sqlite", "items.sqlite-journal", "items.sqlite-wal", "hnsw-20.faiss", "model", "model/model.safetensors"]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("replace", [lambda path, letter: path.symlink_to(letter), lambda path, _: os.mkfifo(path)])
def test_links_and_pipes_are_refused(name: str, replace, sent: Path, letter: Path) -> None:
    path = sent / name
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(sent / "database")
        letter.write_bytes((sent / "database").read_bytes())
    replace(path, letter)
    for refuse in (Index.open, erase):
        with pytest.raises((ValueError, FileNotFoundError), match=rf"{name} is a link or|no items.sqlite"):
            refuse(sent)
    assert letter.exists()


def test_erase_removes_only_files_of_an_index(sent: Path) -> None:
    (sent / "model").mkdir()
    for name in ("model/model.safetensors", "model/recipe.json", "hnsw-7.faiss", ".lock"):
        (sent / name).touch()
    (sent / "thesis.txt").write_text("five years")
    with pytest.raises(FileExistsError, match=r"thesis.txt does not belong to an index.*: move it elsewhere"):
        erase(sent)
    assert len(Index.open(sent)) == 20
    (sent / "thesis.txt").rename(sent / ".thesis.txt")
    erase(sent)
    assert sorted(path.name for path in sent.iterdir()) == [".lock", ".thesis.txt"]


def test_writing_a_graph_removes_only_older_graphs(sent: Path) -> None:
    for name in ("hnsw-7.faiss", "mine.faiss", "hnsw-mine.faiss"):
        (sent / name).touch()
    index = Index.open(sent)
    index.refresh()
    index.storage._vector_index.write(sent)
    assert {path.name for path in sent.glob("*.faiss")} == {"hnsw-20.faiss", "mine.faiss", "hnsw-mine.faiss"}


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, i AS name, 1 AS value FROM n"


@pytest.mark.parametrize(
    "change",
    [
        f"DROP TABLE items; CREATE VIEW items AS {ENDLESS}",
        f"DROP TABLE metadata; CREATE VIEW metadata AS {ENDLESS}",
        "CREATE TRIGGER t AFTER DELETE ON items BEGIN DELETE FROM classes; END",
        "ALTER TABLE items ADD COLUMN extra",
    ],
)
def test_other_tables_than_ours_are_refused_unread(change: str, sent: Path) -> None:
    connection = sqlite3.connect(sent / "items.sqlite")
    connection.executescript(change)
    connection.close()
    with pytest.raises(ValueError, match=r"items.sqlite is damaged \(its tables are not those of an index\)"):
        Index.open(sent)
