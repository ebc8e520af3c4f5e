"""Lightning Fabric as a recipe asks for it: only training needs it, and importing it takes longer than torch."""

import logging
import os
import warnings
from dataclasses import asdict
from datetime import timedelta

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import SLURMEnvironment
from lightning_fabric.strategies import DDPStrategy

from proxygml.distributed.collectives import require_equal_settings
from proxygml.distributed.launch import ERROR_TOKEN, LostProcessError, start_copies, watch_first_process
from proxygml.files import one_line
from proxygml.memory import keep_freed_memory
from proxygml.training.recipe import Recipe


def start_fabric(recipe: Recipe) -> Fabric:
    """A launched Fabric with the recipe's device, precision, processes and seed; all processes need equal recipes.

    Starts the other processes with this process's command unless torchrun or Slurm has started them.
    """
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", recipe.devices))
    nodes = int(os.environ["WORLD_SIZE"]) // devices if "LOCAL_WORLD_SIZE" in os.environ else recipe.nodes
    world_size = devices * nodes
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # otherwise lines from every process
    strategy: str | DDPStrategy = "auto"
    if world_size > 1:
        if "LOCAL_RANK" not in os.environ and not SLURMEnvironment.detect():
            if nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= os.environ.keys():
                raise ValueError("several nodes need MASTER_ADDR, MASTER_PORT, NODE_RANK, or torchrun: docs/scaling.md")
            start_copies(devices)
        elif ERROR_TOKEN in os.environ and os.environ["LOCAL_RANK"] != "0":
            watch_first_process()
        warnings.filterwarnings("ignore", ".*`broadcast_buffers` is deprecated")  # its successor is too new
        strategy = DDPStrategy(
            broadcast_buffers=False,  # joint batch normalization keeps its statistics equal
            timeout=timedelta(seconds=min(recipe.timeout, 1e9)),  # timedelta overflows
        )
    try:
        fabric = Fabric(
            accelerator=recipe.device,
            devices=devices,
            num_nodes=nodes,
            precision=recipe.precision,
            strategy=strategy,
        )
    except RuntimeError as error:
        raise ValueError(f"device {recipe.device} is not available: use --device cpu or auto") from error
    try:
        fabric.launch()
        if world_size > 1:
            require_equal_settings(asdict(recipe))
    except RuntimeError as error:
        if world_size == 1:
            raise
        raise LostProcessError(
            f"only some of the {world_size} processes connected: one has ended or hangs "
            f"({one_line(error, max_length=100)}). Run the command again"
        ) from error
    if fabric.device.type == "cpu":
        keep_freed_memory()
    fabric.seed_everything(recipe.seed, verbose=False)
    torch.backends.cudnn.benchmark = fabric.device.type == "cuda"  # images have one size
    return fabric
