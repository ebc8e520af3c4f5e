"""GoogLeNet (Szegedy et al. 2015) without batch normalization: the "G" trunk of the paper's Table 2 and of HDC.

Layers have Caffe's names with "/" written as "_" (inception_3a_1x1, conv2_3x3_reduce, ...), the names of BVLC's model
ported to PyTorch by MMdnn. torchvision's googlenet is a different network (batch normalization, 3x3 instead of 5x5, no
local response normalization), so its weights do not fit.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.backbones.inception import Inception, halve


class Block(NamedTuple):
    """Output channels of the convolutions of a block: a row of Szegedy et al., Table 1."""

    conv1x1: int
    reduce3x3: int
    conv3x3: int
    reduce5x5: int
    conv5x5: int
    pool_proj: int


BLOCKS = {
    "3a": Block(64, 96, 128, 16, 32, 32),
    "3b": Block(128, 128, 192, 32, 96, 64),
    "4a": Block(192, 96, 208, 16, 48, 64),
    "4b": Block(160, 112, 224, 24, 64, 64),
    "4c": Block(128, 128, 256, 24, 64, 64),
    "4d": Block(112, 144, 288, 32, 64, 64),
    "4e": Block(256, 160, 320, 32, 128, 128),
    "5a": Block(256, 160, 320, 32, 128, 128),
    "5b": Block(384, 192, 384, 48, 128, 128),
}
POOL_FIRST = ("4a", "5a")  # blocks preceded by max pooling


class GoogLeNet(Inception):
    """Images (B, 3, H, W) in BGR -> feature maps (B, 1024, H/32, W/32); HDC taps the stages 4a, 4d and 5b."""

    pixel_mean = (104.0, 117.0, 123.0)
    batch_norm = False
    stages = ("stem", *BLOCKS)
    classifier = ("loss1_", "loss2_", "loss3_")
    published_file = "googlenet.pth"
    weights_from = (
        "pretrained GoogLeNet is BVLC's Caffe model (bvlc_googlenet) ported to PyTorch with Caffe's layer names, "
        "'/' written as '_' (googlenet.pth, made with MMdnn); torchvision's googlenet has batch normalization and does "
        "not fit. Pass the path of the file as the weights"
    )

    def __init__(self) -> None:
        super().__init__()
        channels = self.stage_channels["stem"]
        for name, block in BLOCKS.items():
            prefix = f"inception_{name}"
            self.add_conv(f"{prefix}_1x1", channels, block.conv1x1, kernel=1)
            self.add_conv(f"{prefix}_3x3_reduce", channels, block.reduce3x3, kernel=1)
            self.add_conv(f"{prefix}_3x3", block.reduce3x3, block.conv3x3, kernel=3)
            self.add_conv(f"{prefix}_5x5_reduce", channels, block.reduce5x5, kernel=1)
            self.add_conv(f"{prefix}_5x5", block.reduce5x5, block.conv5x5, kernel=5)
            self.add_conv(f"{prefix}_pool_proj", channels, block.pool_proj, kernel=1)
            channels = block.conv1x1 + block.conv3x3 + block.conv5x5 + block.pool_proj
            self.stage_channels[name] = channels

    def stem(self, x: Tensor) -> Tensor:
        x = local_response_norm(halve(self.conv("conv1_7x7_s2", x)))  # (B, 64, H/4, W/4)
        x = self.conv("conv2_3x3", self.conv("conv2_3x3_reduce", x))
        return halve(local_response_norm(x))  # (B, 192, H/8, W/8)

    def block(self, name: str, x: Tensor) -> Tensor:
        if name in POOL_FIRST:
            x = halve(x)
        prefix = f"inception_{name}"
        conv1x1 = self.conv(f"{prefix}_1x1", x)
        conv3x3 = self.conv(f"{prefix}_3x3", self.conv(f"{prefix}_3x3_reduce", x))
        conv5x5 = self.conv(f"{prefix}_5x5", self.conv(f"{prefix}_5x5_reduce", x))
        pooled = self.conv(f"{prefix}_pool_proj", F.max_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([conv1x1, conv3x3, conv5x5, pooled], dim=1)


def local_response_norm(x: Tensor) -> Tensor:
    """Caffe's local response normalization over 5 adjacent channels; keeps the shape."""
    return F.local_response_norm(x, size=5, alpha=1e-4, beta=0.75, k=1.0)
