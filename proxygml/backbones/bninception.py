"""BN-Inception (Ioffe and Szegedy 2015), the paper's trunk, with the layer names of the published Caffe-ported weights.

A block concatenates four branches: 1x1, 3x3, double 3x3, and pooling with a projection. Blocks 3c and 4e halve the
feature maps: they have no 1x1 branch, use stride 2, and pass the pooled maps on without a projection.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.backbones.inception import Inception, halve


class Block(NamedTuple):
    """Output channels of the convolutions of a block; 0 if the block does not have one."""

    conv1x1: int
    reduce3x3: int
    conv3x3: int
    reduce_double: int
    double3x3: int
    pool: str
    pool_proj: int


BLOCKS = {
    "3a": Block(64, 64, 64, 64, 96, "average", 32),
    "3b": Block(64, 64, 96, 64, 96, "average", 64),
    "3c": Block(0, 128, 160, 64, 96, "max", 0),
    "4a": Block(224, 64, 96, 96, 128, "average", 128),
    "4b": Block(192, 96, 128, 96, 128, "average", 128),
    "4c": Block(160, 128, 160, 128, 160, "average", 128),
    "4d": Block(96, 128, 192, 160, 192, "average", 128),
    "4e": Block(0, 128, 192, 192, 256, "max", 0),
    "5a": Block(352, 192, 320, 160, 224, "average", 128),
    "5b": Block(352, 192, 320, 192, 224, "max", 128),
}


class BNInception(Inception):
    """Images (B, 3, H, W) in BGR -> feature maps (B, 1024, H/32, W/32), for any H and W."""

    pixel_mean = (104.0, 117.0, 128.0)
    batch_norm = True
    stages = ("stem", *BLOCKS)
    classifier = ("last_linear.",)
    published_file = "bn_inception-52deb4733.pth"
    weights_from = (
        "pretrained BN-Inception is the published file bn_inception-52deb4733.pth (ImageNet, ported from Caffe): "
        "download it and pass its path as the weights"
    )

    def __init__(self) -> None:
        super().__init__()
        channels = self.stage_channels["stem"]
        for name, block in BLOCKS.items():
            prefix = f"inception_{name}"
            stride = 1 if block.pool_proj else 2
            if block.conv1x1:
                self.add_conv(f"{prefix}_1x1", channels, block.conv1x1, kernel=1)
            self.add_conv(f"{prefix}_3x3_reduce", channels, block.reduce3x3, kernel=1)
            self.add_conv(f"{prefix}_3x3", block.reduce3x3, block.conv3x3, kernel=3, stride=stride)
            self.add_conv(f"{prefix}_double_3x3_reduce", channels, block.reduce_double, kernel=1)
            self.add_conv(f"{prefix}_double_3x3_1", block.reduce_double, block.double3x3, kernel=3)
            self.add_conv(f"{prefix}_double_3x3_2", block.double3x3, block.double3x3, kernel=3, stride=stride)
            if block.pool_proj:
                self.add_conv(f"{prefix}_pool_proj", channels, block.pool_proj, kernel=1)
            channels = block.conv1x1 + block.conv3x3 + block.double3x3 + (block.pool_proj or channels)
            self.stage_channels[name] = channels

    def block(self, name: str, x: Tensor) -> Tensor:
        block, prefix = BLOCKS[name], f"inception_{name}"
        conv3x3 = self.conv(f"{prefix}_3x3", self.conv(f"{prefix}_3x3_reduce", x))
        double = self.conv(f"{prefix}_double_3x3_1", self.conv(f"{prefix}_double_3x3_reduce", x))
        double = self.conv(f"{prefix}_double_3x3_2", double)
        if not block.pool_proj:
            # With odd sizes the published pooling gives one row less than the strided convolutions. Padding it as they
            # are padded accepts every image size and changes nothing for even sizes.
            padding = (x.shape[-2] % 2, x.shape[-1] % 2)
            return torch.cat([conv3x3, double, halve(x, padding)], dim=1)
        if block.pool == "average":
            pooled = F.avg_pool2d(x, 3, stride=1, padding=1)  # includes the zero padding, as Caffe does
        else:
            pooled = F.max_pool2d(x, 3, stride=1, padding=1)
        conv1x1 = self.conv(f"{prefix}_1x1", x)
        return torch.cat([conv1x1, conv3x3, double, self.conv(f"{prefix}_pool_proj", pooled)], dim=1)
