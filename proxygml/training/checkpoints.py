"""Checkpoints of a run: `last.pt` to continue from, and `model.safetensors` with the weights to use."""

import errno
import hashlib
import json
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from proxygml.backbones.pickles import check_pickles
from proxygml.files import UnwritableError, one_line, parse_json, require_file, verify_checksum, with_checksum

PARTS = ("model", "loss")  # whose tensors a weights file contains, under these prefixes


def save_checkpoint(state: dict, path: Path) -> None:
    """Write tensors and plain values to `path`."""
    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch does not pass on the system's error
        raise _unwritable(path) from error


def load_checkpoint(path: Path) -> dict:
    """The state from `save_checkpoint`; a truncated or altered file is a ValueError."""
    with _as_value_error(path), require_file(path).open("rb") as file:
        check_pickles(file)
        with zipfile.ZipFile(file) as archive:
            altered = archive.testzip()  # compares the checksum of every record
        if altered is not None:
            raise ValueError(f"{altered} is altered")
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"{path} is no checkpoint: expected values by name, got {type(state).__name__}")
    return state


def save_weights(state: dict, path: Path) -> None:
    """Write the state dicts `model` and `loss` as safetensors, with `epoch`, `class_names` and a checksum."""
    tensors = {
        f"{part}.{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)  # may share memory
        for part in PARTS
        for name, tensor in state[part].items()
    }
    values = with_checksum({name: value for name, value in state.items() if name not in PARTS})
    try:
        save_file(tensors, path, {"tensors": _checksum(tensors), "values": json.dumps(values)})
    except SafetensorError as error:
        raise _unwritable(path) from error


def load_weights(path: Path) -> dict:
    """The state from `save_weights`; a truncated or altered file is a ValueError."""
    with _as_value_error(path), safe_open(require_file(path), "pt") as file:
        checksum, values = _read_metadata(file)
        # Copies: those that the library returns stay mapped to the file, and crash if somebody truncates it.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 # no mapping
        if checksum != _checksum(tensors):
            raise ValueError("its tensors are altered")
    for part in PARTS:
        values[part] = {
            name.removeprefix(f"{part}."): each for name, each in tensors.items() if name.startswith(f"{part}.")
        }
    return values


def weights_checksum(path: Path) -> str:
    """The checksum in a file of `save_weights`: that of its tensors, whenever they were written."""
    with _as_value_error(path), safe_open(require_file(path), "pt") as file:
        return _read_metadata(file)[0]


def _read_metadata(file: safe_open) -> tuple[str, dict]:
    """The checksum of the tensors, and the values."""
    metadata = file.metadata() or {}
    if metadata.keys() != {"tensors", "values"}:
        raise ValueError("expected the weights of a run, got another safetensors file")
    values = parse_json(metadata["values"])
    if not isinstance(values, dict) or not {"epoch", "class_names"} <= values.keys():
        raise ValueError("it lacks the epoch or the class names")
    return metadata["tensors"], verify_checksum(values)


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _unwritable(path: Path) -> UnwritableError:
    free = shutil.disk_usage(path.parent).free / 2**20
    return UnwritableError(f"could not write a checkpoint to {path.parent}, which has {free:.1f} MB left")


@contextmanager
def _as_value_error(path: Path) -> Iterator[None]:
    """Turn errors while reading a checkpoint into a ValueError with its path."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} contains more than weights and plain values: not opened") from error
    except Exception as error:  # zipfile, torch and safetensors raise many types; EINVAL for a wrong offset
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        raise ValueError(f"{path} is damaged: {one_line(error, max_length=120)}") from error
