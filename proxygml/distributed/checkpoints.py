"""Sharded checkpoints: each process writes the rows of its classes; any number of processes can read them.

One safetensors file per writing process.
"""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from proxygml.files import file_checksum


def save_shards(folder: Path, tensors: dict[str, Tensor], classes: int) -> None:
    """Write tensors (classes here, ...) to a folder; all processes must call it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is enough
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        checkpoint.save(_as_global(tensors, classes), storage_writer=writer, no_dist=not dist.is_initialized())


def checksums(folder: Path) -> dict[str, int]:
    """Checksum by name of each file from `save_shards`: safetensors have none."""
    return {path.name: file_checksum(path) for path in sorted(folder.glob("*.safetensors"))}


def load_shards(folder: Path, tensors: dict[str, Tensor], classes: int, expected: dict[str, int]) -> None:
    """Fill tensors (classes here, ...) from files with these checksums, whatever the number of writers."""
    actual = checksums(folder)
    remedy = f"remove {folder.parent / 'last.pt'} to continue from the epoch before"
    if actual.keys() != expected.keys():
        raise ValueError(f"expected {len(expected)} files of proxies in {folder}, got {len(actual)}: {remedy}")
    altered = [name for name in expected if actual[name] != expected[name]]
    if altered:
        raise ValueError(f"{folder / altered[0]} is damaged: {remedy}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(folder))
            checkpoint.load(_as_global(tensors, classes), storage_reader=reader, no_dist=not dist.is_initialized())
    except (SafetensorError, checkpoint.CheckpointException) as error:
        raise ValueError(f"{folder} is damaged: {str(error).splitlines()[-1]}") from error


def _as_global(tensors: dict[str, Tensor], classes: int) -> dict[str, Tensor]:
    """The same memory as shards of DTensors (classes, ...)."""
    if not dist.is_initialized():
        return tensors
    mesh = init_device_mesh(next(iter(tensors.values())).device.type, (dist.get_world_size(),))
    tensors_of_all: dict[str, Tensor] = {}
    for name, here in tensors.items():
        shape = torch.Size((classes, *here.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        tensors_of_all[name] = DTensor.from_local(here, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return tensors_of_all
