"""Intervals that contain the true value as often as they say."""

import numpy as np
import pytest

from proxygml.evaluation import evaluate
from proxygml.evaluation.intervals import auroc, auroc_interval, difference_interval, fraction_interval


def test_it_covers_the_true_difference_about_19_times_in_20() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        baseline, hits = rng.random((2, 300)) < [[0.5], [0.6]]
        _, low, high = difference_interval(hits, baseline)
        covered += low <= 0.1 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_equal_hits_do_not_differ() -> None:
    hits = np.array([True, False, True])
    assert difference_interval(hits, hits) == (0, 0, 0)


def test_queries_are_paired() -> None:
    baseline = np.arange(1000) < 500
    hits = baseline | (np.arange(1000) >= 980)  # 20 more found, none lost
    difference, low, _ = difference_interval(hits, baseline)
    assert difference == pytest.approx(0.02)
    assert low > 0.01  # unpaired, the standard error alone is 0.022


def test_other_numbers_of_queries_are_an_error() -> None:
    with pytest.raises(ValueError, match="got 3 and 2"):
        difference_interval(np.zeros(3, bool), np.zeros(2, bool))


def test_hits_are_in_the_order_of_the_images() -> None:
    vectors = np.array([[0.0], [10], [0.1], [11], [4]])
    labels = np.array([0, 1, 0, 0, 1])
    hits = evaluate(vectors, labels, recall_at=(1,), cluster=False).hits
    assert hits.tolist() == [True, False, True, False, False]
    found = evaluate(vectors[:2], labels[:2], gallery=vectors[2:], gallery_labels=labels[2:], recall_at=(1,)).hits
    assert found.tolist() == [True, False]


@pytest.mark.parametrize("classes", [3, 10, 40])
def test_fraction_covers_images_that_come_in_classes(classes: int) -> None:
    rng, numbers, covered = np.random.default_rng(0), np.repeat(np.arange(classes), 20), 0
    for _ in range(400):
        rates = rng.beta(0.5, 4.5, classes)  # of each class; 0.1 on average
        low, high = fraction_interval(rng.random(len(numbers)) < rates[numbers], numbers)
        covered += low <= 0.1 <= high
    assert covered / 400 >= 0.9


def test_no_hits_in_few_classes_say_little() -> None:
    def high(classes: int) -> float:
        return fraction_interval(np.zeros(60, bool), np.arange(60) % classes)[1]

    assert high(2) > 0.9
    assert high(60) == pytest.approx(1 - 0.025 ** (1 / 60))  # Clopper and Pearson's, of independent images
    assert fraction_interval(np.ones(60, bool), np.arange(60) % 20)[1] == 1


@pytest.mark.parametrize("classes", [4, 30])
def test_auroc_covers_images_that_come_in_classes(classes: int) -> None:
    rng, numbers, covered = np.random.default_rng(0), np.repeat(np.arange(classes), 10), 0
    for _ in range(300):
        unknown = rng.normal(size=classes)[numbers] + rng.normal(size=len(numbers))
        known = 1 + rng.normal(size=classes)[numbers] + rng.normal(size=len(numbers))
        low, high = auroc_interval(known, unknown, numbers)
        covered += low <= 0.6915 <= high  # the normal distribution at 1 / 2
    assert covered / 300 >= 0.9
    assert low <= auroc(known, unknown) <= high
