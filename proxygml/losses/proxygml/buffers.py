"""Memory of large tensors, used again in the next step: fresh memory may take longer than what is done with it."""

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

LARGE = 2**20  # bytes; from about here on memory often comes from the system and goes back to it in every step


class BufferPool:
    """Memory that is lent again once nothing holds what it was lent for, such as a gradient after zero_grad().

    On a GPU torch does so itself.
    """

    def __init__(self) -> None:
        self._spare: deque[np.ndarray] = deque(maxlen=1)

    def empty(self, rows: int, like: Tensor) -> Tensor:
        """A tensor (rows, D) of the type of `like` (P, D), with any values."""
        width, needed = like.shape[1], rows * like.shape[1] * like.element_size()
        if like.device.type != "cpu" or needed < LARGE:
            return like.new_empty(rows, width)
        try:
            memory = self._spare.pop()
            margin = needed // 8  # where it is too small: sparse gradients vary
        except IndexError:
            memory, margin = np.empty(0, np.uint8), 0
        if len(memory) < needed:
            memory = torch.empty(needed + margin, dtype=torch.uint8).numpy()  # which torch aligns
        lent = memory[:needed]
        weakref.finalize(lent, self._spare.append, memory).atexit = False
        return torch.frombuffer(lent, dtype=like.dtype).view(rows, width)

    def __reduce__(self) -> tuple[type["BufferPool"], tuple[()]]:
        """Of a copied or pickled loss the room is empty."""
        return BufferPool, ()
