"""Labels of every kind through the package: the right answer, or an error of one line."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from proxygml import ProxyGMLEmbedding, ProxyGMLLoss, losses
from proxygml.data import sampling
from proxygml.embeddings import Embeddings
from proxygml.evaluation import evaluate
from proxygml.retrieval import Index

VECTORS = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
PLAIN = np.arange(40) % 5
ODD = {  # by which numbers the five classes are known; floats of 24 or of 53 bits would merge some; -1 is none
    "negative": np.array([-6, -5, -4, -3, -2]),
    "gaps": np.array([0, 7, 1000, 2**31, 2**40]),
    "above 2**24": 2**24 + np.arange(5),
    "above 2**53": 2**53 + np.arange(5),
    "extremes": np.array([-(2**63), -2, 0, 1, 2**63 - 1]),
    "unsigned": np.array([0, 1, 2**32, 2**62, 2**63 - 1], np.uint64),
    "bytes": np.array([0, 1, 2, 254, 255], np.uint8),
}
all_odd = pytest.mark.parametrize("numbers", ODD.values(), ids=ODD)


@all_odd
def test_scores_do_not_depend_on_what_classes_are_called(numbers: np.ndarray) -> None:
    expected = evaluate(VECTORS, PLAIN)
    assert evaluate(VECTORS, numbers[PLAIN]) == expected
    found = evaluate(VECTORS, numbers[PLAIN], gallery=VECTORS, gallery_labels=numbers[PLAIN], cluster=False)
    assert found == evaluate(VECTORS, PLAIN, gallery=VECTORS, gallery_labels=PLAIN, cluster=False)


@all_odd
def test_an_index_keeps_classes_apart(numbers: np.ndarray) -> None:
    index = Index.from_embeddings(Embeddings(VECTORS, numbers[PLAIN], np.arange(40).astype(str)))
    found = [hits[0].label for hits in index.search(VECTORS, 1)]
    assert found == [str(label) for label in numbers[PLAIN].tolist()]


@all_odd
@pytest.mark.slow
def test_estimator_ignores_class_names(numbers: np.ndarray) -> None:
    def fitted(labels: np.ndarray) -> ProxyGMLEmbedding:
        return ProxyGMLEmbedding(random_state=0, epochs=2).fit(VECTORS, labels)

    space = fitted(numbers[PLAIN])
    assert np.array_equal(space.transform(VECTORS), fitted(PLAIN).transform(VECTORS))
    assert space.classes_.tolist() == sorted(numbers.tolist())


@all_odd
@pytest.mark.parametrize(
    "draw",
    [
        lambda labels: sampling.balanced(labels, 8, 2, seed=0, epoch=1),
        lambda labels: sampling.two_streams(labels, 8, 2, seed=0, epoch=1),
        lambda labels: sampling.neighboring(labels, 8, 2, np.eye(5), seed=0, epoch=1),
    ],
    ids=["balanced", "two streams", "neighboring"],
)
def test_batches_are_the_same_whatever_classes_are_called(draw: Callable, numbers: np.ndarray) -> None:
    for drawn, expected in zip(draw(numbers[PLAIN]), draw(PLAIN), strict=True):
        assert np.array_equal(drawn, expected)


def test_classes_that_have_no_distances_are_refused() -> None:
    with pytest.raises(ValueError, match="distances between the 5 classes with images"):
        sampling.neighboring(PLAIN, 8, 2, np.eye(6), seed=0, epoch=0)


def test_names_are_labels_where_they_may_be() -> None:
    names = np.array(["owl", "tit", "jay", "emu", "ibis"])[PLAIN]
    space = ProxyGMLEmbedding(random_state=0, epochs=1).fit(VECTORS, names)
    assert space.classes_.tolist() == sorted(set(names))
    with pytest.raises(ValueError, match=r"expected labels of shape \(40,\), integers, got <U4"):
        evaluate(VECTORS, names)
    with pytest.raises(ValueError, match=r"expected integer labels \(M,\), got <U4"):
        Embeddings(VECTORS, names, names)


def test_fractions_are_no_labels() -> None:
    for whole in (PLAIN.astype(np.float64), PLAIN + 0.5):
        with pytest.raises(ValueError, match="integers, got float64"):
            evaluate(VECTORS, whole)
        with pytest.raises(ValueError, match="expected integer labels"):
            Embeddings(VECTORS, whole, whole.astype(str))
        with pytest.raises(ValueError, match=r"expected integer labels, got torch\.float64"):
            ProxyGMLLoss(5, 8, ratio=0.5)(torch.from_numpy(VECTORS), torch.from_numpy(whole))
    with pytest.raises(ValueError, match="continuous"):
        ProxyGMLEmbedding().fit(VECTORS, PLAIN + 0.5)


def test_too_large_unsigned_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected labels below 2\*\*63"):
        evaluate(VECTORS, PLAIN.astype(np.uint64) + 2**63)


def test_partial_fit_rejects_labels_of_another_type() -> None:
    space = ProxyGMLEmbedding(random_state=0).partial_fit(VECTORS, PLAIN + 2**53)
    for other in (PLAIN.astype(float), PLAIN.astype(str)):
        with pytest.raises(ValueError, match="expected labels of type int64 as before"):
            space.partial_fit(VECTORS, other)
    space.partial_fit(VECTORS, PLAIN.astype(np.uint8))
    assert len(space.classes_) == 10


@pytest.mark.parametrize("name", [name for name in losses.METHODS if name != "hdml"])  # which asks for a network first
def test_a_loss_refuses_labels_of_no_class(name: str) -> None:
    settings = {"ratio": 0.5} if name.startswith("proxygml") else {}
    loss = losses.make(name, 5, 8, settings)
    for wrong in (-1, 5, 2**40, -(2**63)):
        labels = torch.from_numpy(np.where(PLAIN == 0, wrong, PLAIN))
        with pytest.raises(ValueError, match=r"expected labels in 0\.\.4"):
            loss(torch.from_numpy(VECTORS), labels)


@pytest.mark.slow
def test_more_than_2_to_24_classes_stay_distinct() -> None:
    classes = 2**24 + 4  # above 2**24 float32 knows every second whole number only
    settings = {"proxies_per_class": 1, "links": 1, "proxy_weight": 0, "mask_softmax": False}
    with pytest.warns(UserWarning, match="no negative is linked"):  # so that the own proxies alone have a gradient
        loss = ProxyGMLLoss(classes, 1, sparse_gradient=True, **settings)
    labels = torch.tensor([2**24 + 1, 2**24 + 3, 0])
    loss(torch.ones(3, 1), labels).backward()
    assert loss.proxies.grad._indices()[0].tolist() == sorted(labels.tolist())
