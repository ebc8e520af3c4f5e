"""Tensors of which each process has the rows of its classes: written together, read by any number of processes.

In safetensors files, one for each process that wrote them.
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


def save_shards(folder: Path, tensors: dict[str, Tensor], classes: int) -> None:
    """Write tensors (classes here, ...), by all processes, to a folder; a process that is alone has all classes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is enough
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        checkpoint.save(_of_all(tensors, classes), storage_writer=writer, no_dist=not dist.is_initialized())


def load_shards(folder: Path, tensors: dict[str, Tensor], classes: int, written_by: int) -> None:
    """Fill tensors (classes here, ...) with what so many processes wrote, however many there are now."""
    files = len(list(folder.glob("*.safetensors")))
    if files != written_by:
        raise ValueError(f"expected {written_by} files of proxies in {folder}, got {files}: restore the others")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(folder))
            checkpoint.load(_of_all(tensors, classes), storage_reader=reader, no_dist=not dist.is_initialized())
    except (SafetensorError, checkpoint.CheckpointException) as error:
        raise ValueError(f"{folder} is damaged: {str(error).splitlines()[-1]}") from error


def _of_all(tensors: dict[str, Tensor], classes: int) -> dict[str, Tensor]:
    """The same memory, as parts of tensors (classes, ...)."""
    if not dist.is_initialized():
        return tensors
    mesh = init_device_mesh(next(iter(tensors.values())).device.type, (dist.get_world_size(),))
    of_all: dict[str, Tensor] = {}
    for name, here in tensors.items():
        shape = torch.Size((classes, *here.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        of_all[name] = DTensor.from_local(here, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return of_all
