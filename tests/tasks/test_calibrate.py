"""Thresholds, temperatures and what is measured with them, against loops and scikit-learn."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from proxygml.embeddings import Embeddings
from proxygml.evaluation import neighbors
from proxygml.evaluation.intervals import auroc
from proxygml.retrieval import Index
from proxygml.tasks import calibrate as module
from proxygml.tasks.calibrate import (
    calibrate,
    calibration_error,
    distinct_shares,
    fit_temperature,
    threshold_for,
)
from proxygml.tasks.classify import classify, probabilities
from tests.tasks.conftest import blobs


def test_neighbors_of_other_groups_match_a_loop() -> None:
    items = blobs(4, 5, spread=1.0)
    nearest, distances = neighbors(items.vectors[:7], items.vectors, count=17, groups=(items.labels[:7], items.labels))
    for query in range(7):
        others = np.flatnonzero(items.labels != items.labels[query])
        apart = np.linalg.norm(items.vectors[others].astype(float) - items.vectors[query], axis=1)
        assert nearest[query, :15].tolist() == others[np.argsort(apart)].tolist()
        assert distances[query, :15] == pytest.approx(np.sort(apart))
        assert np.isinf(distances[query, 15:]).all()  # fifteen are of other classes


def test_scores_are_those_of_classify_without_the_image_or_its_class() -> None:
    items = blobs(5, 6, spread=0.5)
    items = replace(items, vectors=items.vectors * np.linspace(1, 3, len(items), dtype=np.float32)[:, None])
    measured = calibrate(items)
    for row in (0, 7, 29):
        for left_out, scores in (
            (np.arange(30) == row, measured.known),
            (items.labels == items.labels[row], measured.unknown),
        ):
            rest = Embeddings(
                *(column[~left_out] for column in (items.vectors, items.labels, items.paths)), items.class_names
            )
            found = classify(Index.from_embeddings(rest), items.vectors[row : row + 1], measured.calibration)[0]
            assert scores[row] == pytest.approx(found.score, abs=1e-5)
            if left_out.sum() == 1:
                assert measured.right[row] == (found.candidates[0].label == items.class_name(items.labels[row]))


def test_threshold_accepts_the_wanted_fraction() -> None:
    scores = np.random.default_rng(0).normal(size=1000)
    for wanted in (0.001, 0.01, 0.2):
        assert np.mean(scores >= threshold_for(scores, wanted)) == wanted
    assert (np.array([1.0, 2, 2, 3]) >= threshold_for(np.array([1.0, 2, 2, 3]), 0.5)).sum() == 1  # a tie is not split


def test_auroc_matches_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    known, unknown = rng.integers(3, 9, 200) / 2, rng.integers(0, 7, 100) / 2
    scores, truth = np.concatenate([known, unknown]), np.repeat([1, 0], [200, 100])
    assert auroc(known, unknown) == pytest.approx(roc_auc_score(truth, scores))


def test_calibration_error_by_hand() -> None:
    probability, right = np.array([0.1, 0.12, 0.9, 0.9]), np.array([False, True, True, True])
    assert calibration_error(probability, right) == pytest.approx((2 * abs(0.11 - 0.5) + 2 * 0.1) / 4)


def test_temperature_is_the_best_of_a_grid() -> None:
    rng = np.random.default_rng(0)
    labels, shares = rng.integers(0, 4, (300, 10)), np.empty((300, 10))
    for row in range(300):
        weights = rng.random(10)
        shares[row] = [weights[labels[row] == label].sum() / weights.sum() for label in labels[row]]
    distinct = distinct_shares(labels, shares)
    assert distinct.sum(axis=1) == pytest.approx(np.ones(300))
    right = rng.random(300) < probabilities(distinct, 0.4).max(axis=1)

    def loss(temperature: float) -> float:
        likely = probabilities(distinct, temperature).max(axis=1)
        return -np.log(np.where(right, likely, 1 - likely)).mean()

    found = fit_temperature(distinct, right)
    assert loss(found) <= min(map(loss, np.geomspace(0.1, 10, 200))) + 1e-6
    assert found == pytest.approx(0.4, rel=0.2)


def test_intervals_contain_the_values() -> None:
    measured = calibrate(blobs(12, 10, spread=0.5), false_accepts=0.1)
    for value, (low, high) in (
        (measured.auroc, measured.auroc_interval),
        (measured.refused, measured.refused_interval),
        (measured.calibration.false_accepts, measured.false_accepts_interval),
    ):
        assert low <= value <= high
    assert measured.auroc_interval[1] - measured.auroc_interval[0] > 0.005


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(30, int), "got 30 labeled images and 1 class with two or more images"),
        (np.arange(30), "got 30 labeled images and 0 classes with two or more images"),
        (np.arange(8) % 2, "got 8 labeled images and 2 classes with two or more images"),
        (np.full(30, -1), "got 0 labeled images and 0 classes with two or more images"),
    ],
)
def test_too_little_data_is_one_line(labels: np.ndarray, message: str) -> None:
    vectors = np.random.default_rng(0).normal(size=(len(labels), 4))
    with pytest.raises(ValueError, match=message):
        calibrate(Embeddings(vectors, labels, np.arange(len(labels)).astype(str)))


def test_many_images_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUERIES", 50)
    assert calibrate(blobs(12, 10)).calibration.images == 50
