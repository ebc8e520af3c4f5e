"""Strings in one block of memory, so that a million paths take little more than their characters.

numpy's StringDType cannot hold file names that are not UTF-8 and can be saved only with pickle.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np


class Names(Sequence[str]):
    """An append-only sequence of strings, equal to any sequence of the same strings."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._block = bytearray()
        self._ends = array("q")  # of each string in the block
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        self._block += text.encode("utf-8", "surrogateescape")  # file names need not be UTF-8
        self._ends.append(len(self._block))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> "Names": ...

    def __getitem__(self, index: int | slice) -> "str | Names":
        place = range(len(self))[index]
        if isinstance(place, range):
            return Names(map(self.__getitem__, place))
        start = self._ends[place - 1] if place else 0
        return self._block[start : self._ends[place]].decode("utf-8", "surrogateescape")

    def take(self, indices: np.ndarray) -> "Names":
        """The strings at these indices."""
        return Names(map(self.__getitem__, indices))

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Names):
            return self._ends == other._ends and self._block == other._block
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(own == theirs for own, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(list(self), dtype=dtype or str)

    def __repr__(self) -> str:
        return f"Names({[self[place] for place in range(min(3, len(self)))]}{', ...' * (len(self) > 3)})"
