"""Which images are found badly, and which classes are taken for each other."""

import numpy as np
import pytest

from proxygml.embeddings import Embeddings
from proxygml.evaluation import evaluate, neighbors
from proxygml.server import failures
from proxygml.server.failures import find_failures, mistaken
from proxygml.server.space import Space


def random_space(count: int = 200, classes: int = 7) -> Space:
    random = np.random.default_rng(0)
    labels = random.integers(0, classes, count)
    vectors = random.normal(size=(classes, 5))[labels] + random.normal(size=(count, 5))
    return Space("random", Embeddings(vectors, labels, np.arange(count).astype(str)))


def test_recall_and_precision_are_those_of_evaluation() -> None:
    space = random_space()
    found = find_failures(space, lambda done, total: None)
    scores = evaluate(space.vectors, space.classes, recall_at=(1, 4, 8), cluster=False)
    assert found.recall_at_1 == pytest.approx(scores.recall[1])
    assert (found.first_right <= 4).mean() == pytest.approx(scores.recall[4])
    assert 1 - found.wrong_share.mean() == pytest.approx(scores.r_precision, abs=1e-6)


def test_every_image_is_judged_as_a_loop_judges_it() -> None:
    space = random_space(60, 4)
    found = find_failures(space, lambda done, total: None)
    nearest, _ = neighbors(space.vectors, count=59)
    mixed: dict[tuple[int, int], int] = {}
    for i in range(60):
        right = [space.classes[j] == space.classes[i] for j in nearest[i]]
        others = sum(right)
        assert found.first_right[i] == right.index(True) + 1
        assert found.wrong_share[i] == pytest.approx(right[:others].count(False) / others)
        for j in nearest[i, :others]:
            pair = tuple(sorted((int(space.classes[i]), int(space.classes[j]))))
            if pair[0] != pair[1]:
                mixed[pair] = mixed.get(pair, 0) + 1
    assert {(c.first, c.second): c.count for c in found.confusions} == mixed
    slots = {c: n * (n - 1) for c, n in enumerate(space.class_sizes)}
    for c in found.confusions:
        assert c.share == pytest.approx(c.count / (slots[c.first] + slots[c.second]))
    assert [c.share for c in found.confusions] == sorted((c.share for c in found.confusions), reverse=True)


def test_the_mistakes_of_a_pair_are_as_many_as_were_counted() -> None:
    space = random_space(60, 4)
    found = find_failures(space, lambda done, total: None)
    for pair in found.confusions:
        listed = mistaken(space, found, pair.first, pair.second)
        assert len(listed) == pair.count
        assert [rank for *_, rank in listed] == sorted(rank for *_, rank in listed)
        for image, wrong, rank in listed:
            assert found.nearest[image, rank - 1] == wrong
            assert {space.classes[image], space.classes[wrong]} == {pair.first, pair.second}


def test_the_worst_come_first_and_lone_images_last() -> None:
    angles = np.array([0.0, 0.1, 0.2, 3.0, 1.5])  # the last is alone in its class, the fourth far from its own
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    space = Space("five", Embeddings(vectors, np.array([0, 0, 0, 0, 1]), np.arange(5).astype(str)))
    found = find_failures(space, lambda done, total: None)
    assert found.first_right.tolist() == [1, 1, 1, 2, 0]
    assert found.worst("rank")[0] == 3
    assert found.worst("rank")[-1] == 4


def test_an_image_beyond_the_depth_is_known_to_be_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "DEPTH", 2)
    line = np.array([[0.0], [1.5], [2.0], [3.0], [40.0]])
    space = Space("line", Embeddings(line, np.array([0, 1, 1, 1, 0]), np.arange(5).astype(str)))
    assert find_failures(space, lambda done, total: None).first_right.tolist() == [3, 1, 1, 1, 3]


def test_one_image_and_one_class_have_no_confusions() -> None:
    for count in (1, 5):
        space = Space("few", Embeddings(np.eye(count), np.zeros(count, int), np.arange(count).astype(str)))
        found = find_failures(space, lambda done, total: None)
        assert found.confusions == []
        assert found.first_right.tolist() == [int(count > 1)] * count


def test_it_tells_how_far_it_is_and_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "BLOCK", 512)
    told = []
    find_failures(random_space(1200), lambda done, total: told.append((done, total)))
    assert told == [(512, 1200), (1024, 1200), (1200, 1200)]

    class EnoughError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        find_failures(random_space(1200), stop)
