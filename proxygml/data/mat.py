"""Files of MATLAB 5, as far as annotations need: numbers, texts, cells and structs.

scipy.io.loadmat reads them too, but ends the whole process where the bytes of a file are damaged in some ways. As in
MATLAB all is an array: numbers and texts (one for each row) come as lists, cells as lists of values, structs as lists
of values by the name of the field; of what is of another kind nothing comes.
"""

import math
import struct
import zlib
from pathlib import Path

import numpy as np

Value = list | dict[str, list]
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}  # by type
TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
MATRIX, COMPRESSED = 14, 15
CELL, STRUCT, CHAR, NUMERIC = 1, 2, 4, range(6, 16)  # classes of arrays
LARGEST = 2**25  # bytes of a file, or of an array that was packed: the annotations of Cars196 have a quarter of that
DEEPEST = 10  # arrays within arrays


def read(path: Path) -> dict[str, Value]:
    """The arrays of a file by name; a ValueError where the bytes are no such file."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    contents = path.read_bytes()
    order = {b"IM": "<", b"MI": ">"}.get(contents[126:128])
    if order is None:
        raise ValueError("it does not begin as a file of MATLAB 5")
    arrays = {}
    for kind, data in _elements(contents[128:], order, padded=False):
        if kind == COMPRESSED:
            (kind, data), *_ = _elements(_unpacked(data), order)
        if kind == MATRIX:
            name, value = _array(data, order, 0)
            arrays[name] = value
    return arrays


def _elements(contents: bytes, order: str, *, padded: bool = True) -> list[tuple[int, bytes]]:
    """Type and bytes of each element; those in an array begin at multiples of eight bytes."""
    found, place = [], 0
    while place < len(contents):
        if place + 8 > len(contents):
            raise ValueError("it ends within an element")
        kind, size = struct.unpack_from(f"{order}II", contents, place)
        start = place + 8
        if kind >> 16:  # up to four bytes stand in the place of their number
            kind, size, start = kind & 0xFFFF, kind >> 16, place + 4
            place = start + 4
        else:
            place = start + (-(-size // 8) * 8 if padded or kind != COMPRESSED else size)
        if start + size > len(contents):
            raise ValueError(f"it ends before {size:,} bytes of an element")
        found.append((kind, contents[start : start + size]))
    return found


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    contents = unpacker.decompress(data, LARGEST)
    if unpacker.unconsumed_tail:
        raise ValueError(f"an array has more than {LARGEST:,} bytes")
    return contents


def _array(contents: bytes, order: str, depth: int) -> tuple[str, Value]:
    """Name and value of an array."""
    if not contents:
        return "", []
    if depth > DEEPEST:
        raise ValueError(f"arrays lie more than {DEEPEST} deep in each other")
    (_, flags), (_, dimensions), (_, letters), *parts = _elements(contents, order)
    shape: list[int] = np.frombuffer(dimensions, f"{order}i4").tolist()
    kind, name = struct.unpack(f"{order}I", flags[:4])[0] & 0xFF, letters.decode("latin-1")
    if kind in NUMERIC and parts:
        return name, _numbers(*parts[0], order)
    if kind == CHAR and parts:
        return name, _texts(*parts[0], order, rows=shape[0])
    if kind == CELL:
        return name, [_array(part, order, depth + 1)[1] for _, part in _as_many(parts, math.prod(shape))]
    if kind == STRUCT:
        (_, longest), (_, names), *parts = parts
        (width,) = struct.unpack(f"{order}I", longest)
        padded = [names[place : place + width] for place in range(0, len(names), max(1, width))]
        fields = [each.partition(b"\0")[0].decode("latin-1") for each in padded]
        values = [_array(part, order, depth + 1)[1] for _, part in _as_many(parts, math.prod(shape) * len(fields))]
        return name, {field: values[place :: len(fields)] for place, field in enumerate(fields)}
    return name, []


def _as_many(parts: list[tuple[int, bytes]], expected: int) -> list[tuple[int, bytes]]:
    if len(parts) != expected or any(kind != MATRIX for kind, _ in parts):
        raise ValueError(f"an array says that it has {expected:,} parts, and has {len(parts):,}")
    return parts


def _numbers(kind: int, data: bytes, order: str) -> list[float]:
    if kind not in NUMBERS:
        raise ValueError(f"numbers are of the unknown type {kind}")
    return np.frombuffer(data, f"{order}{NUMBERS[kind]}").tolist()


def _texts(kind: int, data: bytes, order: str, *, rows: int) -> list[str]:
    """A text for each row; their letters stand column by column."""
    if kind not in TEXTS:
        raise ValueError(f"texts are of the unknown type {kind}")
    coding = TEXTS[kind] + ({"<": "-le", ">": "-be"}[order] if "utf-16" in TEXTS[kind] or "32" in TEXTS[kind] else "")
    letters = data.decode(coding)
    return [letters[row::rows] for row in range(rows)] if letters and 0 < rows <= len(letters) else []
