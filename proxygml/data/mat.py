"""Read little-endian MATLAB 5 files with annotations: numbers, strings, cells and structs.

Written here because some damaged files make scipy.io.loadmat crash the process. Everything is an array, as in MATLAB:
numbers and strings (one per row) are lists, cells are lists of values, structs are dicts of lists of values. Other
kinds of arrays are empty lists.
"""

import math
import struct
import zlib
from pathlib import Path

import numpy as np

Value = list | dict[str, list]
NUMBER_TYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
ENCODINGS = {1: "latin-1", 2: "latin-1", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le", 18: "utf-32-le"}
MATRIX, COMPRESSED = 14, 15
CELL, STRUCT, CHAR, NUMERIC = 1, 2, 4, range(6, 16)  # classes of arrays
MAX_BYTES = 2**24  # of a file, and of its arrays when decompressed: twice the annotations of Cars196
MAX_DEPTH = 10  # of nested arrays


def read(path: Path) -> dict[str, Value]:
    """The arrays of a file by name; a ValueError if it is damaged or another kind of file."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    contents, left = path.read_bytes(), MAX_BYTES
    if contents[126:128] != b"IM":
        raise ValueError("it does not begin like a little-endian MATLAB 5 file")
    arrays = {}
    for kind, data in _elements(contents[128:], padded=False):
        if kind == COMPRESSED:
            data = _decompress(data, left)
            left -= len(data)
            (kind, data), *_ = _elements(data)
        if kind == MATRIX:
            name, value = _array(data, 0)
            arrays[name] = value
    return arrays


def _elements(contents: bytes, *, padded: bool = True) -> list[tuple[int, bytes]]:
    """Type and bytes of each element; inside an array, elements are padded to eight bytes."""
    elements, place = [], 0
    while place < len(contents):
        if place + 8 > len(contents):
            raise ValueError("it ends within an element")
        kind, size = struct.unpack_from("<II", contents, place)
        start = place + 8
        if kind >> 16:  # a small element: up to four bytes in place of the size
            kind, size, start = kind & 0xFFFF, kind >> 16, place + 4
            place = start + 4
        else:
            place = start + (-(-size // 8) * 8 if padded or kind != COMPRESSED else size)
        if start + size > len(contents):
            raise ValueError(f"it ends before {size:,} bytes of an element")
        elements.append((kind, contents[start : start + size]))
    return elements


def _decompress(data: bytes, max_bytes: int) -> bytes:
    decompressor = zlib.decompressobj()
    contents = decompressor.decompress(data, max_bytes + 1)
    if len(contents) > max_bytes:
        raise ValueError(f"its arrays have more than {MAX_BYTES:,} bytes")
    return contents


def _array(contents: bytes, depth: int) -> tuple[str, Value]:
    """Name and value of an array."""
    if not contents:
        return "", []
    if depth > MAX_DEPTH:
        raise ValueError(f"arrays are nested more than {MAX_DEPTH} deep")
    (_, flags), (_, dimensions), (_, letters), *parts = _elements(contents)
    shape: list[int] = np.frombuffer(dimensions, "<i4").tolist()
    kind, name = struct.unpack("<I", flags[:4])[0] & 0xFF, letters.decode("latin-1")
    if kind in NUMERIC and parts:
        return name, _numbers(*parts[0])
    if kind == CHAR and parts:
        return name, _strings(*parts[0], rows=shape[0])
    if kind == CELL:
        return name, [_array(part, depth + 1)[1] for _, part in _check_count(parts, math.prod(shape))]
    if kind == STRUCT:
        (_, longest), (_, names), *parts = parts
        (width,) = struct.unpack("<I", longest)
        padded = [names[place : place + width] for place in range(0, len(names), max(1, width))]
        fields = [each.partition(b"\0")[0].decode("latin-1") for each in padded]
        values = [_array(part, depth + 1)[1] for _, part in _check_count(parts, math.prod(shape) * len(fields))]
        return name, {field: values[place :: len(fields)] for place, field in enumerate(fields)}
    return name, []


def _check_count(parts: list[tuple[int, bytes]], expected: int) -> list[tuple[int, bytes]]:
    if len(parts) != expected or any(kind != MATRIX for kind, _ in parts):
        raise ValueError(f"an array has {len(parts):,} parts, expected {expected:,}")
    return parts


def _numbers(kind: int, data: bytes) -> list[float]:
    if kind not in NUMBER_TYPES:
        raise ValueError(f"numbers have the unknown type {kind}")
    return np.frombuffer(data, NUMBER_TYPES[kind]).tolist()


def _strings(kind: int, data: bytes, *, rows: int) -> list[str]:
    """A string for each row; characters are stored column by column."""
    if kind not in ENCODINGS:
        raise ValueError(f"strings have the unknown type {kind}")
    letters = data.decode(ENCODINGS[kind])
    return [letters[row::rows] for row in range(rows)] if letters and 0 < rows <= len(letters) else []
