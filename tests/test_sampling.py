"""Which images make up each batch."""

import numpy as np
import pytest

from proxygml.sampling import shuffled


@pytest.mark.parametrize(("images", "batch_size"), [(10, 3), (9, 3), (2, 5), (10, 10), (65, 32)])
def test_every_image_comes_once_and_no_batch_is_a_single_image(images: int, batch_size: int) -> None:
    batches = shuffled(images, batch_size, seed=1, epoch=4)
    assert sorted(np.concatenate(batches).tolist()) == list(range(images))
    assert min(map(len, batches)) >= 2
    assert max(map(len, batches)) <= batch_size + 1


def test_the_papers_last_batches_are_kept() -> None:
    for images, last in [(8054, 22), (5864, 8), (59551, 31)]:
        assert len(shuffled(images, 32, seed=0, epoch=0)[-1]) == last


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return shuffled(100, 10, seed=seed, epoch=epoch)[0].tolist()

    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(*at)) for at in [(0, 0), (0, 1), (1, 0), (1, 1)]}) == 4
