"""Reused memory for large gradients: mapping fresh memory can take longer than filling it."""

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

LARGE = 2**20  # bytes; larger allocations often go back to the system in every step


class BufferPool:
    """Memory that is reused once its last tensor is freed, such as a gradient after zero_grad(); on a CPU only."""

    def __init__(self) -> None:
        self._spare: deque[np.ndarray] = deque(maxlen=1)

    def empty(self, rows: int, like: Tensor) -> Tensor:
        """An uninitialized tensor (rows, D) with the dtype of `like` (P, D)."""
        width, needed = like.shape[1], rows * like.shape[1] * like.element_size()
        if like.device.type != "cpu" or needed < LARGE:
            return like.new_empty(rows, width)
        try:
            memory = self._spare.pop()
            margin = needed // 8  # sizes of sparse gradients vary
        except IndexError:
            memory, margin = np.empty(0, np.uint8), 0
        if len(memory) < needed:
            memory = torch.empty(needed + margin, dtype=torch.uint8).numpy()  # aligned by torch
        view = memory[:needed]
        weakref.finalize(view, self._spare.append, memory).atexit = False
        return torch.frombuffer(view, dtype=like.dtype).view(rows, width)

    def __reduce__(self) -> tuple[type["BufferPool"], tuple[()]]:
        """A copied or unpickled pool is empty."""
        return BufferPool, ()
