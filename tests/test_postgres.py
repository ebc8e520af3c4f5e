"""What only an index in PostgreSQL has: addresses, limits, a server that is not there."""

from pathlib import Path

import numpy as np
import pytest

from proxygml.embeddings import Embeddings
from proxygml.index import PostgresIndex, open_index
from proxygml.index.address import Address
from proxygml.index.postgres import suited


def test_an_address_names_a_gallery_and_hides_its_password() -> None:
    address = Address.parse("postgresql://anna:secret@host:5433/birds?host=/run/socket&gallery=my owls")
    assert address.gallery == "my owls"
    assert address.url == "postgresql://anna:secret@host:5433/birds?host=%2Frun%2Fsocket"
    assert str(address) == "postgresql://anna@host:5433/birds?gallery=my owls"
    assert Address.parse("postgres://host/birds").gallery == "proxygml"
    with pytest.raises(ValueError, match="expected \\?gallery= with a name of 1 to 63 letters"):
        Address.parse("postgresql://host/birds?gallery=")


def test_a_server_that_is_not_there_is_one_line_without_the_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(OSError, match="postgresql://anna@/birds") as caught:
        open_index(f"postgresql://anna:secret@/birds?host={tmp_path}")
    assert "secret" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_galleries_of_one_database_are_apart_whatever_they_are_called(new_database: str) -> None:
    strange = f'{new_database}"; DROP SCHEMA public; --'
    for place, vector in [(new_database, [1.0, 0]), (strange, [0, 1.0])]:
        index = PostgresIndex.create(place, width=2)
        index.add(Embeddings(np.array([vector]), np.zeros(1, int), np.array(["'; DROP TABLE items; --"])))
    assert [open_index(place).search(np.array([[1.0, 0]]), 1)[0][0].distance for place in (new_database, strange)] == [
        0,
        pytest.approx(2**0.5),
    ]


def test_an_index_that_is_not_there_is_said(new_database: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no index at postgresql://.*: `proxygml index build` makes one"):
        open_index(new_database)


def test_vectors_wider_than_pgvector_takes_are_refused(new_database: str) -> None:
    with pytest.raises(ValueError, match="expected vectors of 1 to 2,000 numbers for hnsw in PostgreSQL, got 2,001"):
        PostgresIndex.create(new_database, width=2001, kind="hnsw")
    with pytest.raises(ValueError, match="among exact, hnsw, got 'ivf-pq'"):
        PostgresIndex.create(new_database, width=3, kind="ivf-pq")
    wide = PostgresIndex.create(new_database, width=2001)
    wide.add(Embeddings(np.eye(3, 2001), np.zeros(3, int), np.array(["a", "b", "c"])))
    assert wide.search(np.eye(3, 2001)[1:2], 1)[0][0].path == "b"
    assert suited(10**9, 2001) == "exact"


def test_the_graph_is_used(new_database: str) -> None:
    index = PostgresIndex.create(new_database, width=3, kind="hnsw")
    index.add(Embeddings(np.eye(3), np.zeros(3, int), np.array(["a", "b", "c"])))
    index.refresh()
    index.refresh()  # it is there
    with index._change() as connection:
        connection.execute("SELECT set_config('enable_seqscan', 'off', true)")
        plan = connection.execute("EXPLAIN SELECT id FROM items ORDER BY vector <-> '[1,0,0]' LIMIT 1").fetchall()
    assert any("Index Scan using nearest" in line for (line,) in plan)


def test_what_goes_on_elsewhere_does_not_disturb_who_reads_all(new_database: str) -> None:
    index = PostgresIndex.create(new_database, width=3)
    index.add(Embeddings(np.eye(3), np.arange(3), np.array(["a", "b", "c"])))
    blocks = index.blocks()
    first = next(blocks)
    index.add(Embeddings(np.eye(3), np.arange(3) + 5, np.array(["d", "e", "f"])))
    index.remove(["a"])
    assert len(first.vectors) + sum(len(block.vectors) for block in blocks) == 3
    assert len(index) == 5


def test_what_others_write_into_a_shared_database_does_not_choose_where_files_go(
    new_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXYGML_CACHE", str(tmp_path / "home" / "cache"))
    run = tmp_path / "run"
    run.mkdir()
    for name in ("best.pt", "recipe.json"):
        (run / name).write_text(name)
    index = PostgresIndex.create(new_database, width=2, model="../../../outside")
    index.keep_model(run)
    with index._change() as connection:
        connection.execute("INSERT INTO model VALUES (%s, %b)", ["../../../.bashrc", b"harm"])
        connection.execute("INSERT INTO model VALUES (%s, %b)", [str(tmp_path / "absolute"), b"harm"])
    folder = open_index(new_database).model_folder()
    assert sorted(file.name for file in folder.iterdir()) == ["best.pt", "recipe.json"]
    assert (folder / "best.pt").read_text() == "best.pt"
    assert folder.is_relative_to(tmp_path / "home" / "cache")
    assert {path.name for path in tmp_path.iterdir()} == {"home", "run"}
