"""Query expansion, augmentation and re-ranking, compared with loops written from the papers."""

from pathlib import Path

import numpy as np
import pytest

from proxygml.embeddings import Embeddings
from proxygml.retrieval import Index, ranking
from proxygml.retrieval.hits import Hit, cosines
from proxygml.retrieval.ranking import augment, reciprocal_distances, weighted_means
from tests.retrieval.conftest import DIM, random_embeddings

STORAGES = [("folder", "exact"), ("folder", "hnsw"), ("folder", "ivf-pq"), ("postgres", "exact"), ("postgres", "hnsw")]


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / np.sqrt((first @ first) * (second @ second)))


def expanded(query: np.ndarray, items: np.ndarray, count: int, alpha: float) -> np.ndarray:
    """alpha-QE of Radenović et al. 2018: sum of f(q) and of (f(q) f(i))^alpha f(i), with the length of the query."""
    nearest = sorted(range(len(items)), key=lambda row: np.linalg.norm(items[row] - query))[:count]
    total = query.astype(np.float64)
    for row in nearest:
        total = total + max(cosine(query, items[row]), 0) ** alpha * items[row]
    return total * np.linalg.norm(query) / np.linalg.norm(total)


def k_reciprocal(query: np.ndarray, items: np.ndarray, k1: int, k2: int, weight: float) -> list[float]:
    """Zhong et al. 2017, section 3, with distances as in their code: squared, divided by the largest of a row."""
    points = [query, *items]
    every = range(len(points))
    distances = [[float(np.sum((points[a] - points[b]) ** 2)) for b in every] for a in every]
    distances = [[each / max(row) for each in row] for row in distances]

    def nearest(p: int, k: int) -> set[int]:
        return set(sorted(every, key=lambda q: distances[p][q])[:k])

    def reciprocal(p: int, k: int) -> set[int]:  # N(p, k) of their code includes p
        return {q for q in nearest(p, k + 1) if p in nearest(q, k + 1)}

    vectors = []
    for p in every:
        members = reciprocal(p, k1)
        for q in reciprocal(p, k1):
            half = reciprocal(q, round(k1 / 2))
            if len(reciprocal(p, k1) & half) >= 2 / 3 * len(half):
                members = members | half
        vectors.append([np.exp(-distances[p][q]) if q in members else 0 for q in every])
    averaged = [np.mean([vectors[q] for q in nearest(p, k2)], axis=0) for p in every]
    results = []
    for p in every[1:]:
        smaller = sum(min(a, b) for a, b in zip(averaged[0], averaged[p], strict=True))
        larger = sum(max(a, b) for a, b in zip(averaged[0], averaged[p], strict=True))
        results.append((1 - weight) * (1 - smaller / larger) + weight * distances[0][p])
    return results


def clustered(count: int, *, seed: int = 0, start: int = 0) -> Embeddings:
    """Random vectors around ten centers."""
    items = random_embeddings(count, seed=seed, start=start)
    centers = random_embeddings(10, seed=9).vectors
    items.vectors[:] += 2 * centers[np.arange(count) % 10]
    return items


def test_expansion_follows_the_paper() -> None:
    items, queries = clustered(60).vectors, clustered(4, seed=1).vectors
    nearest = np.argsort(np.linalg.norm(queries[:, None] - items, axis=2), axis=1)[:, :5]
    means = weighted_means(queries, items[nearest], 3)
    np.testing.assert_allclose(means, [expanded(query, items, 5, 3) for query in queries], rtol=1e-5)


def test_augmentation_follows_the_paper() -> None:
    items = clustered(40)
    items.vectors[7] = items.vectors[30]  # a copy is a neighbor like any other
    augmented = augment(items, 4)
    for row, vector in enumerate(items.vectors):
        others = np.delete(items.vectors, row, axis=0)
        np.testing.assert_allclose(augmented.vectors[row], expanded(vector, others, 4, ranking.ALPHA), rtol=1e-4)
    np.testing.assert_array_equal(augmented.paths, items.paths)


