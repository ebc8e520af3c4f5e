"""Lightning Fabric as a recipe asks for it: only training needs it, and importing it takes longer than torch."""

from dataclasses import asdict

from lightning_fabric import Fabric

from proxygml.distributed.fabric import launch_fabric
from proxygml.training.recipe import Recipe


def start_fabric(recipe: Recipe) -> Fabric:
    """Device, precision and processes, with the recipe's seed set."""
    return launch_fabric(
        device=recipe.device,
        devices=recipe.devices,
        nodes=recipe.nodes,
        precision=recipe.precision,
        seed=recipe.seed,
        timeout=recipe.timeout,
        settings=asdict(recipe),
    )
