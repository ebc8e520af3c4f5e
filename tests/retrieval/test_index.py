"""Both types of index: the same methods, the same results, compared with exact neighbors."""

from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbors
from proxygml.retrieval import Hit, Index
from proxygml.retrieval.vector_index import VectorIndex
from tests.retrieval.conftest import CLASSES, DIM, add_in_parts, random_embeddings

EXACT = [("folder", "exact"), ("postgres", "exact")]
APPROXIMATE = [("folder", "hnsw"), ("postgres", "hnsw"), ("folder", "ivf-pq")]


def numbers(results: list[list[Hit]]) -> np.ndarray:
    """The numbers in the paths of hits: (M, K)."""
    return np.array([[int(Path(hit.path).stem) for hit in row] for row in results])


@pytest.mark.parametrize(("storage", "kind"), EXACT)
def test_exact_search_equals_evaluation(storage: str, kind: str, new_location) -> None:
    items, queries = random_embeddings(700), random_embeddings(40, seed=1).vectors
    index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
    assert index.add(items) == 700
    results = index.search(queries, 9)
    nearest, distances = neighbors(queries, items.vectors, count=9)
    np.testing.assert_array_equal(numbers(results), nearest)
    np.testing.assert_allclose([[hit.distance for hit in row] for row in results], distances, rtol=1e-6)
    assert [[hit.label for hit in row] for row in results] == CLASSES[nearest % 3].tolist()
    assert index.recall() == 1


@pytest.mark.parametrize(("storage", "kind"), APPROXIMATE)
@pytest.mark.slow
def test_approximate_search_measures_its_recall(storage: str, kind: str, new_location) -> None:
    items, queries = random_embeddings(1500), random_embeddings(100, seed=1).vectors
    centers = 5 * random_embeddings(20, seed=2).vectors  # clusters, as of a trained network
    items.vectors[:] += centers[np.arange(1500) % 20]
    queries += centers[np.arange(100) % 20]
    index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
    index.add(items)
    index.refresh()
    results = index.search(queries, 10)
    nearest, _ = neighbors(queries, items.vectors, count=10)
    recall = np.mean([len(np.intersect1d(*rows)) / 10 for rows in zip(numbers(results), nearest, strict=True)])
    assert recall > 0.9
    assert abs(index.recall() - recall) < 0.05
    distances = np.array([[hit.distance for hit in row] for row in results])
    assert (np.diff(distances, axis=1) >= 0).all()
    expected = np.linalg.norm(items.vectors[numbers(results)] - queries[:, None], axis=2)
    np.testing.assert_allclose(distances, expected, rtol=1e-5)


