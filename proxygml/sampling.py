"""Which images make up each batch of an epoch."""

import numpy as np


def shuffled(images: int, batch_size: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Every image once, in an order that (seed, epoch) decides; the last batch may be smaller, but holds two or more.

    A single image left over would have no batch statistics, so it joins the batch before it.
    """
    order = np.random.default_rng((seed, epoch)).permutation(images)
    cuts = list(range(batch_size, images, batch_size))
    if cuts and images - cuts[-1] == 1:
        cuts.pop()
    return np.split(order, cuts)
