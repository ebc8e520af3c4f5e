"""An index in PostgreSQL: URLs, limits, a missing server, shared databases."""

from pathlib import Path

import numpy as np
import pytest

from proxygml.embeddings import Embeddings
from proxygml.retrieval import Index
from proxygml.retrieval.postgres import suggest_kind
from proxygml.retrieval.url import IndexURL, connect


def test_url_names_an_index_and_hides_its_password() -> None:
    url = IndexURL.parse(
        "postgresql://anna:sec:r%40t@host:5433/birds?host=/run/socket&index=my owls&options=-c%20a%3Db"
    )
    assert url.name == "my owls"
    assert url.database == "postgresql://anna:sec:r%40t@host:5433/birds?host=/run/socket&options=-c%20a%3Db"
    assert str(url) == "postgresql://anna@host:5433/birds?index=my owls"
    assert (
        str(IndexURL.parse("postgres://[::1]:5433/birds?password=secret"))
        == "postgres://[::1]:5433/birds?index=proxygml"
    )
    assert IndexURL.parse("postgresql:///?host=/tmp").database == "postgresql:///?host=/tmp"
    for name in ("", "pg_owls", "x" * 64):
        with pytest.raises(ValueError, match="expected \\?index= with a name of 1 to 63 letters"):
            IndexURL.parse(f"postgresql://host/birds?index={name}")


@pytest.mark.parametrize("character", "%#/?@ ")
def test_unencoded_password_is_not_shown(character: str) -> None:
    with pytest.raises(ValueError, match=r"special characters percent-encoded \(@ is %40\)") as caught:
        Index.open(f"postgresql://anna:alpha{character}omega@host/birds")
    assert "alpha" not in str(caught.value)
    assert "omega" not in str(caught.value)


def end_connections(index: Index) -> None:
    """End all connections to the database except a new one, as a restart of the server does."""
    with connect(index.storage.url) as connection:
        others = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        connection.execute(f"SELECT pg_terminate_backend(pid, 5000) {others}")


def test_open_index_connects_again(new_database: str) -> None:
    index = Index.create(new_database, dim=2)
    items = Embeddings(np.eye(2), np.arange(2), np.array(["a", "b"]))
    for use in (
        lambda: index.add(items),
        lambda: index.search(np.eye(2), 1),
        lambda: index.metadata,
        lambda: len(index),
    ):
        end_connections(index)
        assert use()
    index.close()
    with pytest.raises(OSError, match="the connection is closed"):
        len(index)


def test_missing_server_is_one_line_without_the_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(OSError, match="postgresql://anna@/birds") as caught:
        Index.open(f"postgresql://anna:secret@/birds?host={tmp_path}")
    assert "secret" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_indexes_of_one_database_are_separate(new_database: str) -> None:
    strange = f'{new_database}"; DROP SCHEMA public; --'
    for url, vector in [(new_database, [1.0, 0]), (strange, [0, 1.0])]:
        index = Index.create(url, dim=2)
        index.add(Embeddings(np.array([vector]), np.zeros(1, int), np.array(["'; DROP TABLE items; --"])))
    assert [Index.open(url).search(np.array([[1.0, 0]]), 1)[0][0].distance for url in (new_database, strange)] == [
        0,
        pytest.approx(2**0.5),
    ]


def test_missing_index(new_database: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no index at postgresql://.*: `proxygml index build` makes one"):
        Index.open(new_database)


def test_limits_of_pgvector(new_database: str) -> None:
    with pytest.raises(ValueError, match="expected vectors of 1 to 2,000 dimensions for hnsw, got 2,001"):
        Index.create(new_database, dim=2001, kind="hnsw")
    with pytest.raises(ValueError, match="among exact, hnsw, got 'ivf-pq'"):
        Index.create(new_database, dim=3, kind="ivf-pq")
    wide = Index.create(new_database, dim=2001)
    wide.add(Embeddings(np.eye(3, 2001), np.zeros(3, int), np.array(["a", "b", "c"])))
    assert wide.search(np.eye(3, 2001)[1:2], 1)[0][0].path == "b"
    assert suggest_kind(10**9, 2001) == "exact"


def test_graph_is_used(new_database: str) -> None:
    index = Index.create(new_database, dim=3, kind="hnsw")
    index.add(Embeddings(np.eye(3), np.zeros(3, int), np.array(["a", "b", "c"])))
    index.refresh()
    index.refresh()  # exists already
    with index.storage.transaction() as connection:
        connection.execute("SELECT set_config('enable_seqscan', 'off', true)")
        plan = connection.execute("EXPLAIN SELECT id FROM items ORDER BY vector <-> '[1,0,0]' LIMIT 1").fetchall()
    assert any("Index Scan using nearest" in line for (line,) in plan)


def test_blocks_read_one_snapshot(new_database: str) -> None:
    index = Index.create(new_database, dim=3)
    index.add(Embeddings(np.eye(3), np.arange(3), np.array(["a", "b", "c"])))
    blocks = index.blocks()
    first = next(blocks)
    index.add(Embeddings(np.eye(3), np.arange(3) + 5, np.array(["d", "e", "f"])))
    index.remove(["a"])
    assert len(first.vectors) + sum(len(block.vectors) for block in blocks) == 3
    assert len(index) == 5


def test_shared_database_does_not_choose_where_files_go(
    new_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXYGML_CACHE", str(tmp_path / "home" / "cache"))
    run = tmp_path / "run"
    run.mkdir()
    for name in ("model.safetensors", "recipe.json"):
        (run / name).write_text(name)
    index = Index.create(new_database, dim=2, model="../../../outside")
    index.save_model(run)
    with index.storage.transaction() as connection:
        connection.execute("INSERT INTO model VALUES (%s, %b)", ["../../../.bashrc", b"harm"])
        connection.execute("INSERT INTO model VALUES (%s, %b)", [str(tmp_path / "absolute"), b"harm"])
    folder = Index.open(new_database).model_folder()
    assert sorted(file.name for file in folder.iterdir()) == ["model.safetensors", "recipe.json"]
    assert (folder / "model.safetensors").read_text() == "model.safetensors"
    assert folder.is_relative_to(tmp_path / "home" / "cache")
    assert {path.name for path in tmp_path.iterdir()} == {"home", "run"}
