"""Indexes in a folder and in PostgreSQL: the same calls, the same answers, compared with the exact neighbours."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbours
from proxygml.index import Hit, Index, create_index, open_index, suited
from proxygml.index import finder as finders
from proxygml.index import folder as folders

WIDTH = 12
EXACT = [("folder", "exact"), ("postgres", "exact")]
GRAPHS = [("folder", "hnsw"), ("postgres", "hnsw")]
EVERY = [*EXACT, *GRAPHS, ("folder", "ivf-pq")]


def some(count: int, *, seed: int = 0, start: int = 0, width: int = WIDTH, model: str = "m") -> Embeddings:
    """Random vectors of three classes, named photo0, photo1, ..."""
    vectors = np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
    names = np.array(["crow", "örn", "wren"])
    paths = np.array([f"/photos/photo{start + number}.jpg" for number in range(count)])
    return Embeddings(vectors, np.arange(count) % 3, paths, names, model)


@pytest.fixture
def new_place(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """A place for an index that is not there yet: `new_place("folder")`, `new_place("postgres")`."""

    def make(where: str) -> str:
        return str(tmp_path / "index") if where == "folder" else request.getfixturevalue("new_database")

    return make


@pytest.fixture(autouse=True)
def few_are_enough_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finders, "FEWEST_TO_TRAIN", 400)


def places_of(found: list[list[Hit]]) -> np.ndarray:
    """The numbers in the paths of hits: (M, K)."""
    return np.array(
        [[int(hit.path.removeprefix("/photos/photo").removesuffix(".jpg")) for hit in row] for row in found]
    )


@pytest.mark.parametrize(("where", "kind"), EXACT)
def test_an_exact_search_finds_what_the_evaluation_finds(where: str, kind: str, new_place) -> None:
    gallery, queries = some(700), some(40, seed=1).vectors
    index = create_index(new_place(where), width=WIDTH, model="m", kind=kind)
    assert index.add(gallery) == 700
    found = index.search(queries, 9)
    nearest, distances = neighbours(queries, gallery.vectors, count=9)
    np.testing.assert_array_equal(places_of(found), nearest)
    np.testing.assert_allclose([[hit.distance for hit in row] for row in found], distances, rtol=1e-6)
    names = np.array(["crow", "örn", "wren"])[nearest % 3]
    assert [[hit.label for hit in row] for row in found] == names.tolist()
    assert index.recall() == 1


@pytest.mark.parametrize(("where", "kind"), [*GRAPHS, ("folder", "ivf-pq")])
def test_an_approximate_search_finds_nearly_all_of_it_and_measures_how_much(where: str, kind: str, new_place) -> None:
    gallery, queries = some(1500), some(100, seed=1).vectors
    centres = 5 * some(20, seed=2).vectors  # vectors lie in groups, as those of a trained network
    gallery.vectors[:] += centres[np.arange(1500) % 20]
    queries += centres[np.arange(100) % 20]
    index = create_index(new_place(where), width=WIDTH, model="m", kind=kind)
    index.add(gallery)
    index.refresh()
    found = index.search(queries, 10)
    nearest, _ = neighbours(queries, gallery.vectors, count=10)
    share = np.mean([len(np.intersect1d(*rows)) / 10 for rows in zip(places_of(found), nearest, strict=True)])
    assert share > 0.9
    assert abs(index.recall() - share) < 0.05
    distances = np.array([[hit.distance for hit in row] for row in found])
    assert (np.diff(distances, axis=1) >= 0).all()
    own = np.linalg.norm(gallery.vectors[places_of(found)] - queries[:, None], axis=2)
    np.testing.assert_allclose(distances, own, rtol=1e-5)


@pytest.mark.parametrize(("where", "kind"), EVERY)
class TestEveryIndex:
    def test_holds_what_was_added_by_whoever_opens_it(self, where: str, kind: str, new_place) -> None:
        place = new_place(where)
        create_index(place, width=WIDTH, model="m", kind=kind).add(some(500))
        index = open_index(place)
        assert (len(index), index.width, index.model, index.kind) == (500, WIDTH, "m", kind)
        assert index.holds(["/photos/photo3.jpg", "/photos/photo500.jpg"]) == {"/photos/photo3.jpg"}
        assert set(index.class_names) == {"crow", "örn", "wren"}
        blocks = list(index.blocks())
        vectors = np.concatenate([block.vectors for block in blocks])
        paths = np.concatenate([block.paths for block in blocks])
        order = [paths.tolist().index(path) for path in some(500).paths]
        np.testing.assert_array_equal(vectors[order], some(500).vectors)
        labels = [blocks[0].class_name(label) for label in np.concatenate([block.labels for block in blocks])[order]]
        assert labels == [some(500).class_name(label) for label in some(500).labels]
        assert {block.model for block in blocks} == {"m"}

    def test_finds_what_is_added_later_and_no_more_what_is_removed(self, where: str, kind: str, new_place) -> None:
        place = new_place(where)
        index, other = create_index(place, width=WIDTH, model="m", kind=kind), open_index(place)
        index.add(some(500))
        index.refresh()
        assert index.search(some(500).vectors[7:8], 1)[0][0].path == "/photos/photo7.jpg"
        later = some(30, seed=5, start=500)
        assert other.add(later) == 30
        for opened in (index, other, open_index(place)):
            (hits,) = opened.search(later.vectors[3:4], 1)
            assert (hits[0].path, hits[0].distance) == ("/photos/photo503.jpg", 0)
        assert other.remove(["/photos/photo503.jpg", "/photos/photo7.jpg"]) == 2
        for opened in (index, other, open_index(place)):
            assert len(opened) == 528
            for vector in (later.vectors[3:4], some(500).vectors[7:8]):
                (hits,) = opened.search(vector, 5)
                assert len(hits) == 5
                assert not {"/photos/photo503.jpg", "/photos/photo7.jpg"} & {hit.path for hit in hits}

    def test_takes_a_path_once_and_back_after_its_removal(self, where: str, kind: str, new_place) -> None:
        index = create_index(new_place(where), width=WIDTH, model="m", kind=kind)
        twice = some(4)
        twice.paths[3] = twice.paths[0]
        assert index.add(twice) == 3
        assert index.add(some(4)) == 1
        assert index.search(some(4).vectors[:1], 1)[0][0].distance == 0  # the first of two stays
        changed = some(1, seed=9)
        index.remove(["/photos/photo0.jpg"])
        assert index.add(changed) == 1
        assert index.search(changed.vectors, 1)[0][0] == Hit("/photos/photo0.jpg", "crow", 0.0)
        assert len(index) == 4

    def test_finds_fewer_than_asked_for_where_there_are_no_more(self, where: str, kind: str, new_place) -> None:
        index = create_index(new_place(where), width=WIDTH, model="m", kind=kind)
        assert index.search(some(2).vectors, 5) == [[], []]
        assert index.recall() == 1
        index.add(some(3))
        assert [len(row) for row in index.search(some(2).vectors, 5)] == [3, 3]
        assert index.search(some(2).vectors[:0], 5) == []
        assert index.add(some(0)) == 0

    def test_finds_all_of_equal_vectors(self, where: str, kind: str, new_place) -> None:
        index = create_index(new_place(where), width=WIDTH, model="m", kind=kind)
        constant = some(600)
        constant.vectors[:] = 0.5
        index.add(constant)
        index.refresh()
        (hits,) = index.search(constant.vectors[:1], 20)
        assert len({hit.path for hit in hits}) == 20
        assert {hit.distance for hit in hits} == {0}
        assert index.recall() == 1

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (some(3, width=5), r"expected vectors \(M, 12\), real numbers, as .* holds, got float32 \(3, 5\)"),
            (some(3, model="n"), "holds vectors of the model m, these are of the model n: embed them with the same"),
            (some(3, model=""), "these are of an unknown model"),
        ],
    )
    def test_refuses_vectors_of_another_model_or_width(
        self, where: str, kind: str, wrong: Embeddings, message: str, new_place
    ) -> None:
        index = create_index(new_place(where), width=WIDTH, model="m", kind=kind)
        with pytest.raises(ValueError, match=message):
            index.add(wrong)
        assert len(index) == 0

    @pytest.mark.parametrize("number", [np.nan, np.inf, 1e30])
    def test_takes_all_or_nothing(self, where: str, kind: str, number: float, new_place, monkeypatch) -> None:
        monkeypatch.setattr("proxygml.index.hits.BLOCK", 10)
        index = create_index(new_place(where), width=WIDTH, model="m", kind=kind)
        index.add(some(5))
        wrong = some(40, start=5)
        wrong.vectors[33] = number
        with pytest.raises(ValueError, match=r"expected finite vectors .* 1 of 10 are not, first number 3"):
            index.add(wrong)
        with pytest.raises(ValueError, match=r"does not hold 1 of 2 paths, first /photos/photo6.jpg"):
            index.remove(["/photos/photo0.jpg", "/photos/photo6.jpg"])
        assert len(index) == 5
        assert len(index.search(some(1).vectors, 9)[0]) == 5

    def test_refuses_queries_that_cannot_be_compared(self, where: str, kind: str, new_place) -> None:
        index = create_index(new_place(where), width=WIDTH, model="m", kind=kind)
        for wrong in (np.ones(WIDTH), np.ones((2, 3)), np.array([["a"] * WIDTH]), np.full((1, WIDTH), np.nan)):
            with pytest.raises(ValueError, match=r"expected (finite )?vectors"):
                index.search(wrong, 1)
        with pytest.raises(ValueError, match="expected to find 1 item or more, got 0"):
            index.search(np.ones((1, WIDTH)), 0)
        with pytest.raises(ValueError, match="expected paths that are text"):
            index.add(Embeddings(np.ones((1, WIDTH)), np.zeros(1, int), np.array(["a\udce9.jpg"]), model="m"))

    def test_reads_half_precision_from_a_memory_map(self, where: str, kind: str, new_place, tmp_path: Path) -> None:
        gallery = some(600)
        np.save(tmp_path / "vectors.npy", gallery.vectors.astype(np.float16))
        mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
        index = create_index(new_place(where), width=WIDTH, model="m", kind=kind)
        assert index.add(Embeddings(mapped, gallery.labels, gallery.paths, gallery.class_names, "m")) == 600
        assert [row[0].path for row in index.search(mapped[:3], 1)] == gallery.paths[:3].tolist()

    def test_knows_whether_its_vectors_are_of_unit_length(self, where: str, kind: str, new_place) -> None:
        index = create_index(new_place(where), width=WIDTH, model="m", kind=kind)
        unit = some(5)
        unit.vectors[:] /= np.linalg.norm(unit.vectors, axis=1, keepdims=True)
        index.add(unit)
        assert index.about["unit_length"] == "1"
        (hits,) = index.search(unit.vectors[:1], 5)
        by_path = dict(zip(unit.paths, unit.vectors @ unit.vectors[0], strict=True))
        assert [hit.similarity for hit in hits] == pytest.approx([by_path[hit.path] for hit in hits], abs=1e-6)
        index.add(some(5, start=5))
        assert index.about["unit_length"] == "0"

    def test_keeps_remarks_and_what_embeds_a_query(self, where: str, kind: str, new_place, tmp_path: Path) -> None:
        place = new_place(where)
        index = create_index(place, width=WIDTH, model=f"{where}-{kind}", kind=kind)
        assert index.model_folder() is None
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "best.pt").write_bytes(b"\x00weights")
        (tmp_path / "run" / "recipe.json").write_text("{}")
        index.keep_model(tmp_path / "run")
        index.note("gallery", "birds")
        again = open_index(place)
        assert (again.model_folder() / "best.pt").read_bytes() == b"\x00weights"
        assert (again.model_folder() / "recipe.json").read_text() == "{}"
        assert again.about["gallery"] == "birds"

    def test_is_not_created_twice(self, where: str, kind: str, new_place) -> None:
        place = new_place(where)
        create_index(place, width=WIDTH, model="m", kind=kind).add(some(3))
        with pytest.raises(FileExistsError, match="is there already"):
            create_index(place, width=WIDTH, model="m", kind=kind)
        assert len(open_index(place)) == 3

    def test_is_refused_where_a_newer_version_made_it(self, where: str, kind: str, new_place) -> None:
        place = new_place(where)
        index = create_index(place, width=WIDTH, model="m", kind=kind)
        index.note("form", "9")
        index.note("version", "9.0")
        with pytest.raises(ValueError, match=r"was made by proxygml 9.0, this is .*: update proxygml"):
            open_index(place)

    def test_loses_and_doubles_nothing_where_two_processes_add_at_once(self, where: str, kind: str, new_place) -> None:
        place = new_place(where)
        index = create_index(place, width=WIDTH, model="m", kind=kind)
        with get_context("spawn").Pool(2) as pool:
            added = pool.starmap(add_in_parts, [(place, False), (place, True)])
        assert sum(added) == len(index) == 1000
        expected, held = some(1000), {}
        for block in index.blocks():
            held |= dict(zip(block.paths, block.vectors, strict=True))
        np.testing.assert_array_equal([held[path] for path in expected.paths], expected.vectors)
        index.refresh()
        found = index.search(expected.vectors, 1)
        nearest = [row[0].path for row in found]
        assert np.mean(nearest == expected.paths) >= (1 if kind == "exact" else 0.98)  # graphs and lists may miss some


def add_in_parts(place: str, backwards: bool) -> int:
    """Add the same thousand items from their first or from their last, fifty at a time; how many were new."""
    index, items = open_index(place), some(1000)
    starts = range(0, 1000, 50)
    added = 0
    for start in reversed(starts) if backwards else starts:
        part = slice(start, start + 75)
        rows = items.vectors[part], items.labels[part], items.paths[part]
        turned = [row[::-1] for row in rows] if backwards else rows
        added += index.add(Embeddings(*turned, items.class_names, "m"))
    return added


class TestAFolder:
    def test_keeps_a_graph_that_others_read_instead_of_making_it_again(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(folders, "FAR_BEHIND", 100)
        index = Index.create(tmp_path / "index", width=WIDTH, kind="hnsw", model="m")
        index.add(some(500))
        index.refresh()
        assert [path.name for path in (tmp_path / "index").glob("*.faiss")] == ["hnsw-500.faiss"]
        index.add(some(50, seed=2, start=500))
        index.remove(["/photos/photo3.jpg"])
        monkeypatch.setattr(finders.Finder, "new", None)  # what is there has to do
        again = Index.open(tmp_path / "index")
        assert again.search(some(50, seed=2).vectors[4:5], 1)[0][0].path == "/photos/photo504.jpg"
        assert again.search(some(500).vectors[3:4], 1)[0][0].path != "/photos/photo3.jpg"
        again.add(some(200, seed=3, start=550))
        again.refresh()
        assert [path.name for path in (tmp_path / "index").glob("*.faiss")] == ["hnsw-750.faiss"]

    @pytest.mark.parametrize("kind", ["hnsw", "ivf-pq"])
    def test_makes_a_damaged_faiss_index_again(self, kind: str, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(folders, "FAR_BEHIND", 100)
        index = Index.create(tmp_path / "index", width=WIDTH, kind=kind, model="m")
        index.add(some(500))
        index.refresh()
        (path,) = (tmp_path / "index").glob("*.faiss")
        path.write_bytes(path.read_bytes()[:1000])
        assert Index.open(tmp_path / "index").search(some(500).vectors[9:10], 1)[0][0].path == "/photos/photo9.jpg"
        assert path.stat().st_size > 1000

    def test_makes_a_graph_anew_when_much_of_it_was_removed(self, tmp_path: Path) -> None:
        index = Index.create(tmp_path / "index", width=WIDTH, kind="hnsw", model="m")
        index.add(some(500))
        index.refresh()
        index.remove(some(80).paths)
        index.refresh()
        assert (index._finder.index.ntotal, len(index._finder)) == (500, 420)
        index.remove(some(120).paths[80:])
        assert len(index.search(some(1).vectors, 500)[0]) == 380
        assert index._finder.index.ntotal == 380

    def test_learns_anew_when_it_has_grown(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(finders, "lists_for", lambda count: count // 50)
        index = Index.create(tmp_path / "index", width=WIDTH, kind="ivf-pq", model="m")
        index.add(some(300))
        index.refresh()
        assert index._finder.kind == "exact"  # too few to learn from
        for count, lists in [(400, 8), (800, 8), (900, 18)]:
            index.add(some(count, start=0))
            index.refresh()
            assert (index._finder.kind, index._finder.index.nlist) == ("ivf-pq", lists)
            assert len(index._finder) == count

    def test_answers_though_it_cannot_write_its_faiss_index(self, tmp_path: Path, monkeypatch) -> None:
        def full(*_: object) -> None:
            raise RuntimeError("Error in write\nwrite error: No space left on device")

        monkeypatch.setattr(folders, "FAR_BEHIND", 100)
        monkeypatch.setattr(finders.faiss, "write_index", full)
        index = Index.create(tmp_path / "index", width=WIDTH, kind="hnsw", model="m")
        index.add(some(500))
        with pytest.warns(UserWarning, match=r"could not write .*hnsw-500.faiss: .*No space left"):
            (hits,) = index.search(some(1).vectors, 1)
        assert hits[0].path == "/photos/photo0.jpg"
        assert not list((tmp_path / "index").glob("*.faiss"))

    def test_says_that_the_disk_is_full_and_stays_as_it_was(self, tmp_path: Path) -> None:
        index = Index.create(tmp_path / "index", width=WIDTH, model="m")
        index.add(some(10))
        index.database.connection.execute("PRAGMA max_page_count = 20")  # stands for the end of the disk
        with pytest.raises(OSError, match=r"items.sqlite: database or disk is full: make room"):
            index.add(some(5000))
        assert len(index) == len(Index.open(tmp_path / "index")) == 10

    def test_is_refused_where_it_is_none_or_damaged(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no items.sqlite in .*: that is no index, `proxygml index build`"):
            Index.open(tmp_path)
        Index.create(tmp_path / "index", width=WIDTH, model="m").close()
        right = (tmp_path / "index" / "items.sqlite").read_bytes()
        no_text = right.replace(b"CREATE TABLE classes", b"CREATE TAB\xe4E classes")  # SQLite quotes it as it is
        for damaged in (b"something else altogether" * 100, b"", no_text):
            (tmp_path / "items.sqlite").write_bytes(damaged)
            with pytest.raises(ValueError, match=r"items.sqlite is damaged .*: remove .* and build the index again"):
                Index.open(tmp_path)

    def test_is_refused_where_what_it_holds_was_cut_off(self, tmp_path: Path) -> None:
        Index.create(tmp_path / "index", width=WIDTH, model="m").add(some(5000))
        path = tmp_path / "index" / "items.sqlite"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(
            ValueError, match=r"items.sqlite is damaged .*malformed.*: remove .* and build the index again"
        ):
            Index.open(tmp_path / "index").search(some(1).vectors, 3)

    def test_notices_flipped_bits_or_they_change_nothing(self, tmp_path: Path) -> None:
        index = Index.create(tmp_path / "index", width=WIDTH, model="m")
        index.add(some(40))
        index.note("gallery", "photos")
        path, whole = tmp_path / "index" / "items.sqlite", self.contents(index)
        index.close()
        content, random, noticed = path.read_bytes(), np.random.default_rng(0), []
        for place in random.integers(0, 8 * len(content), 600).tolist():
            altered = bytearray(content)
            altered[place // 8] ^= 1 << place % 8
            path.write_bytes(altered)
            try:
                index = Index.open(tmp_path / "index")
                index.check()
                assert self.contents(index) == whole, f"bit {place}"
            except (ValueError, OSError) as error:
                noticed.append(str(error))
        assert len(noticed) > 60  # the others fall on room that nothing uses
        assert all(line.startswith(str(path)) for line in noticed)

    def contents(self, index: Index) -> list:
        (block,) = index.blocks()
        return [index.about, block.vectors.tolist(), block.labels.tolist(), *block.paths, *block.class_names]

    def test_notices_an_altered_vector_when_it_is_read(self, tmp_path: Path) -> None:
        index = Index.create(tmp_path / "index", width=WIDTH, model="m")
        index.add(some(10))
        with index.database.change() as change:
            change.execute("UPDATE items SET vector = (SELECT vector FROM items WHERE id = 2) WHERE id = 1")
        with pytest.raises(
            ValueError, match=r"items.sqlite is damaged \(item 1 was altered\): remove .* and build the"
        ):
            index.search(some(1).vectors, 1)

    def test_does_not_search_in_an_altered_faiss_index(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(folders, "FAR_BEHIND", 100)
        index = Index.create(tmp_path / "index", width=WIDTH, kind="hnsw", model="m")
        index.add(some(500))
        index.refresh()
        (path,) = (tmp_path / "index").glob("*.faiss")
        whole = path.read_bytes()
        assert finders.Finder.read(tmp_path / "index", "hnsw", WIDTH) is not None
        for place in (0, 100, len(whole) // 2, len(whole) - 1):
            altered = bytearray(whole)
            altered[place] ^= 4
            path.write_bytes(altered)
            assert finders.Finder.read(tmp_path / "index", "hnsw", WIDTH) is None
        assert len(Index.open(tmp_path / "index").search(some(1).vectors, 3)[0]) == 3
        assert path.read_bytes() == whole

    def test_does_not_embed_with_an_altered_network(self, tmp_path: Path) -> None:
        index = Index.create(tmp_path / "index", width=WIDTH, model="m")
        (tmp_path / "best.pt").write_bytes(b"weights")
        (tmp_path / "recipe.json").write_text("{}")
        index.keep_model(tmp_path)
        (index.model_folder() / "best.pt").write_bytes(b"weighty")
        assert index.model_folder() is None
        index.keep_model(tmp_path)
        assert (index.model_folder() / "best.pt").read_bytes() == b"weights"

    def test_is_begun_where_a_process_was_killed_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "index").mkdir()
        for name in (".lock", ".items-abcdefgh.sqlite"):
            (tmp_path / "index" / name).touch()
        Index.create(tmp_path / "index", width=WIDTH, model="m").add(some(3))

    @pytest.mark.parametrize(("width", "kind"), [(0, "exact"), (3, "tree")])
    def test_is_not_begun_for_what_cannot_be(self, width: int, kind: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"expected (vectors of 1 number|a kind of index among exact)"):
            Index.create(tmp_path / "index", width=width, kind=kind)
        assert not (tmp_path / "index").exists()

    def test_is_whole_after_a_kill(self, tmp_path: Path) -> None:
        code = (
            "import os, signal, sys; from tests.test_index import *\n"
            f"index = Index.create(Path({str(tmp_path / 'index')!r}), width=WIDTH, model='m')\n"
            "index.add(some(100))\n"
            "with index.database.change() as change:\n"
            "    change.execute('DELETE FROM items')\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True)
        assert done.returncode == -9, done.stderr
        index = Index.open(tmp_path / "index")
        assert len(index) == 100
        assert index.search(some(1).vectors, 1)[0][0].distance == 0

    def test_can_be_moved(self, tmp_path: Path) -> None:
        Index.create(tmp_path / "index", width=WIDTH, model="m").add(some(10))
        shutil.move(tmp_path / "index", tmp_path / "elsewhere")
        assert len(Index.open(tmp_path / "elsewhere")) == 10


def test_embeddings_are_searched_in_memory() -> None:
    index = Index.of(some(50))
    assert index.search(some(50).vectors[4:5], 1)[0][0] == Hit("/photos/photo4.jpg", "örn", 0.0)


def test_many_queries_are_answered_in_blocks_of_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    index, queries = Index.of(some(300)), some(90, seed=1).vectors
    whole = index.search(queries, 7)
    monkeypatch.setattr(folders, "HELD", 20 * WIDTH)  # a query at a time
    assert index.search(queries, 7) == whole


def test_vectors_far_from_the_origin_are_told_apart() -> None:
    gallery = some(200)
    gallery.vectors[:] = 1000 + gallery.vectors * 1e-2  # in float32 products all are equally far
    nearest, _ = neighbours(gallery.vectors[:20], gallery.vectors, count=1)
    np.testing.assert_array_equal(places_of(Index.of(gallery).search(gallery.vectors[:20], 1)), nearest)


def test_the_kind_that_suits_a_gallery_grows_with_it() -> None:
    assert [suited(count, 128) for count in (1, 1_000_000, 1_000_001, 5_000_000, 5_000_001)] == [
        *("exact", "exact", "hnsw", "hnsw", "ivf-pq"),
    ]
    assert suited(100_000, 2048) == "hnsw"


def test_an_index_works_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None  # which an import then refuses\n"
        "import numpy as np\n"
        "from pathlib import Path\n"
        "from proxygml.embeddings import Embeddings\n"
        "from proxygml.index import Index\n"
        "index = Index.create(Path(sys.argv[1]), width=2)\n"
        "index.add(Embeddings(np.eye(2), np.arange(2), np.array(['left', 'right'])))\n"
        "print(index.search(np.eye(2), 1)[1][0].path)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "index"], capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr


def test_a_graph_is_searched_also_where_another_library_has_changed_faiss(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np, faiss.contrib.torch_utils\n"
        "from pathlib import Path\n"
        "from proxygml.embeddings import Embeddings\n"
        "from proxygml.index import Index\n"
        "vectors = np.random.default_rng(0).normal(size=(50, 8))\n"
        "index = Index.create(Path(sys.argv[1]), width=8, kind='hnsw')\n"
        "index.add(Embeddings(vectors, np.arange(50), np.arange(50).astype(str)))\n"
        "index.remove(['3'])\n"
        "print(*[hits[0].path for hits in index.search(vectors[:5], 1)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "graph"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, third, instead, fifth = done.stdout.split()
    assert (first, second, third, fifth) == ("0", "1", "2", "4")
    assert instead != "3"
