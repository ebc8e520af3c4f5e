"""Refuse pickles that take far more memory or time than their size suggests, before torch reads them.

`torch.load(weights_only=True)` runs no code, but it allocates what a file asks for: 173 bytes took 2 GB.
"""

import io
import os
import pickletools
import re
import zipfile
from collections.abc import Iterable
from pickle import UnpicklingError
from typing import Any, BinaryIO

GLOBALS = re.compile(  # what tensors and plain values are pickled with; others that torch allows can allocate gigabytes
    r"collections OrderedDict|_codecs encode|torch (\w+Storage|Size|device|[a-z]+[0-9]*)"
    r"|torch\._utils _rebuild_(tensor(_v2)?|parameter)|torch\.nn\.parameter Parameter"
)
MAX_SHARED, MAX_DEPTH = 10**7, 500  # repeated values and nesting of a pickle: hashing pairs of pairs takes forever


def check_pickles(file: BinaryIO) -> None:
    """Raise an error for a file that `torch.load` could spend far more memory or time on than its size suggests."""
    size, pickles = file.seek(0, os.SEEK_END), [file] * 5  # formats before torch 1.6: five pickles, then the tensors
    file.seek(0)
    if file.read(4) == b"PK\3\4":
        with zipfile.ZipFile(file) as archive:
            if sum(member.file_size for member in archive.infolist()) > size:  # torch.save does not compress
                raise ValueError(f"it has {size:,} bytes and unpacks to more: it is not opened")
            names = [name for name in archive.namelist() if name.lower().endswith(".pkl")]
            pickles = [io.BytesIO(archive.read(name)) for name in names]
    else:
        file.seek(0)
    for pickled in pickles:
        _check_pickle(pickled)


def _check_pickle(pickled: BinaryIO) -> None:
    stack: list[tuple[int, int]] = []  # values in each object and how deep they are nested, (0, 0) for a mark
    memo: dict[int, tuple[int, int]] = {}
    shared = 0
    operations: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]] = pickletools.genops(pickled)
    for opcode, argument, _ in operations:
        if opcode.name == "GLOBAL" and not GLOBALS.fullmatch(argument):
            raise UnpicklingError(f"it contains {argument}, which weights never need")
        if opcode.name.endswith("GET"):
            stack.append(memo[argument])
            shared += stack[-1][0]
        elif opcode.name.endswith("PUT"):
            memo[argument] = stack[-1]
        elif opcode.name == "MARK":
            stack.append((0, 0))
        else:
            count = len(opcode.stack_before)
            parts: list[tuple[int, int]] = []
            if pickletools.stackslice in opcode.stack_before:  # all values after the last mark
                count -= 2
                parts += iter(stack.pop, (0, 0))
            parts += [stack.pop() for _ in range(count)]
            depth = 1 + max((depth for _, depth in parts), default=0)
            if shared > MAX_SHARED or depth > MAX_DEPTH:
                raise UnpicklingError("it is nested too deeply, or repeats parts of itself without end")
            stack += [(1 + sum(values for values, _ in parts), depth)] * len(opcode.stack_after)
