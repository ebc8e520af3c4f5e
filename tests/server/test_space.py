"""The space: neighbors, filters, and the subgraph of the paper."""

from contextlib import nullcontext

import numpy as np
import pytest
from fastapi import HTTPException

from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbors
from proxygml.server.responses import Responses
from proxygml.server.space import Proxies, Space, valid_text


def make_space(vectors: np.ndarray, labels: np.ndarray | None = None, **more: object) -> Space:
    labels = np.zeros(len(vectors), int) if labels is None else labels
    return Space("some", Embeddings(vectors, labels, np.arange(len(vectors)).astype(str)), **more)


def test_neighbors_equal_evaluation() -> None:
    rng = np.random.default_rng(0)
    for vectors in (rng.normal(size=(300, 8)) + 100, rng.normal(size=(60, 3)).astype(np.float16)):
        nearest, distances = make_space(vectors).nearest_others(np.arange(len(vectors)), 10)
        expected, expected_distances = neighbors(vectors, count=10)
        np.testing.assert_array_equal(nearest, expected)
        np.testing.assert_allclose(distances, expected_distances, rtol=1e-3)


def test_image_is_not_its_own_neighbor_among_copies() -> None:
    nearest, distances = make_space(np.ones((50, 4))).nearest_others(np.arange(50), 5)
    assert nearest.shape == (50, 5)
    assert not (nearest == np.arange(50)[:, None]).any()
    np.testing.assert_array_equal(distances, 0)


def test_single_image_has_no_neighbors() -> None:
    assert make_space(np.ones((1, 4))).nearest_others(np.array([0]), 24)[0].shape == (1, 0)


def test_hits_have_cosines_and_distances() -> None:
    angles = np.array([0.0, 0.5, 2.0])
    unit = make_space(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    for length in (0.1, 1, 40):  # of an upload
        (hits,) = unit.search(length * unit.vectors[:1], 3)
        np.testing.assert_allclose([hit.similarity for hit in hits], np.cos(angles))
    other = make_space(np.array([[0.0], [3.0], [10.0]]))
    (hits,) = other.search(other.vectors[1:2], 2)
    assert [(hit.id, hit.path, hit.label, hit.distance) for hit in hits] == [(1, "1", "0", 0), (0, "0", "0", 3)]
    assert [other.find(item)[1].tolist() for item in (1, "1")] == [[3], [3]]
    assert [other.find(item) for item in (3, -1, "3")] == [None] * 3


def test_filter_matches_words_of_path_and_class() -> None:
    names = np.array(["Red Fox", "Wolf"])
    paths = np.array(["a/Fox1.jpg", "b/2.jpg", "a/3.jpg"])
    space = Space("some", Embeddings(np.eye(3), np.array([0, 0, 1]), paths, names))
    assert space.matching("fox", None).tolist() == [0, 1]
    assert space.matching("RED a/", None).tolist() == [0]
    assert space.matching("a/", 1).tolist() == [2]
    assert space.matching("", None).tolist() == [0, 1, 2]
    assert space.matching("[", None).tolist() == []


def test_classes_are_numbered_from_zero() -> None:
    space = make_space(np.eye(4), np.array([10**12, -5, 7, -5]))
    assert space.classes.tolist() == [2, 0, 1, 0]
    assert space.class_names == ["-5", "7", str(10**12)]


def test_invalid_unicode_is_replaced() -> None:
    assert valid_text("caf\udce9/1.jpg").encode() == "caf\ufffd/1.jpg".encode()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_invalid_vectors_are_rejected(bad: float) -> None:
    with (
        np.errstate(over="ignore"),
        pytest.raises(ValueError, match="1 of 3 are not, first row 1"),
    ):
        make_space(np.array([[0.0], [bad], [1.0]]))


def test_no_vectors_are_rejected() -> None:
    with pytest.raises(ValueError, match="some has no vectors"):
        make_space(np.empty((0, 4)))


def subgraph_in_loops(sample: np.ndarray, vectors: np.ndarray, own: int | None, links: int) -> tuple[set, dict]:
    """Eq. 2 to 6: the linked proxies, and P of every active class."""
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
def test_subgraph_equals_loops(label: int | None) -> None:
    rng = np.random.default_rng(1)
    vectors, sample = rng.normal(size=(5, 3, 8)).astype(np.float32), rng.normal(size=8)
    proxies = Proxies(vectors, tuple("abcde"), np.array([9, 3, 0, 1, 2]), links=6, positive_bonus=4.0)
    subgraph = proxies.subgraph(sample, label)
    own = 1 if label == 3 else None  # label 3 is class 1 of the proxies; no class has label 7
    linked, probabilities = subgraph_in_loops(sample, vectors, own, 6)
    assert set(subgraph.linked.tolist()) == linked
    assert subgraph.own_class == own
    assert subgraph.active_classes.tolist() == sorted(probabilities)
    np.testing.assert_allclose(subgraph.probabilities, [probabilities[c] for c in sorted(probabilities)], rtol=1e-5)
    if own is not None:
        assert {3, 4, 5} <= linked


@pytest.mark.parametrize(("labels", "reason"), [([-1] * 3, "3 of 3"), ([0, -1, 0], "1 of 3"), ([0, 1, 0], "")])
def test_without_labels_nothing_is_right_or_wrong(labels: list[int], reason: str) -> None:
    space = make_space(np.eye(3), np.array(labels))
    responses = Responses(space, "")
    assert space.no_errors == (f"{reason} images without a label" if reason else "")
    assert ("no label" in responses.about()["classes"]) == bool(reason)
    with pytest.raises(HTTPException, match=reason) if reason else nullcontext():
        responses.start("failures")
    responses.failures.wait()
    assert responses.failures.state == ("idle" if reason else "done")
    assert responses.about()["no_errors"] == space.no_errors