@pytest.mark.parametrize(("k1", "k2", "weight"), [(6, 3, 0.3), (5, 1, 0.0), (20, 6, 0.5), (90, 4, 0.1)])
def test_reranking_follows_the_paper(k1: int, k2: int, weight: float) -> None:
    query, items = clustered(1, seed=1).vectors[0], clustered(40).vectors
    expected = k_reciprocal(query.astype(np.float64), items.astype(np.float64), k1, k2, weight)
    np.testing.assert_allclose(reciprocal_distances(query, items, k1, k2, weight), expected, rtol=1e-9)


def test_equal_items_have_finite_distances() -> None:
    items = np.repeat(clustered(2).vectors, 30, axis=0)
    for query in (items[0], np.zeros(DIM, np.float32)):
        distances = reciprocal_distances(query, items, 5, 2)
        assert np.isfinite(distances).all()
        assert np.isfinite(weighted_means(query[None], items[None])).all()
    assert np.isfinite(reciprocal_distances(items[0], items[:1])).all()


def test_scale_of_vectors_does_not_matter() -> None:
    items, queries = clustered(60).vectors, clustered(2, seed=1).vectors
    for scale in (1e-18, 1e14):  # squares of which float32 cannot hold
        means = weighted_means(queries * np.float32(scale), items[None, :5] * np.float32(scale))
        np.testing.assert_allclose(means / scale, weighted_means(queries, items[None, :5]), rtol=1e-5)


def test_only_finite_vectors_are_augmented() -> None:
    items = random_embeddings(5)
    items.vectors[3, 0] = np.nan
    with pytest.raises(ValueError, match=r"expected finite vectors .* first row 3"):
        augment(items, 2)


def expected_hits(items: Embeddings, query: np.ndarray, count: int, options: dict[str, int]) -> list[tuple[str, float]]:
    """Path and distance of the hits of a search with options, step by step."""
    vectors, changed = items.vectors.astype(np.float64), query.astype(np.float64)
    if "augment" in options:
        vectors = augment(items, options["augment"]).vectors.astype(np.float64)
    if "expand" in options:
        changed = expanded(changed, vectors, options["expand"], ranking.ALPHA)
    order = np.argsort(np.linalg.norm(vectors - changed, axis=1))
    if "rerank" in options:
        first = order[: options["rerank"]]
        again = np.argsort(reciprocal_distances(changed, vectors[first]), kind="stable")
        order = np.append(first[again], order[options["rerank"] :])
    return [(items.paths[row], float(np.linalg.norm(items.vectors[row] - query))) for row in order[:count]]


@pytest.mark.parametrize(("storage", "kind"), STORAGES)
def test_every_index_ranks_alike(storage: str, kind: str, new_location) -> None:
    items, queries = clustered(450), clustered(3, seed=1).vectors
    index = Index.create(new_location(storage), dim=DIM, model="m", kind=kind)
    index.add(items)
    index.refresh()
    ids = {path: index.find(path)[0] for path in items.paths[:450:50].tolist()}
    for options in (
        {"expand": 4},
        {"augment": 4},
        {"rerank": 30},
        {"rerank": 5},  # fewer than are shown: the others follow
        {"expand": 3, "augment": 2, "rerank": 20},
    ):
        for query, hits in zip(queries, index.search(queries, 12, **options), strict=True):
            expected = expected_hits(items, query, 12, options)
            paths = [hit.path for hit in hits]
            assert paths == [path for path, _ in expected] or (
                kind == "ivf-pq" and len(set(paths)) == 12
            )  # approximate
            vectors = np.stack([index.find(hit.path)[1] for hit in hits])
            np.testing.assert_allclose(
                [hit.distance for hit in hits], np.linalg.norm(vectors - query, axis=1), rtol=1e-5
            )
            np.testing.assert_allclose([hit.similarity for hit in hits], cosines(query, vectors), rtol=1e-5)
            assert all(ids.get(hit.path, hit.id) == hit.id for hit in hits)
    before = index.search(queries, 5, expand=4, augment=3, rerank=10)
    later = clustered(20, seed=5, start=500)
    assert index.add(later) == 20
    index.remove(later.paths.tolist())
    assert index.search(queries, 5, expand=4, augment=3, rerank=10) == before


