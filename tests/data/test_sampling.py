"""Batches of image indices."""

import numpy as np
import pytest

from proxygml.data.sampling import balanced, neighboring, shuffled, two_streams


@pytest.mark.parametrize(("images", "batch_size"), [(10, 3), (9, 3), (2, 5), (10, 10), (65, 32)])
def test_shuffled_has_every_image_once(images: int, batch_size: int) -> None:
    batches = shuffled(images, batch_size, seed=1, epoch=4)
    assert sorted(np.concatenate(batches).tolist()) == list(range(images))
    assert min(map(len, batches)) >= 2
    assert max(map(len, batches)) <= batch_size + 1


def test_size_of_the_last_batch() -> None:
    for images, last in [(8054, 22), (5864, 8), (59551, 31)]:
        assert len(shuffled(images, 32, seed=0, epoch=0)[-1]) == last


def test_shuffled_depends_on_seed_and_epoch() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return shuffled(100, 10, seed=seed, epoch=epoch)[0].tolist()

    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(*at)) for at in [(0, 0), (0, 1), (1, 0), (1, 1)]}) == 4


LABELS = np.repeat(np.arange(20), 1 + np.arange(20) % 9)  # classes of one to nine images


class TestBalanced:
    def test_images_per_class(self) -> None:
        batches = balanced(LABELS, 32, 4, seed=0, epoch=0)
        for batch in batches:
            classes, counts = np.unique(LABELS[batch], return_counts=True)
            assert len(classes) == 8
            assert set(counts) == {4}
        assert len(batches) == -(-len(LABELS) // 32)

    def test_images_repeat_only_in_small_classes(self) -> None:
        sizes = np.bincount(LABELS)
        for batch in balanced(LABELS, 32, 4, seed=0, epoch=1):
            images, counts = np.unique(batch, return_counts=True)
            assert (counts[sizes[LABELS[images]] >= 4] == 1).all()

    def test_classes_are_equally_frequent(self) -> None:
        labels = np.repeat(np.arange(12), 50)
        often = np.bincount(np.concatenate([labels[batch] for batch in balanced(labels, 20, 4, seed=3, epoch=0)])) / 4
        assert often.max() - often.min() <= 1

    def test_depends_on_seed_and_epoch(self) -> None:
        def first(seed: int, epoch: int) -> tuple[int, ...]:
            return tuple(balanced(LABELS, 16, 2, seed=seed, epoch=epoch)[0].tolist())

        assert first(0, 0) == first(0, 0)
        assert len({first(*at) for at in [(0, 0), (0, 1), (1, 0), (1, 1)]}) == 4

    def test_few_classes(self) -> None:
        assert {len(batch) for batch in balanced(np.array([0, 0, 0, 1, 1]), 32, 4, seed=0, epoch=0)} == {8}

    def test_batch_too_small_for_two_classes(self) -> None:
        with pytest.raises(ValueError, match="two classes of 5 images each to fit in a batch of 8: raise batch_size"):
            balanced(LABELS, 8, 5, seed=0, epoch=0)


class TestNeighboring:
    def test_batch_has_nearest_classes(self) -> None:
        labels = np.repeat(np.arange(16), 6)
        places = np.random.default_rng(0).permutation(16)
        distances = np.abs(places[:, None] - places[None, :]).astype(float)  # classes on a line
        for batch in neighboring(labels, 8, 2, distances, seed=0, epoch=0):
            classes = np.unique(labels[batch])
            assert len(classes) == 4
            assert np.ptp(places[classes]) <= 5  # one class with its three nearest

    def test_overlapping_groups_are_filled(self) -> None:
        labels = np.repeat(np.arange(9), 4)
        batches = neighboring(labels, 16, 2, np.zeros((9, 9)), seed=0, epoch=0)
        assert {len(np.unique(labels[batch])) for batch in batches} == {8}
        assert {len(batch) for batch in batches} == {16}


class TestTwoStreams:
    def test_batch_begins_with_balanced_images(self) -> None:
        labels = np.repeat(np.arange(10), 13)
        for batch in two_streams(labels, 32, 4, seed=0, epoch=2):
            assert len(batch) == 32
            assert set(np.unique(labels[batch[:24]], return_counts=True)[1]) == {4}

    def test_streams_continue_across_epochs(self) -> None:
        labels = np.repeat(np.arange(10), 13)  # 5 batches an epoch; the second stream has 16 of eight images
        second = [batch[24:] for epoch in range(4) for batch in two_streams(labels, 32, 4, seed=0, epoch=epoch)]
        assert len(np.unique(np.concatenate(second[:13]))) == 8 * 13  # 6 and 13 have no common divisor
        assert len(second) == 20

    def test_combinations_are_new(self) -> None:
        labels = np.repeat(np.arange(6), 8)
        met = set()
        new = []
        for epoch in range(6):
            before = len(met)
            for batch in two_streams(labels, 16, 4, seed=0, epoch=epoch):
                met |= {(int(a), int(b)) for a in batch[:12] for b in batch[12:]}
            new.append(len(met) - before)
        assert min(new) > 0

    def test_few_classes_make_smaller_batches(self) -> None:
        labels = np.repeat(np.arange(3), 13)
        for batch in two_streams(labels, 32, 4, seed=0, epoch=0):
            assert len(batch) == 16
            assert list(np.unique(labels[batch[:12]], return_counts=True)[1]) == [4, 4, 4]
