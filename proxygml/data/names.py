"""Strings in one block of memory, so that a million paths take little more than their characters.

numpy's StringDType cannot hold file names that are not UTF-8 and can be saved only with pickle.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

CHUNK = 2**16  # Python strings that exist at a time during a conversion


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

    def extend(self, others: "Names") -> None:
        """Append all strings of another sequence."""
        before = len(self._block)
        self._block += others._block
        self._ends.frombytes((np.frombuffer(others._ends, dtype=np.int64) + before).tobytes())

    def to_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The characters as bytes (B,) and the end of each string (M,)."""
        return np.frombuffer(self._block, dtype=np.uint8), np.frombuffer(self._ends, dtype=np.int64)

    @classmethod
    def from_arrays(cls, block: np.ndarray, ends: np.ndarray) -> "Names":
        """The inverse of `to_arrays`; a ValueError for other arrays."""
        if block.dtype != np.uint8 or ends.dtype != np.int64 or (np.diff(ends, prepend=0, append=len(block)) < 0).any():
            raise ValueError(f"expected bytes and increasing ends of strings, got {block.dtype} and {ends.dtype}")
        if (ends[-1] if len(ends) else 0) != len(block):
            raise ValueError(f"expected strings of {len(block)} bytes, got an end at {ends[-1:]}")
        names = cls()
        names._block += block.tobytes()
        names._ends.frombytes(ends.tobytes())
        return names

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> "Names": ...

    def __getitem__(self, index: int | slice) -> "str | Names":
        places = range(len(self))
        if isinstance(index, slice):
            return self.take(np.array(places[index], dtype=np.int64))
        return self._bytes(places[index]).decode("utf-8", "surrogateescape")

    def take(self, indices: np.ndarray) -> "Names":
        """The strings at these indices."""
        taken = Names()
        lengths = np.diff(np.frombuffer(self._ends, dtype=np.int64), prepend=0)[indices]
        taken._ends.frombytes(lengths.cumsum(dtype=np.int64).tobytes())
        for start in range(0, len(indices), CHUNK):
            taken._block += b"".join(map(self._bytes, indices[start : start + CHUNK].tolist()))
        return taken

    def _bytes(self, place: int) -> bytes:
        return bytes(self._block[self._ends[place - 1] if place else 0 : self._ends[place]])

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
