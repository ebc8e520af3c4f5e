"""Failures and confusions, compared with evaluation and with loops."""

import numpy as np
import pytest

from proxygml.embeddings import Embeddings
from proxygml.evaluation import evaluate, neighbors
from proxygml.server import failures
from proxygml.server.failures import find_failures, list_confused
from proxygml.server.space import Space


def random_space(count: int = 200, classes: int = 7) -> Space:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, count)
    vectors = rng.normal(size=(classes, 5))[labels] + rng.normal(size=(count, 5))
    return Space("random", Embeddings(vectors, labels, np.arange(count).astype(str)))


def test_recall_and_precision_equal_evaluation() -> None:
    space = random_space()
    failed = find_failures(space, lambda done, total: None)
    scores = evaluate(space.vectors, space.classes, recall_at=(1, 4, 8), cluster=False)
    assert failed.recall_at_1 == pytest.approx(scores.recall[1])
    assert (failed.first_right <= 4).mean() == pytest.approx(scores.recall[4])
    assert 1 - failed.wrong_fraction.mean() == pytest.approx(scores.r_precision, abs=1e-6)


def test_failures_equal_a_loop() -> None:
    space = random_space(60, 4)
    failed = find_failures(space, lambda done, total: None)
    nearest, _ = neighbors(space.vectors, count=59)
    confused: dict[tuple[int, int], int] = {}
    for i in range(60):
        right = [space.classes[j] == space.classes[i] for j in nearest[i]]
        others = sum(right)
        assert failed.first_right[i] == right.index(True) + 1
        assert failed.wrong_fraction[i] == pytest.approx(right[:others].count(False) / others)
        for j in nearest[i, :others]:
            pair = tuple(sorted((int(space.classes[i]), int(space.classes[j]))))
            if pair[0] != pair[1]:
                confused[pair] = confused.get(pair, 0) + 1
    assert {(c.first, c.second): c.count for c in failed.confusions} == confused
    neighbors_of = {c: n * (n - 1) for c, n in enumerate(space.class_sizes)}
    for c in failed.confusions:
        assert c.fraction == pytest.approx(c.count / (neighbors_of[c.first] + neighbors_of[c.second]))
    assert [c.fraction for c in failed.confusions] == sorted((c.fraction for c in failed.confusions), reverse=True)


def test_confused_images_are_as_many_as_counted() -> None:
    space = random_space(60, 4)
    failed = find_failures(space, lambda done, total: None)
    for pair in failed.confusions:
        listed = list_confused(space, failed, pair.first, pair.second)
        assert len(listed) == pair.count
        assert [rank for *_, rank in listed] == sorted(rank for *_, rank in listed)
        for image, wrong, rank in listed:
            assert failed.nearest[image, rank - 1] == wrong
            assert {space.classes[image], space.classes[wrong]} == {pair.first, pair.second}


def test_lone_images_come_last() -> None:
    angles = np.array([0.0, 0.1, 0.2, 3.0, 1.5])  # the last is alone in its class, the fourth far from the others
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    space = Space("five", Embeddings(vectors, np.array([0, 0, 0, 0, 1]), np.arange(5).astype(str)))
    failed = find_failures(space, lambda done, total: None)
    assert failed.first_right.tolist() == [1, 1, 1, 2, 0]
    assert failed.worst_first("rank")[0] == 3
    assert failed.worst_first("rank")[-1] == 4


def test_rank_beyond_the_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "DEPTH", 2)
    line = np.array([[0.0], [1.5], [2.0], [3.0], [40.0]])
    space = Space("line", Embeddings(line, np.array([0, 1, 1, 1, 0]), np.arange(5).astype(str)))
    assert find_failures(space, lambda done, total: None).first_right.tolist() == [3, 1, 1, 1, 3]


def test_one_image_or_class_has_no_confusions() -> None:
    for count in (1, 5):
        space = Space("few", Embeddings(np.eye(count), np.zeros(count, int), np.arange(count).astype(str)))
        failed = find_failures(space, lambda done, total: None)
        assert failed.confusions == []
        assert failed.first_right.tolist() == [int(count > 1)] * count


def test_progress_is_reported_and_can_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "BLOCK", 512)
    progress = []
    find_failures(random_space(1200), lambda done, total: progress.append((done, total)))
    assert progress == [(512, 1200), (1024, 1200), (1200, 1200)]

    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise StopError

    with pytest.raises(StopError):
        find_failures(random_space(1200), stop)
