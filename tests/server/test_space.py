"""What is shown: neighbors, filters, and the paper's subgraph."""

import numpy as np
import pytest

from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbors
from proxygml.server.space import Proxies, Space, shown


def space_of(vectors: np.ndarray, labels: np.ndarray | None = None, **more: object) -> Space:
    labels = np.zeros(len(vectors), int) if labels is None else labels
    return Space("some", Embeddings(vectors, labels, np.arange(len(vectors)).astype(str)), **more)


def test_nearest_others_are_those_that_evaluation_finds() -> None:
    random = np.random.default_rng(0)
    for vectors in (random.normal(size=(300, 8)) + 100, random.normal(size=(60, 3)).astype(np.float16)):
        found, distances = space_of(vectors).nearest_others(np.arange(len(vectors)), 10)
        expected, far = neighbors(vectors, count=10)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(distances, far, rtol=1e-3)


def test_an_image_is_not_its_own_neighbor_even_among_copies() -> None:
    found, distances = space_of(np.ones((50, 4))).nearest_others(np.arange(50), 5)
    assert found.shape == (50, 5)
    assert not (found == np.arange(50)[:, None]).any()
    np.testing.assert_array_equal(distances, 0)


def test_one_image_alone_has_no_neighbors() -> None:
    assert space_of(np.ones((1, 4))).nearest_others(np.array([0]), 24)[0].shape == (1, 0)


def test_unit_vectors_are_compared_by_cosine_and_others_by_distance() -> None:
    angles = np.array([0.0, 0.5, 2.0])
    unit = space_of(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    _, distances = unit.nearest_others(np.array([0]), 2)
    np.testing.assert_allclose(unit.similarity(distances)[0], np.cos(angles[1:]), atol=1e-6)
    other = space_of(np.array([[0.0], [3.0], [10.0]]))
    np.testing.assert_allclose(other.similarity(other.nearest_others(np.array([0]), 2)[1]), [[3, 10]])


def test_a_filter_takes_all_words_of_path_or_class_and_no_case() -> None:
    names = np.array(["Red Fox", "Wolf"])
    paths = np.array(["a/Fox1.jpg", "b/2.jpg", "a/3.jpg"])
    space = Space("some", Embeddings(np.eye(3), np.array([0, 0, 1]), paths, names))
    assert space.matching("fox", None).tolist() == [0, 1]
    assert space.matching("RED a/", None).tolist() == [0]
    assert space.matching("a/", 1).tolist() == [2]
    assert space.matching("", None).tolist() == [0, 1, 2]
    assert space.matching("[", None).tolist() == []


def test_labels_of_any_kind_are_counted_from_zero() -> None:
    space = space_of(np.eye(4), np.array([10**12, -5, 7, -5]))
    assert space.classes.tolist() == [2, 0, 1, 0]
    assert space.class_names == ["-5", "7", str(10**12)]


def test_names_that_are_no_text_can_be_sent() -> None:
    assert shown("caf\udce9/1.jpg").encode() == "caf\ufffd/1.jpg".encode()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_vectors_that_cannot_be_compared_are_refused_with_their_row(bad: float) -> None:
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=r"1 of 3 hold NaN, infinity .* first row 1"):
        space_of(np.array([[0.0], [bad], [1.0]]))


def test_no_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="some holds no vectors"):
        space_of(np.empty((0, 4)))


def subgraph_by_hand(sample: np.ndarray, vectors: np.ndarray, own: int | None, links: int) -> tuple[set, dict]:
    """Eq. 2 to 6 as they stand: the linked proxies, and P of every class that is reached."""
    classes, per_class, _ = vectors.shape
    cosine = {}
    for c in range(classes):
        for n in range(per_class):
            p = vectors[c, n]
            cosine[c * per_class + n] = float(sample @ p / np.linalg.norm(sample) / np.linalg.norm(p))
    ranked = sorted(cosine, key=lambda j: cosine[j] + (100 if j // per_class == own else 0), reverse=True)
    linked = ranked[:links]
    score = {}
    for j in linked:
        score[j // per_class] = score.get(j // per_class, 0) + cosine[j]
    total = sum(np.exp(z) for z in score.values())
    return set(linked), {c: np.exp(z) / total for c, z in score.items()}


@pytest.mark.parametrize("label", [None, 3, 7])
def test_the_subgraph_is_that_of_the_papers_equations(label: int | None) -> None:
    random = np.random.default_rng(1)
    vectors, sample = random.normal(size=(5, 3, 8)).astype(np.float32), random.normal(size=8)
    proxies = Proxies(vectors, tuple("abcde"), np.array([9, 3, 0, 1, 2]), links=6, positive_bonus=4.0)
    found = proxies.subgraph(sample, label)
    own = 1 if label == 3 else None  # label 3 is class 1 of the proxies; nobody has label 7
    linked, shares = subgraph_by_hand(sample, vectors, own, 6)
    assert set(found.linked.tolist()) == linked
    assert found.own_class == own
    assert found.reached.tolist() == sorted(shares)
    np.testing.assert_allclose(found.shares, [shares[c] for c in sorted(shares)], rtol=1e-5)
    if own is not None:
        assert {3, 4, 5} <= linked