@pytest.mark.parametrize(("storage", "kind"), [*EXACT, *APPROXIMATE])
class TestEveryIndex:
    def test_reopened_index_has_all_items(self, storage: str, kind: str, new_location) -> None:
        location, items = new_location(storage), random_embeddings(500)
        Index.create(location, dim=DIM, model="m", kind=kind).add(items)
        index = Index.open(location)
        assert (len(index), index.dim, index.model, index.kind) == (500, DIM, "m", kind)
        assert index.contains(["/photos/3.jpg", "/photos/500.jpg"]) == {"/photos/3.jpg"}
        assert set(index.class_names) == set(CLASSES)
        blocks = list(index.blocks())
        vectors, labels, paths = (
            np.concatenate([getattr(block, name) for block in blocks]) for name in ("vectors", "labels", "paths")
        )
        order = [paths.tolist().index(path) for path in items.paths]
        np.testing.assert_array_equal(vectors[order], items.vectors)
        names = [blocks[0].class_name(label) for label in labels[order]]
        assert names == [items.class_name(label) for label in items.labels]
        assert {block.model for block in blocks} == {"m"}

    def test_search_sees_later_changes(self, storage: str, kind: str, new_location) -> None:
        location = new_location(storage)
        index, other = Index.create(location, dim=DIM, model="m", kind=kind), Index.open(location)
        items, later = random_embeddings(500), random_embeddings(30, seed=5, start=500)
        index.add(items)
        index.refresh()
        assert index.search(items.vectors[7:8], 1)[0][0].path == "/photos/7.jpg"
        assert other.add(later) == 30
        for opened in (index, other, Index.open(location)):
            (hits,) = opened.search(later.vectors[3:4], 1)
            assert (hits[0].path, hits[0].distance) == ("/photos/503.jpg", 0)
        removed = ["/photos/503.jpg", "/photos/7.jpg"]
        assert other.remove(removed) == 2
        for opened in (index, other, Index.open(location)):
            assert len(opened) == 528
            for hits in opened.search(np.stack([later.vectors[3], items.vectors[7]]), 5):
                assert len(hits) == 5
                assert not set(removed) & {hit.path for hit in hits}

    def test_others_remove_during_a_search(self, storage: str, kind: str, new_location, monkeypatch) -> None:
        location = new_location(storage)
        index, other = Index.create(location, dim=DIM, model="m", kind=kind), Index.open(location)
        items = random_embeddings(450)
        index.add(items)
        index.refresh()
        batches = iter([items.paths[:440], items.paths[440:445], items.paths[445:]])  # of what others remove

        def removing(function):
            def call(*arguments: object, **options: object):
                result = function(*arguments, **options)
                if (paths := next(batches, None)) is not None:
                    other.remove(paths)
                return result

            return call

        if storage == "folder":  # between the search for candidates and their reading
            monkeypatch.setattr(VectorIndex, "search", removing(VectorIndex.search))
            assert index.search(items.vectors[:3], 9) == [[], [], []]
        index.add(items)
        batches = iter([items.paths[:440], items.paths[440:445], items.paths[445:]])
        monkeypatch.setattr(type(index), "blocks", removing(type(index).blocks))
        assert 0 <= index.recall() <= 1

    def test_paths_are_unique(self, storage: str, kind: str, new_location) -> None:
        index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
        items = random_embeddings(4)
        items.paths[3] = items.paths[0]
        assert index.add(items) == 3
        assert index.add(random_embeddings(4)) == 1
        assert index.search(items.vectors[:1], 1)[0][0].distance == 0  # the first of two stays
        changed = random_embeddings(1, seed=9)
        index.remove(["/photos/0.jpg"])
        assert index.add(changed) == 1
        (hit,) = index.search(changed.vectors, 1)[0]
        assert hit[:4] == ("/photos/0.jpg", "crow", 0.0, pytest.approx(1))
        assert len(index) == 4

    def test_items_are_found_by_id_and_path(self, storage: str, kind: str, new_location) -> None:
        index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
        items = random_embeddings(4)
        index.add(items)
        hits = index.search(items.vectors, 1)
        for vector, (hit,) in zip(items.vectors, hits, strict=True):
            for item in (hit.id, hit.path):
                found = index.find(item)
                assert found[0] == hit.id
                np.testing.assert_array_equal(found[1], vector)
        assert len({hit.id for (hit,) in hits}) == 4
        assert [index.find(item) for item in (10**9, 0, "/photos/9.jpg", "")] == [None] * 4

    def test_relocated_items_are_found(self, storage: str, kind: str, new_location) -> None:
        location = new_location(storage)
        index = Index.create(location, dim=DIM, model="m", kind=kind)
        items = random_embeddings(450)
        items.paths[3:6] = ["/photos", "/photos_2/4.jpg", "/a%_b/5.jpg"]
        index.add(items)
        index.refresh()
        assert index.relocate("/photos", "/new/é") == 447
        assert index.relocate("/photos", "/new/é") == 0
        assert index.relocate("/a%_b", "/c") == 1
        paths = ["/new/é/0.jpg", "/photos", "/photos_2/4.jpg", "/c/5.jpg"]
        for opened in (index, Index.open(location)):
            hits = opened.search(items.vectors[[0, 3, 4, 5]], 1)
            assert [(hit.path, hit.distance) for (hit,) in hits] == [(path, 0) for path in paths]
        assert {("/new/é/0.jpg", "crow"), ("/new/é/1.jpg", "örn")} < set(index.listing())
        index.add(random_embeddings(3))
        with pytest.raises(ValueError, match=r"contains some of these paths below /new/é already: remove the old or"):
            index.relocate("/photos", "/new/é")
        assert index.contains([f"/photos/{number}.jpg" for number in range(3)]) == set(random_embeddings(3).paths)
        with pytest.raises(ValueError, match="expected paths in valid Unicode"):
            index.relocate("/photos", "/caf\udce9")
        next(index.blocks())  # undamaged

    def test_search_in_few_items(self, storage: str, kind: str, new_location) -> None:
        index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
        items = random_embeddings(3)
        assert index.search(items.vectors[:2], 5) == [[], []]
        assert index.recall() == 1
        index.add(items)
        assert [len(row) for row in index.search(items.vectors[:2], 5)] == [3, 3]
        assert index.search(items.vectors[:0], 5) == []
        assert index.add(random_embeddings(0)) == 0

    def test_equal_vectors_are_all_found(self, storage: str, kind: str, new_location) -> None:
        index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
        items = random_embeddings(600)
        items.vectors[:] = 0.5
        index.add(items)
        index.refresh()
        (hits,) = index.search(items.vectors[:1], 20)
        assert len({hit.path for hit in hits}) == 20
        assert {hit.distance for hit in hits} == {0}
        assert index.recall() == 1

    def test_wrong_vectors_are_refused(self, storage: str, kind: str, new_location, monkeypatch) -> None:
        monkeypatch.setattr("proxygml.retrieval.validation.BLOCK_ROWS", 10)
        index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
        index.add(random_embeddings(5))
        for wrong, message in [
            (random_embeddings(3, dim=5), r"expected real vectors \(M, 12\), as in .*, got float32 \(3, 5\)"),
            (random_embeddings(3, model="n"), "has vectors of model m, these are of model n: embed them with the same"),
            (random_embeddings(3, model=""), "these are of an unknown model"),
            (
                Embeddings(np.ones((1, DIM)), np.zeros(1, int), np.array(["a\udce9.jpg"]), model="m"),
                "expected paths in valid Unicode",
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                index.add(wrong)
        for value in (np.nan, np.inf, 1e30):
            wrong = random_embeddings(40, start=5)
            wrong.vectors[33] = value
            with pytest.raises(ValueError, match=r"expected finite vectors .* 1 of 10 are not, first row 3"):
                index.add(wrong)
        with pytest.raises(ValueError, match=r"does not contain 1 of 2 paths, first /photos/6.jpg"):
            index.remove(["/photos/0.jpg", "/photos/6.jpg"])
        assert len(index) == 5
        assert len(index.search(random_embeddings(1).vectors, 9)[0]) == 5

    def test_wrong_queries_are_refused(self, storage: str, kind: str, new_location) -> None:
        index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
        for wrong in (np.ones(DIM), np.ones((2, 3)), np.array([["a"] * DIM]), np.full((1, DIM), np.nan)):
            with pytest.raises(ValueError, match=r"expected (finite|real) vectors"):
                index.search(wrong, 1)
        with pytest.raises(ValueError, match="expected to find 1 item or more, got 0"):
            index.search(np.ones((1, DIM)), 0)

    def test_half_precision_memory_map(self, storage: str, kind: str, new_location, tmp_path: Path) -> None:
        items = random_embeddings(600)
        np.save(tmp_path / "vectors.npy", items.vectors.astype(np.float16))
        mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
        index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
        assert index.add(Embeddings(mapped, items.labels, items.paths, CLASSES, "m")) == 600
        assert [row[0].path for row in index.search(mapped[:3], 1)] == items.paths[:3].tolist()

    @pytest.mark.parametrize("query_length", [0, 1e-6, 1, 10, 1e6])
    @pytest.mark.parametrize("length", [1, 30])
    def test_similarity_is_the_cosine(self, length, query_length, storage: str, kind: str, new_location) -> None:
        index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
        items = random_embeddings(5)
        unit = items.vectors / np.linalg.norm(items.vectors, axis=1, keepdims=True)
        items.vectors[:] = unit * length
        items.vectors[4] *= length == 1  # otherwise zeros
        index.add(items)
        hits = {hit.path: hit.similarity for hit in index.search(query_length * unit[:1], 5)[0]}
        expected = (query_length > 0) * unit @ unit[0]
        assert [hits[path] for path in items.paths[:4]] == pytest.approx(expected[:4], abs=1e-6)
        assert max(map(abs, hits.values())) <= 1

    def test_metadata_and_model(self, storage: str, kind: str, new_location, tmp_path: Path) -> None:
        location = new_location(storage)
        index = Index.create(location, dim=DIM, model=f"{storage}-{kind}", kind=kind)
        assert index.model_folder() is None
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "model.safetensors").write_bytes(b"\x00weights")
        (tmp_path / "run" / "recipe.json").write_text("{}")
        index.save_model(tmp_path / "run")
        index.set_metadata("source", "birds")
        reopened = Index.open(location)
        assert (reopened.model_folder() / "model.safetensors").read_bytes() == b"\x00weights"
        assert (reopened.model_folder() / "recipe.json").read_text() == "{}"
        assert reopened.metadata["source"] == "birds"

    def test_existing_index_is_not_replaced(self, storage: str, kind: str, new_location) -> None:
        location = new_location(storage)
        Index.create(location, dim=DIM, model="m", kind=kind).add(random_embeddings(3))
        with pytest.raises(FileExistsError, match="exists already"):
            Index.create(location, dim=DIM, model="m", kind=kind)
        assert len(Index.open(location)) == 3

    def test_other_schema_is_refused(self, storage: str, kind: str, new_location) -> None:
        location = new_location(storage)
        index = Index.create(location, dim=DIM, model="m", kind=kind)
        index.set_metadata("schema_version", "9")
        index.set_metadata("version", "9.0")
        with pytest.raises(ValueError, match=r"was written by proxygml 9.0, this is .*: update proxygml"):
            Index.open(location)


@pytest.mark.parametrize(("storage", "kind"), [("folder", "hnsw"), ("postgres", "exact")])
@pytest.mark.slow
def test_two_processes_add_the_same_items(storage: str, kind: str, new_location) -> None:
    location = new_location(storage)
    index = Index.create(location, dim=DIM, model="m", kind=kind)
    with get_context("spawn").Pool(2) as pool:
        added = pool.starmap(add_in_parts, [(location, False), (location, True)])
    assert sum(added) == len(index) == 1000
    items, stored = random_embeddings(1000), {}
    for block in index.blocks():
        stored |= dict(zip(block.paths, block.vectors, strict=True))
    np.testing.assert_array_equal([stored[path] for path in items.paths], items.vectors)
    index.refresh()
    nearest = [row[0].path for row in index.search(items.vectors, 1)]
    assert np.mean(nearest == items.paths) >= (1 if kind == "exact" else 0.98)  # a graph may miss some