def test_prefix_index(tmp_path: Path) -> None:
    items = clustered(300)
    items.vectors[:] /= np.linalg.norm(items.vectors, axis=1, keepdims=True)
    index = Index.create(tmp_path / "index", dim=DIM, model="m", prefix=DIM - 1)
    index.add(items)
    (hits,) = index.search(items.vectors[:1], 8, expand=4, rerank=20)
    options = {"expand": 4, "rerank": 20}
    assert [hit.path for hit in hits] == [path for path, _ in expected_hits(items, items.vectors[0], 8, options)]


def test_others_remove_during_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, other, items = Index.create(tmp_path / "index", dim=DIM, model="m"), None, clustered(50)
    index.add(items)
    other = Index.open(tmp_path / "index")
    search, removed = type(index.storage).search, iter([items.paths[:20], items.paths[20:45], items.paths[45:]])

    def removing(*arguments: object) -> list[list[Hit]]:
        results = search(*arguments)
        if (paths := next(removed, None)) is not None:
            other.remove(paths)
        return results

    monkeypatch.setattr(type(index.storage), "search", removing)
    (hits,) = index.search(items.vectors[:1], 50, expand=20, rerank=30)
    assert {hit.path for hit in hits} <= set(items.paths[45:])
    index.add(items)
    removed = iter([items.paths])
    assert index.search(items.vectors[:2], 5, expand=5, rerank=5) == [[], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expand": 0}, "expected expand of at least 1, got 0"),
        ({"augment": -1}, "expected augment of at least 1, got -1"),
        ({"rerank": 1}, "expected rerank of at least 2, got 1"),
    ],
)
def test_wrong_number_is_an_error(options: dict[str, int], message: str) -> None:
    items = random_embeddings(6)
    with pytest.raises(ValueError, match=f"^{message}$"):
        Index.from_embeddings(items).search(items.vectors, 3, **options)


@pytest.mark.parametrize(("name", "most"), [("expand", 6), ("augment", 5), ("rerank", 6)])
def test_more_neighbors_than_items_are_all_of_them(name: str, most: int) -> None:
    items = random_embeddings(6)
    index = Index.from_embeddings(items)
    assert index.search(items.vectors, 3, **{name: 100}) == index.search(items.vectors, 3, **{name: most})


def test_index_of_one_item() -> None:
    items = random_embeddings(1)
    index = Index.from_embeddings(items)
    assert index.search(items.vectors, 3, expand=1)[0][0].path == items.paths[0]
    for name in ("augment", "rerank"):
        with pytest.raises(ValueError, match=f"^{name} needs 2 items or more, the index has 1$"):
            index.search(items.vectors, 3, **{name: 2})
    with pytest.raises(ValueError, match=r"^expand needs 1 item or more, the index has 0$"):
        Index.create(None, dim=DIM).search(items.vectors, 3, expand=1)


def test_too_many_items_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "MAX_AUGMENTED", 5)
    with pytest.raises(ValueError, match=r"^augment is for up to 5 items, .* the index has 6: leave it out"):
        augment(random_embeddings(6), 2)
    monkeypatch.setattr(ranking, "MAX_RERANKED", 4)
    items = random_embeddings(6)
    with pytest.raises(ValueError, match=r"^rerank is for up to 4 items, .* with each other, got 5$"):
        Index.from_embeddings(items).search(items.vectors, 3, rerank=5)
