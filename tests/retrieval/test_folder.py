"""An index in a folder: its faiss index, damage, kills, full disks, and search in memory."""

import shutil
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest

from proxygml.evaluation import neighbors
from proxygml.files import UnwritableError
from proxygml.retrieval import Hit, Index, folder, vector_index
from proxygml.retrieval.vector_index import VectorIndex, suggest_kind
from tests.retrieval.conftest import DIM, random_embeddings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def new_index(tmp_path: Path):
    """`new_index(count, kind)`: an index of random items in a folder."""

    def create(count: int, kind: str = "exact") -> Index:
        index = Index.create(tmp_path / "index", dim=DIM, kind=kind, model="m")
        index.add(random_embeddings(count))
        index.refresh()
        return index

    return create


class TestFaissFile:
    @pytest.fixture(autouse=True)
    def written_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(folder, "MAX_UNWRITTEN", 100)

    def test_graph_is_read_and_updated(self, new_index, tmp_path: Path, monkeypatch) -> None:
        index = new_index(500, "hnsw")
        assert [path.name for path in (tmp_path / "index").glob("*.faiss")] == ["hnsw-500.faiss"]
        index.add(random_embeddings(50, seed=2, start=500))
        index.remove(["/photos/3.jpg"])
        monkeypatch.setattr(VectorIndex, "new", None)  # never rebuilt
        reopened = Index.open(tmp_path / "index")
        assert reopened.search(random_embeddings(50, seed=2).vectors[4:5], 1)[0][0].path == "/photos/504.jpg"
        assert reopened.search(random_embeddings(500).vectors[3:4], 1)[0][0].path != "/photos/3.jpg"
        reopened.add(random_embeddings(200, seed=3, start=550))
        reopened.refresh()
        assert [path.name for path in (tmp_path / "index").glob("*.faiss")] == ["hnsw-750.faiss"]

    @pytest.mark.parametrize("kind", ["hnsw", "ivf-pq"])
    def test_truncated_file_is_rebuilt(self, kind: str, new_index, tmp_path: Path) -> None:
        new_index(500, kind)
        (path,) = (tmp_path / "index").glob("*.faiss")
        path.write_bytes(path.read_bytes()[:1000])
        assert (
            Index.open(tmp_path / "index").search(random_embeddings(500).vectors[9:10], 1)[0][0].path == "/photos/9.jpg"
        )
        assert path.stat().st_size > 1000

    def test_altered_file_is_rebuilt(self, new_index, tmp_path: Path) -> None:
        new_index(500, "hnsw")
        (path,) = (tmp_path / "index").glob("*.faiss")
        original = path.read_bytes()
        assert VectorIndex.read(tmp_path / "index", "hnsw", DIM) is not None
        for position in (0, 100, len(original) // 2, len(original) - 1):
            altered = bytearray(original)
            altered[position] ^= 4
            path.write_bytes(altered)
            assert VectorIndex.read(tmp_path / "index", "hnsw", DIM) is None
        assert len(Index.open(tmp_path / "index").search(random_embeddings(1).vectors, 3)[0]) == 3
        assert path.read_bytes() == original

    def test_search_works_if_it_cannot_be_written(self, tmp_path: Path, monkeypatch) -> None:
        def full_disk(*_: object) -> None:
            raise RuntimeError("Error in write\nwrite error: No space left on device")

        monkeypatch.setattr(vector_index.faiss, "write_index", full_disk)
        index = Index.create(tmp_path / "index", dim=DIM, kind="hnsw", model="m")
        index.add(random_embeddings(500))
        with pytest.warns(UserWarning, match=r"could not write .*hnsw-500.faiss: .*No space left"):
            (hits,) = index.search(random_embeddings(1).vectors, 1)
        assert hits[0].path == "/photos/0.jpg"
        assert not list((tmp_path / "index").glob("*.faiss"))


def test_graph_with_many_removals_is_rebuilt(new_index) -> None:
    index, paths = new_index(500, "hnsw"), random_embeddings(120).paths
    index.remove(paths[:80])
    index.refresh()
    assert (index.storage._vector_index.index.ntotal, len(index.storage._vector_index)) == (500, 420)
    index.remove(paths[80:])
    assert len(index.search(random_embeddings(1).vectors, 500)[0]) == 380
    assert index.storage._vector_index.index.ntotal == 380


def test_ivf_pq_is_retrained_when_it_has_grown(new_index, monkeypatch) -> None:
    monkeypatch.setattr(vector_index, "num_lists", lambda count: count // 50)
    index = new_index(300, "ivf-pq")
    assert index.storage._vector_index.kind == "exact"  # too few to train on
    for count, lists in [(400, 8), (800, 8), (900, 18)]:
        index.add(random_embeddings(count))
        index.refresh()
        assert (index.storage._vector_index.kind, index.storage._vector_index.index.nlist) == ("ivf-pq", lists)
        assert len(index.storage._vector_index) == count


class TestDamage:
    def test_full_disk_changes_nothing(self, new_index, tmp_path: Path) -> None:
        index = new_index(10)
        index.storage.database.connection.execute("PRAGMA max_page_count = 20")  # simulates a full disk
        with pytest.raises(UnwritableError, match=r"items.sqlite: database or disk is full: free some space"):
            index.add(random_embeddings(5000))
        assert len(index) == len(Index.open(tmp_path / "index")) == 10

    def test_read_only_database_is_unwritable(self, new_index) -> None:
        index = new_index(10)
        index.storage.database.connection.execute("PRAGMA query_only = ON")
        with pytest.raises(
            UnwritableError, match=r"items.sqlite: .*readonly.*: the file or its folder cannot be written"
        ):
            index.relocate("/photos", "/new")
        assert index.contains(["/photos/1.jpg"])

    def test_missing_or_damaged_database(self, new_index, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no items.sqlite in .*: not an index, `proxygml index build`"):
            Index.open(tmp_path)
        new_index(0).close()
        original = (tmp_path / "index" / "items.sqlite").read_bytes()
        not_unicode = original.replace(b"CREATE TABLE classes", b"CREATE TAB\xe4E classes")  # quoted by SQLite's error
        for damaged in (b"something else altogether" * 100, b"", not_unicode):
            (tmp_path / "items.sqlite").write_bytes(damaged)
            with pytest.raises(
                ValueError, match=r"items.sqlite is damaged .*: remove .* and build the index again"
            ) as info:
                Index.open(tmp_path)
            assert len(str(info.value)) < 160 + 2 * len(str(tmp_path))

    def test_truncated_database(self, new_index, tmp_path: Path) -> None:
        new_index(2000).close()
        path = tmp_path / "index" / "items.sqlite"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ValueError, match=r"items.sqlite is damaged .*malformed.*: remove .* and build the index"):
            Index.open(tmp_path / "index").search(random_embeddings(1).vectors, 3)

    @pytest.mark.slow
    def test_flipped_bits_are_noticed_or_harmless(self, new_index, tmp_path: Path) -> None:
        index = new_index(60)
        index.set_metadata("source", "photos")
        path, expected = tmp_path / "index" / "items.sqlite", self.contents(index)
        index.close()
        original, errors = path.read_bytes(), []
        for bit in np.random.default_rng(0).integers(0, 8 * len(original), 600).tolist():
            altered = bytearray(original)
            altered[bit // 8] ^= 1 << bit % 8
            path.write_bytes(altered)
            try:
                index = Index.open(tmp_path / "index")
                index.check()
                assert self.contents(index) == expected, f"bit {bit}"
            except (ValueError, OSError) as error:
                errors.append(str(error))
        assert len(errors) > 60  # the other bits are unused
        assert all(error.startswith(str(path)) for error in errors)

    def contents(self, index: Index) -> list:
        (block,) = index.blocks()
        return [index.metadata, block.vectors.tolist(), block.labels.tolist(), *block.paths, *block.class_names]

    @pytest.mark.parametrize("change", ["vector = (SELECT vector FROM items WHERE id = 2)", "class = 9"])
    def test_altered_item(self, change: str, new_index) -> None:
        index = new_index(10)
        with index.storage.database.transaction() as connection:
            connection.execute(f"UPDATE items SET {change} WHERE id = 1")
        with pytest.raises(ValueError, match=r"items.sqlite is damaged \(item 1 was altered\): remove .* and build"):
            index.search(random_embeddings(1).vectors, 1)

    def test_altered_metadata(self, new_index, tmp_path: Path) -> None:
        index = new_index(10)
        with index.storage.database.transaction() as connection:
            connection.execute("UPDATE metadata SET value = x'ff' WHERE name = 'model'")
        index.close()
        with pytest.raises(ValueError, match=r"items.sqlite is damaged \(its metadata was altered\): remove"):
            Index.open(tmp_path / "index")

    def test_class_names_of_any_characters(self, new_index) -> None:
        index = new_index(10)
        (before,) = index.blocks()
        with index.storage.database.transaction() as connection:
            connection.execute("UPDATE classes SET name = ? WHERE id = 1", ["x\0"])  # numpy drops the last NUL
        (block,) = index.blocks()
        assert block.labels.tolist() == before.labels.tolist()

    def test_relocating_keeps_damage_visible(self, new_index) -> None:
        index = new_index(10)
        with index.storage.database.transaction() as connection:
            connection.execute("UPDATE items SET class = 2 WHERE id = 1")
        assert index.relocate("/photos", "/new") == 9
        with pytest.raises(ValueError, match="item 1 was altered"):
            next(index.blocks())

    def test_altered_model_is_not_used(self, new_index, tmp_path: Path) -> None:
        index = new_index(0)
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        (tmp_path / "recipe.json").write_text("{}")
        index.save_model(tmp_path)
        (index.model_folder() / "model.safetensors").write_bytes(b"weighty")
        assert index.model_folder() is None
        index.save_model(tmp_path)
        assert (index.model_folder() / "model.safetensors").read_bytes() == b"weights"

    @pytest.mark.slow
    def test_killed_process_leaves_the_last_transaction(self, tmp_path: Path) -> None:
        code = (
            "import os, signal, sys\n"
            "from tests.retrieval.conftest import *\n"
            "from proxygml.retrieval import Index\n"
            "index = Index.create(Path(sys.argv[1]), dim=DIM, model='m')\n"
            "index.add(random_embeddings(100))\n"
            "with index.storage.database.transaction() as connection:\n"
            "    connection.execute('DELETE FROM items')\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, tmp_path / "index"], cwd=ROOT, capture_output=True)
        assert done.returncode == -9, done.stderr
        index = Index.open(tmp_path / "index")
        assert len(index) == 100
        assert index.search(random_embeddings(1).vectors, 1)[0][0].distance == 0


def test_create_after_a_killed_process(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    for name in (".lock", ".items-abcdefgh.sqlite"):
        (tmp_path / "index" / name).touch()
    assert Index.create(tmp_path / "index", dim=DIM, model="m").add(random_embeddings(3)) == 3


@pytest.mark.parametrize(("dim", "kind"), [(0, "exact"), (3, "tree")])
def test_impossible_index_leaves_no_folder(dim: int, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected (vectors of 1 to|a kind of index among exact)"):
        Index.create(tmp_path / "index", dim=dim, kind=kind)
    assert not (tmp_path / "index").exists()


def test_folder_can_be_moved(new_index, tmp_path: Path) -> None:
    new_index(10)
    shutil.move(tmp_path / "index", tmp_path / "elsewhere")
    assert len(Index.open(tmp_path / "elsewhere")) == 10


def test_search_in_memory_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    items, queries = random_embeddings(300), random_embeddings(90, seed=1).vectors
    index = Index.from_embeddings(items)
    assert index.search(items.vectors[4:5], 1)[0][0] == Hit("/photos/4.jpg", "örn", 0.0, pytest.approx(1), 5)
    expected = index.search(queries, 7)
    monkeypatch.setattr(folder, "CANDIDATE_ELEMENTS", 20 * DIM)  # a query at a time
    assert index.search(queries, 7) == expected


def test_vectors_far_from_the_origin() -> None:
    items = random_embeddings(200)
    items.vectors[:] = 1000 + items.vectors * 1e-2  # all at the same distance by float32 products
    nearest, _ = neighbors(items.vectors[:20], items.vectors, count=1)
    hits = Index.from_embeddings(items).search(items.vectors[:20], 1)
    assert [row[0].path for row in hits] == items.paths[nearest[:, 0]].tolist()


def test_suggested_kind_grows_with_the_index() -> None:
    kinds = [suggest_kind(count, 128) for count in (1, 1_000_000, 1_000_001, 5_000_000, 5_000_001)]
    assert kinds == ["exact", "exact", "hnsw", "hnsw", "ivf-pq"]
    assert suggest_kind(100_000, 2048) == "hnsw"


@pytest.mark.slow
def test_index_works_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None  # importing it raises ImportError\n"
        "import numpy as np\n"
        "from pathlib import Path\n"
        "from proxygml.embeddings import Embeddings\n"
        "from proxygml.retrieval import Index\n"
        "index = Index.create(Path(sys.argv[1]), dim=2)\n"
        "index.add(Embeddings(np.eye(2), np.arange(2), np.array(['left', 'right'])))\n"
        "print(index.search(np.eye(2), 1)[1][0].path)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "index"], capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr


def test_graph_search_with_patched_faiss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """faiss.contrib.torch_utils renames search to search_numpy, and replaces it by one without parameters."""
    original = getattr(faiss.IndexIDMap2, "search_numpy", faiss.IndexIDMap2.search)
    monkeypatch.setattr(faiss.IndexIDMap2, "search_numpy", original, raising=False)
    monkeypatch.setattr(faiss.IndexIDMap2, "search", lambda self, x, k, *, D=None, I=None: original(self, x, k))  # noqa: E741, N803
    index = Index.create(tmp_path / "graph", dim=DIM, kind="hnsw", model="m")
    items = random_embeddings(50)
    index.add(items)
    index.remove(["/photos/3.jpg"])
    found = [hits[0].path for hits in index.search(items.vectors[:5], 1)]
    assert [found[row] == items.paths[row] for row in range(5)] == [True, True, True, False, True]


def test_folder_may_be_a_string(tmp_path: Path) -> None:
    Index.create(str(tmp_path / "index"), dim=2).close()
    assert Index.open(str(tmp_path / "index")).location == str(tmp_path / "index")


class TestPrefix:
    """An index that searches the first dimensions and ranks by all."""

    @pytest.mark.parametrize("kind", ["exact", "hnsw"])
    def test_candidates_are_ranked_by_whole_vectors(self, kind: str, tmp_path: Path) -> None:
        items, queries = random_embeddings(2000), random_embeddings(30, seed=1).vectors
        index = Index.create(tmp_path / "index", dim=DIM, kind=kind, model="m", prefix=3)
        index.add(items)
        index.search(queries[:1], 1)
        reopened = Index.open(tmp_path / "index")
        assert reopened.metadata["prefix"] == "3"
        assert reopened.storage._update().index.d == 3
        vectors = items.vectors.astype(np.float64)
        units = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (vectors[:, :3], queries[:, :3])]
        candidates = np.argsort(-units[1] @ units[0].T, axis=1)  # (30, 2000)
        for query, row, hits in zip(queries, candidates, reopened.search(queries, 5), strict=True):
            distances = np.linalg.norm(vectors - query, axis=1)  # (2000,)
            among = set(row[:108])  # 100 candidates, and 8 that float32 may swap
            expected = [item for item in np.argsort(distances) if item in among][:5]
            assert [hit.path for hit in hits] == items.paths[expected].tolist()
            np.testing.assert_allclose([hit.distance for hit in hits], distances[expected], rtol=1e-5)

    def test_measured_recall_is_that_of_whole_vectors(self, tmp_path: Path) -> None:
        index = Index.create(None, dim=DIM, kind="exact", model="m", prefix=1)
        index.add(random_embeddings(2000))
        assert index.recall() < 0.5  # one dimension of random vectors

    @pytest.mark.parametrize("prefix", [0, -1, DIM, DIM + 1])
    def test_must_be_shorter_than_the_vectors(self, prefix: int) -> None:
        with pytest.raises(ValueError, match=f"expected a prefix from 1 to below the 12 dimensions.*got {prefix}$"):
            Index.create(None, dim=DIM, prefix=prefix)

    def test_needs_a_folder(self) -> None:
        with pytest.raises(ValueError, match="in PostgreSQL searches whole vectors"):
            Index.create("postgresql://nowhere", dim=DIM, prefix=3)
