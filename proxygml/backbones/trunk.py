"""The base class of all backbones: images to feature maps, in named stages that can be tapped or frozen."""

from pathlib import Path

import torch
from torch import Tensor, nn

IMAGENET_MEAN = (123.675, 116.28, 103.53)  # RGB, on the scale 0..255
IMAGENET_STD = (58.395, 57.12, 57.375)


class Trunk(nn.Module):
    """Normalized images (B, 3, H, W) -> feature maps (B, channels, h, w), through `stages` in order."""

    channels: int
    stages: tuple[str, ...]
    stage_channels: dict[str, int]  # channels after each stage
    pixel_mean: tuple[float, ...] = IMAGENET_MEAN
    pixel_std: tuple[float, ...] = IMAGENET_STD
    bgr: bool = False
    classifier: tuple[str, ...] = ()  # prefixes of classifier weights, which `load_weights` drops
    is_pretrained: bool = False  # whether a new trunk has its published weights already
    pools: bool = False  # whether it returns features (B, channels) instead of maps
    published_file: str | None = None  # name of the published ImageNet weights
    weights_from: str = "pass the path of a .pth, .pt or .safetensors file"  # ends an error about missing weights

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for name in self.stages:
            x = self.stage(name, x)
        return x

    def stage(self, name: str, x: Tensor) -> Tensor:
        """Run one stage: (B, channels before, h, w) -> (B, stage_channels[name], h', w')."""
        for module in self.stage_modules(name):
            x = module(x)
        return x

    def stage_modules(self, name: str) -> list[nn.Module]:
        """The modules of one stage, in forward order."""
        return [self.get_submodule(name)]

    def pretrained_file(self) -> Path:
        """Path of the published ImageNet weights, in the working directory or in torch's cache."""
        if self.published_file is None:
            raise ValueError(f"{type(self).__name__} has no published weights: train it from random ones")
        cache = Path(torch.hub.get_dir()) / "checkpoints"
        for folder in (Path(), cache):
            if (folder / self.published_file).is_file():
                return folder / self.published_file
        missing = f"no {self.published_file} in the working directory or in {cache}"
        raise FileNotFoundError(f"{missing}: {self.weights_from} (to train: --weights PATH)")
