"""Texts in one block of memory: a million paths are not a million objects."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

TOGETHER = 2**16  # texts that exist at a time while others are made of them


class Names(Sequence[str]):
    """A sequence of texts that can only grow. Equal to any sequence of the same texts."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._block = bytearray()
        self._ends = array("q")  # where each text ends
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        self._block += text.encode("utf-8", "surrogateescape")  # names of files may be no text
        self._ends.append(len(self._block))

    def extend(self, others: "Names") -> None:
        """All texts of another sequence after these."""
        before = len(self._block)
        self._block += others._block
        self._ends.frombytes((np.frombuffer(others._ends, dtype=np.int64) + before).tobytes())

    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """All texts as bytes (B,) one after another, and where each ends (M,): what `unpacked` takes."""
        return np.frombuffer(self._block, dtype=np.uint8), np.frombuffer(self._ends, dtype=np.int64)

    @classmethod
    def unpacked(cls, block: np.ndarray, ends: np.ndarray) -> "Names":
        """What `packed` gave; a ValueError where these are no texts."""
        if block.dtype != np.uint8 or ends.dtype != np.int64 or (np.diff(ends, prepend=0, append=len(block)) < 0).any():
            raise ValueError(f"expected bytes and rising ends of texts, got {block.dtype} and {ends.dtype}")
        if (ends[-1] if len(ends) else 0) != len(block):
            raise ValueError(f"expected texts of {len(block)} bytes, got an end at {ends[-1:]}")
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
        """Those at some places, in the order of these."""
        taken = Names()
        lengths = np.diff(np.frombuffer(self._ends, dtype=np.int64), prepend=0)[indices]
        taken._ends.frombytes(lengths.cumsum(dtype=np.int64).tobytes())
        for start in range(0, len(indices), TOGETHER):
            taken._block += b"".join(map(self._bytes, indices[start : start + TOGETHER].tolist()))
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

    __hash__ = None  # type: ignore[assignment]  # as of any sequence that can grow

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(list(self), dtype=dtype or str)

    def __repr__(self) -> str:
        return f"Names({[self[place] for place in range(min(3, len(self)))]}{', ...' * (len(self) > 3)})"
