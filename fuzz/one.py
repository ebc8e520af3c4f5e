"""Fuzz one reader with atheris, in its own process: `python -m fuzz.one NAME FOLDER [options of libFuzzer]`.

__main__.py starts it. Each new complaint is written to FOLDER/complaints.json at once, with its input beside it.
libFuzzer ends the process if an input takes too long or too much memory.
"""

import importlib
import json
import os
import re
import sys
import tempfile
import zlib
from pathlib import Path

import atheris

# Whole packages are instrumented, and torch, numpy and scipy would take minutes: of them only what parses bytes is.
with atheris.instrument_imports(include=["zipfile", "tarfile", "csv", "PIL"]):
    import csv  # noqa: F401
    import tarfile  # noqa: F401
    import zipfile  # noqa: F401

    import PIL.Image

    PIL.Image.init()  # imports its formats
import scipy.io  # noqa: F401
import torch._weights_only_unpickler
from numpy.lib import _format_impl

with atheris.instrument_imports(include=["proxygml"]):
    from fuzz.readers import READERS, complaint
    from proxygml.data import DATASETS

    for dataset in READERS.keys() & DATASETS:  # otherwise they would be imported when first read, which is too late
        importlib.import_module(f"proxygml.data.{dataset}")

atheris.instrument_func(torch._weights_only_unpickler.Unpickler.load)
atheris.instrument_func(_format_impl._read_array_header)


def main(name: str, folder: Path, options: list[str]) -> None:
    reader = READERS[name]
    inputs = folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(reader.seeds()):
        (inputs / f"seed-{number}").write_bytes(seed)
    known: dict[str, str] = {}  # kind of complaint -> what was said
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    place = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-", dir=memory))
    os.environ["PROXYGML_CACHE"] = str(place / "cache")

    def test(given: bytes) -> None:
        said = complaint(reader, given, place)
        if said is None:
            return
        kind = re.sub(r"[0-9]+|'.*?'|\".*?\"", "", said)[:100]
        if kind not in known:
            (folder / f"complaint-{zlib.crc32(kind.encode()):08x}").write_bytes(given)
            known[kind] = said
            (folder / "complaints.json").write_text(json.dumps(list(known.values()), indent=1))

    atheris.Setup([sys.argv[0], str(inputs), f"-artifact_prefix={folder}/", *options], test)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
