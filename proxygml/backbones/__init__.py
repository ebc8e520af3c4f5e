"""Networks by name: `Embedder(build_trunk("convnet"), 128)` turns images into vectors.

To add a backbone, write a subclass of `Trunk` in a module of this package and list it in BACKBONES.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones.trunk import Trunk
from proxygml.backbones.weights import load_weights
from proxygml.files import unknown_name

Pooling = Literal["average", "max", "average+max"]


class PixelScaling(nn.Module):
    """Images (B, 3, H, W) in RGB, 0..255 -> normalized as in the trunk's training, in its channel order.

    It is part of the network, so that callers cannot forget it.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.bgr = trunk.bgr
        for name in ("pixel_mean", "pixel_std"):
            self.register_buffer(name, torch.tensor(getattr(trunk, name))[:, None, None], persistent=False)  # (3, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        images = images.flip(1) if self.bgr else images
        return (images - self.pixel_mean) / self.pixel_std


class Embedder(nn.Module):
    """Images (B, 3, H, W) in RGB, 0..255 -> embeddings (B, D): pixel scaling, trunk, pooling, head.

    The head is a linear layer or, with embedding_dim None, none. Embeddings have unit length if `normalize` is true.
    `normalize_features` puts batch normalization before the linear layer. Instead of images, it accepts stacked
    `features` of images: (B, 2, F).
    """

    def __init__(
        self,
        trunk: Trunk,
        embedding_dim: int | None,
        *,
        pooling: Pooling = "average",
        normalize: bool = True,
        normalize_features: bool = False,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.head: nn.Module = nn.Linear(trunk.channels, embedding_dim) if embedding_dim else nn.Identity()
        if normalize_features:
            self.head = nn.Sequential(nn.BatchNorm1d(trunk.channels), self.head)
        self.pooling: Pooling = "average" if trunk.pools else pooling
        self.normalize = normalize
        self.scale_pixels = PixelScaling(trunk)
        # Cuts the time of convolutions on a CPU by a third.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in the stubs

    def forward(self, images: Tensor) -> Tensor:
        mean, maximum = images.unbind(1) if images.ndim == 3 else self.features(images)  # (B, F) each
        pooled = {"average": mean, "max": maximum, "average+max": mean + maximum}[self.pooling]
        embeddings = self.head(pooled)  # (B, D)
        return F.normalize(embeddings, dim=-1) if self.normalize else embeddings

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and maximum of each feature map of the trunk: (B, 3, H, W) -> (B, F), (B, F)."""
        maps = self.trunk(self.scale_pixels(images))  # (B, F, h, w), or (B, F) from a trunk that pools
        if self.trunk.pools:
            return maps, maps
        return maps.mean(dim=(2, 3)), maps.amax(dim=(2, 3))


BACKBONES = {  # name: module, class, arguments
    "convnet": ("convnet", "ConvNet", ()),
    "bn-inception": ("inception", "BNInception", ()),
    "googlenet": ("inception", "GoogLeNet", ()),
    "resnet18": ("resnet", "ResNet", (18,)),
    "resnet50": ("resnet", "ResNet", (50,)),
    "efficientnet-lite0": ("efficientnet_lite", "EfficientNetLite", (0,)),
    "efficientnet-lite1": ("efficientnet_lite", "EfficientNetLite", (1,)),
    "efficientnet-lite2": ("efficientnet_lite", "EfficientNetLite", (2,)),
}


def build_trunk(name: str, config_folder: Path | None = None) -> Trunk:
    """One of BACKBONES with random weights, or hf:NAME_OR_FOLDER with its pretrained weights.

    `config_folder` builds an hf: trunk without a download, with random weights.
    """
    if name.startswith("hf:"):
        from proxygml.backbones.transformers import TransformersTrunk

        return TransformersTrunk(name, config_folder)
    if name not in BACKBONES:
        raise unknown_name("a backbone", name, [*BACKBONES, "hf:NAME_OR_FOLDER"])
    module, network, arguments = BACKBONES[name]
    return getattr(importlib.import_module(f"proxygml.backbones.{module}"), network)(*arguments)


def init_head(head: nn.Module) -> None:
    """Kaiming initialization of the linear layers of a head, in place of torch's uniform default."""
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
            nn.init.zeros_(layer.bias)


def freeze_stages(trunk: Trunk, stages: Sequence[str]) -> None:
    """Turn off the gradients of some stages of a trunk."""
    unknown = sorted(set(stages) - set(trunk.stages))
    if unknown:
        raise ValueError(
            f"no stage {', '.join(unknown)} to freeze in {type(trunk).__name__}: "
            f"choose from {', '.join(trunk.stages)}, or none with --frozen alone"
        )
    for name in stages:
        for module in trunk.stage_modules(name):
            module.requires_grad_(False)


def load_pretrained(trunk: Trunk, weights: str) -> str:
    """Load weights, a path or "pretrained", into a trunk; returns a one-line summary."""
    if weights == "pretrained" and trunk.is_pretrained:
        return "those of the hub model"
    path = trunk.pretrained_file() if weights == "pretrained" else Path(weights)
    loaded = load_weights(trunk, path)
    missing, unexpected = (f": {names[0]}, ..." if names else "" for names in (loaded.missing, loaded.unexpected))
    return (
        f"{len(loaded.loaded)} tensors from {path}, "
        f"{len(loaded.missing)} missing{missing}, {len(loaded.unexpected)} unexpected{unexpected}"
    )
