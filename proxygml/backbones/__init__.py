"""Networks by name: `build("convnet", embedding_dim=128)` gives an Embedder.

It scales pixels as its Trunk wants them, runs the Trunk's stages, pools their maps and applies a last layer.
"""

import importlib
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones.trunk import Trunk
from proxygml.backbones.weights import load_weights as load_weights

Pooling = Literal["average", "max", "average+max"]


class PixelScaling(nn.Module):
    """Images (B, 3, H, W) in RGB, 0..255 -> as a trunk was trained on them.

    It is part of the network, so that whoever holds one cannot feed it wrongly.
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
    """Images (B, 3, H, W) in RGB, 0..255 -> embeddings (B, D), of unit length unless `normalise` is off.

    `normalise_features` puts batch normalization before the last layer. Instead of images it takes their
    `features`, stacked: (B, 2, F).
    """

    def __init__(
        self,
        trunk: Trunk,
        embedding_dim: int,
        *,
        pooling: Pooling = "average",
        normalise: bool = True,
        normalise_features: bool = False,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.head: nn.Module = nn.Linear(trunk.channels, embedding_dim)
        if normalise_features:
            self.head = nn.Sequential(nn.BatchNorm1d(trunk.channels), self.head)
        self.pooling = pooling
        self.normalise = normalise
        self.scale_pixels = PixelScaling(trunk)
        # Convolutions on a CPU take about 2/3 of the time.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its types lack this form

    def forward(self, images: Tensor) -> Tensor:
        average, highest = images.unbind(1) if images.ndim == 3 else self.features(images)  # (B, F) each
        pooled = {"average": average, "max": highest, "average+max": average + highest}[self.pooling]
        embeddings = self.head(pooled)  # (B, D)
        return F.normalize(embeddings, dim=-1) if self.normalise else embeddings

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and maximum of each of the trunk's maps: images (B, 3, H, W) -> (B, F) each."""
        maps = self.trunk(self.scale_pixels(images))  # (B, F, h, w)
        return maps.mean(dim=(2, 3)), maps.amax(dim=(2, 3))


BACKBONES = {  # name: module, class, its arguments
    "convnet": ("convnet", "ConvNet", ()),
    "bn-inception": ("bninception", "BNInception", ()),
    "googlenet": ("googlenet", "GoogLeNet", ()),
    "resnet18": ("resnet", "ResNet", (18,)),
    "resnet50": ("resnet", "ResNet", (50,)),
    "efficientnet-lite0": ("efficientnet_lite", "EfficientNetLite", (0,)),
    "efficientnet-lite1": ("efficientnet_lite", "EfficientNetLite", (1,)),
    "efficientnet-lite2": ("efficientnet_lite", "EfficientNetLite", (2,)),
}


def build(
    name: str,
    *,
    embedding_dim: int,
    pooling: Pooling = "average",
    normalise: bool = True,
    normalise_features: bool = False,
) -> Embedder:
    """The Embedder on a trunk: see `build_trunk`."""
    trunk = build_trunk(name)
    return Embedder(trunk, embedding_dim, pooling=pooling, normalise=normalise, normalise_features=normalise_features)


def build_trunk(name: str) -> Trunk:
    """One of BACKBONES with random weights, or hf:NAME_OR_FOLDER with its own."""
    if name.startswith("hf:"):
        from proxygml.backbones.hub import Hub

        return Hub(name)
    if name not in BACKBONES:
        raise ValueError(f"expected a backbone among {', '.join(BACKBONES)} or hf:NAME_OR_FOLDER, got {name!r}")
    module, network, arguments = BACKBONES[name]
    return getattr(importlib.import_module(f"proxygml.backbones.{module}"), network)(*arguments)


def pretrained_file(trunk: Trunk) -> Path:
    """The published ImageNet weights of a trunk: in their registry package, in this folder, or in torch's cache."""
    packaged = getattr(trunk, "packaged_weights", None)
    if packaged is not None:
        return packaged()
    name = getattr(trunk, "published_file", None)
    if name is None:
        raise ValueError(f"there are no published weights for {type(trunk).__name__}: train it from random ones")
    for folder in (Path(), Path(torch.hub.get_dir()) / "checkpoints"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(
        f"no {name} in this folder or in {torch.hub.get_dir()}/checkpoints: {trunk.weights_from} (--weights PATH)"
    )
