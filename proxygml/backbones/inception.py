"""Shared by BN-Inception and GoogLeNet: Caffe's layer names, pixel order, padding rules, stem and blocks."""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones.trunk import Trunk


class Conv(NamedTuple):
    """A convolution of a block; its layer is called inception_BLOCK_NAME."""

    name: str
    channels: int
    kernel: int = 1
    stride: int = 1


Branch = tuple[Conv, ...]


class Inception(Trunk):
    """Images (B, 3, H, W) in BGR -> feature maps (B, 1024, H/32, W/32): a stem, then inception blocks.

    A block concatenates branches of convolutions; its last branch begins with pooling.
    """

    channels = 1024
    pixel_std = (1.0, 1.0, 1.0)
    bgr = True
    batch_norm: bool
    blocks: ClassVar[dict[str, tuple[Branch, ...]]]

    def __init__(self) -> None:
        super().__init__()
        self.add_conv("conv1_7x7_s2", 3, 64, kernel=7, stride=2)
        self.add_conv("conv2_3x3_reduce", 64, 64, kernel=1)
        self.add_conv("conv2_3x3", 64, 192, kernel=3)
        channels = 192
        self.stage_channels = {"stem": channels}
        for name, branches in self.blocks.items():
            total = 0
            for branch in branches:
                branch_channels = channels
                for conv in branch:
                    self.add_conv(f"inception_{name}_{conv.name}", branch_channels, *conv[1:])
                    branch_channels = conv.channels
                total += branch_channels
            self.stage_channels[name] = channels = total

    def add_conv(self, name: str, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2)
        # fan_in keeps the scale over 22 layers, with no batch normalization or a frozen one (He et al. 2015).
        nn.init.kaiming_normal_(conv.weight, mode="fan_in", nonlinearity="relu")
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]  # it has one
        self.add_module(name, conv)
        if self.batch_norm:
            self.add_module(f"{name}_bn", nn.BatchNorm2d(out_channels))

    def conv(self, name: str, x: Tensor) -> Tensor:
        """Convolution `name` with its batch normalization, if any, and ReLU."""
        x = self.get_submodule(name)(x)
        if self.batch_norm:
            x = self.get_submodule(f"{name}_bn")(x)
        return F.relu(x, inplace=True)

    def stage(self, name: str, x: Tensor) -> Tensor:
        """Run one stage: (B, channels before, h, w) -> (B, stage_channels[name], h', w')."""
        self.check_stage(name)
        return self.stem(x) if name == "stem" else self.block(name, x)

    def stem(self, x: Tensor) -> Tensor:
        x = halve(self.conv("conv1_7x7_s2", x))  # (B, 64, H/4, W/4)
        return halve(self.conv("conv2_3x3", self.conv("conv2_3x3_reduce", x)))  # (B, 192, H/8, W/8)

    def block(self, name: str, x: Tensor) -> Tensor:
        branches, outputs = self.blocks[name], []
        for branch in branches:
            y = self.pool(name, x) if branch is branches[-1] else x
            for conv in branch:
                y = self.conv(f"inception_{name}_{conv.name}", y)
            outputs.append(y)
        return torch.cat(outputs, dim=1)

    def pool(self, name: str, x: Tensor) -> Tensor:
        """The pooling of the last branch of a block."""
        return F.max_pool2d(x, 3, stride=1, padding=1)

    def stage_modules(self, name: str) -> list[nn.Module]:
        self.check_stage(name)
        prefix = "conv" if name == "stem" else f"inception_{name}_"
        return [module for layer, module in self.named_children() if layer.startswith(prefix)]


def halve(x: Tensor, padding: tuple[int, int] = (0, 0)) -> Tensor:
    """3x3 max pooling with stride 2, rounding up as Caffe does: (B, C, h, w) -> (B, C, h/2, w/2)."""
    return F.max_pool2d(x, 3, stride=2, padding=padding, ceil_mode=True)
