"""Photos and a pretrained network, both tiny."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from proxygml.backbones import build_trunk
from proxygml.training.recipe import Recipe


def tiny_photos(folder: Path, classes: int) -> Recipe:
    """A recipe for four gray photos of each class, written to a folder, and a network with weights in a file."""
    for number in range(classes):
        for copy in range(4):
            random = np.random.default_rng((number, copy))
            pixels = np.clip(240 / classes * number + random.normal(0, 30, (40, 48, 3)), 0, 255).astype(np.uint8)
            path = folder / "photos" / f"class{number}" / f"{copy}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    torch.manual_seed(1)
    torch.save(build_trunk("convnet").state_dict(), folder / "weights.pth")
    return Recipe(
        dataset="folder",
        data=str(folder / "photos"),
        image_size=32,
        weights=str(folder / "weights.pth"),
        embedding_dim=8,
        proxies_per_class=2,
        batch_size=8,
        held_out=0.0,
        baselines=False,
    )
