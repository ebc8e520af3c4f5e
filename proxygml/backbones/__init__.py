"""Networks by name: `build("convnet", embedding_dim=128)` gives an Embedder.

A trunk is a module from normalised images (B, 3, H, W) to maps (B, channels, h, w) that says `channels`, how its
pixels are scaled (`pixel_mean` and `pixel_std` on the scale 0..255, `bgr`), and which `stages` it runs in turn, each by
`stage(name, maps)` and with the modules `modules_of(name)`, so that stages can be tapped or frozen.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pooling = Literal["average", "max", "average+max"]


class Embedder(nn.Module):
    """Images (B, 3, H, W) in RGB, 0..255 -> embeddings (B, D), of unit length unless `normalise` is off.

    Pixels are scaled here, as the trunk was trained, so that whoever holds the network cannot feed it wrongly.
    """

    def __init__(
        self, trunk: nn.Module, embedding_dim: int, *, pooling: Pooling = "average", normalise: bool = True
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.channels, embedding_dim)
        self.pooling = pooling
        self.normalise = normalise
        for name in ("pixel_mean", "pixel_std"):
            self.register_buffer(name, torch.tensor(getattr(trunk, name))[:, None, None], persistent=False)  # (3, 1, 1)
        self.to(memory_format=torch.channels_last)  # convolutions on a CPU take about 2/3 of the time

    def forward(self, images: Tensor) -> Tensor:
        if self.trunk.bgr:
            images = images.flip(1)
        maps = self.trunk((images - self.pixel_mean) / self.pixel_std)  # (B, F, h, w)
        embeddings = self.head(self.pool(maps))  # (B, D)
        return F.normalize(embeddings, dim=-1) if self.normalise else embeddings

    def pool(self, maps: Tensor) -> Tensor:
        """Maps (B, F, h, w) -> features (B, F)."""
        average, highest = maps.mean(dim=(2, 3)), maps.amax(dim=(2, 3))  # (B, F) each
        return {"average": average, "max": highest, "average+max": average + highest}[self.pooling]


def build(name: str, *, embedding_dim: int, pooling: Pooling = "average", normalise: bool = True) -> Embedder:
    """The Embedder on the trunk of this name, with random weights."""
    from proxygml.backbones.convnet import ConvNet

    trunks = {"convnet": ConvNet}
    if name not in trunks:
        raise ValueError(f"expected a backbone among {', '.join(trunks)}, got {name!r}")
    return Embedder(trunks[name](), embedding_dim, pooling=pooling, normalise=normalise)
