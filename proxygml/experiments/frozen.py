"""Makes maps of photos once with the first stages of a pretrained network, so that a run takes minutes on a CPU."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from proxygml import backbones, ingredients
from proxygml.backbones.trunk import Trunk
from proxygml.datasets import ImageList, maps
from proxygml.recipes import Recipe
from proxygml.sessions import Progress

BATCH = 64


def make_maps(recipe: Recipe, first_stage: str, folder: Path, progress: Progress) -> None:
    """Write to `folder` what the stages before `first_stage` make of the recipe's images and of their mirror images."""
    trunk = backbones.build_trunk(recipe.backbone)
    backbones.load_weights(trunk, backbones.pretrained_file(trunk))
    early = trunk.stages[: trunk.stages.index(first_stage)]
    for part, images in zip(maps.PARTS, ingredients.load_images(recipe), strict=True):
        if not (folder / f"{part}.npz").exists():

            def told(done: int, total: int, part: str = part) -> None:
                progress(f"maps of {part} images", done, total, "")

            maps.save(folder / f"{part}.npz", images, _maps(trunk.eval(), early, recipe, images, told))


@torch.no_grad()
def _maps(
    trunk: Trunk, early: tuple[str, ...], recipe: Recipe, images: ImageList, progress: Callable[[int, int], None]
) -> np.ndarray:
    """Half-precision maps (M, 2, F, h, w) of centre crops and their mirror images."""
    scale = backbones.PixelScaling(trunk)
    crops = ingredients.test_crops(recipe, images)
    made = []
    for start in range(0, len(images), BATCH):
        batch = torch.from_numpy(np.stack([crops[index][0] for index in range(start, min(start + BATCH, len(images)))]))
        both = []
        for view in (batch, batch.flip(-1)):
            seen = scale(view).contiguous(memory_format=torch.channels_last)
            for name in early:
                seen = trunk.stage(name, seen)
            both.append(seen)
        made.append(torch.stack(both, dim=1).half().numpy())  # (B, 2, F, h, w)
        progress(start + len(batch), len(images))
    return np.concatenate(made)
