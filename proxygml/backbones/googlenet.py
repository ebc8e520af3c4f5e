"""GoogLeNet (Szegedy et al. 2015) without batch normalization: the "G" trunk of the paper's Table 2 and of HDC.

Layers have Caffe's names with "/" written as "_" (inception_3a_1x1, conv2_3x3_reduce, ...), the names of BVLC's model
ported to PyTorch by MMdnn. torchvision's googlenet is a different network (batch normalization, 3x3 instead of 5x5, no
local response normalization), so its weights do not fit.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from proxygml.backbones.inception import Branch, Conv, Inception, halve


def block(
    conv1x1: int, reduce3x3: int, conv3x3: int, reduce5x5: int, conv5x5: int, pool_proj: int
) -> tuple[Branch, ...]:
    """The branches of a block from their output channels: a row of Szegedy et al., Table 1."""
    return (
        (Conv("1x1", conv1x1),),
        (Conv("3x3_reduce", reduce3x3), Conv("3x3", conv3x3, 3)),
        (Conv("5x5_reduce", reduce5x5), Conv("5x5", conv5x5, 5)),
        (Conv("pool_proj", pool_proj),),
    )


class GoogLeNet(Inception):
    """Images (B, 3, H, W) in BGR -> feature maps (B, 1024, H/32, W/32); HDC taps the stages 4a, 4d and 5b."""

    blocks: ClassVar = {
        "3a": block(64, 96, 128, 16, 32, 32),
        "3b": block(128, 128, 192, 32, 96, 64),
        "4a": block(192, 96, 208, 16, 48, 64),
        "4b": block(160, 112, 224, 24, 64, 64),
        "4c": block(128, 128, 256, 24, 64, 64),
        "4d": block(112, 144, 288, 32, 64, 64),
        "4e": block(256, 160, 320, 32, 128, 128),
        "5a": block(256, 160, 320, 32, 128, 128),
        "5b": block(384, 192, 384, 48, 128, 128),
    }
    stages = ("stem", *blocks)
    pixel_mean = (104.0, 117.0, 123.0)
    batch_norm = False
    classifier = ("loss1_", "loss2_", "loss3_")
    published_file = "googlenet.pth"
    weights_from = (
        "pretrained GoogLeNet is BVLC's Caffe model (bvlc_googlenet) ported to PyTorch with Caffe's layer names, "
        "'/' written as '_' (googlenet.pth, made with MMdnn); torchvision's googlenet has batch normalization and does "
        "not fit. Pass the path of the file as the weights"
    )

    def stem(self, x: Tensor) -> Tensor:
        x = local_response_norm(halve(self.conv("conv1_7x7_s2", x)))  # (B, 64, H/4, W/4)
        x = self.conv("conv2_3x3", self.conv("conv2_3x3_reduce", x))
        return halve(local_response_norm(x))  # (B, 192, H/8, W/8)

    def block(self, name: str, x: Tensor) -> Tensor:
        return super().block(name, halve(x) if name in ("4a", "5a") else x)


def local_response_norm(x: Tensor) -> Tensor:
    """Caffe's local response normalization over 5 adjacent channels; keeps the shape."""
    return F.local_response_norm(x, size=5, alpha=1e-4, beta=0.75, k=1.0)
