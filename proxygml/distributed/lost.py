"""One clear error where another process of a run has ended or hangs."""

import atexit
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from lightning_fabric import Fabric

from proxygml.distributed.launch import LostProcessError

# NCCL raises a DistError; gloo raises a plain RuntimeError for a lost peer, so only its text can tell.
CONNECTION_ERROR = re.compile("gloo|nccl|peer|socket|timed out|timeout|connection|distributed", re.I)
SOURCE_LINE = re.compile(r"\[\S*/\S*\] *")  # of gloo's code, at the start of its messages


@contextmanager
def explain_lost_process(fabric: Fabric, position: Callable[[], str], remedy: str) -> Iterator[None]:
    """Turn a lost connection between processes into an error that says where it was lost, and how to continue."""
    try:
        yield
        if fabric.world_size > 1:
            atexit.register(_destroy_process_group)
    except RuntimeError as error:
        if fabric.world_size == 1 or not _is_connection_error(error):
            raise
        if not fabric.is_global_zero:  # the first process reports the error, and may still be waiting for this one
            thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
            thread.start()
            thread.join(1)  # it would block if another process hangs
        reason = SOURCE_LINE.sub("", str(error)).split(". ")[0].splitlines()[0]
        process = f"process {fabric.global_rank} of {fabric.world_size}"
        raise LostProcessError(
            f"{process} lost the connection to the others at {position()}: one has ended or hangs ({reason}). {remedy}"
        ) from error


def _is_connection_error(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or CONNECTION_ERROR.search(str(error)) is not None


def _destroy_process_group() -> None:
    """At exit: gloo threads that outlive the interpreter were seen to abort a finished process."""
    if dist.is_initialized():
        dist.destroy_process_group()
