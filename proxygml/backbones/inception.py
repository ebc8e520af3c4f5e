"""BN-Inception, the paper's trunk, and GoogLeNet, with the layer names, pixel order and padding of Caffe.

BN-Inception: Ioffe and Szegedy 2015, as its published weights were ported from Caffe. GoogLeNet: Szegedy et al. 2015,
without batch normalization, the "G" trunk of the paper's Table 2 and of HDC; BVLC's model ported to PyTorch by MMdnn,
"/" written as "_" (inception_3a_1x1). torchvision's googlenet is a different network (batch normalization, 3x3 instead
of 5x5, no local response normalization), so its weights do not fit.
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones.folding import conv_bn
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
        conv: nn.Conv2d = getattr(self, name)
        x = conv_bn(conv, getattr(self, f"{name}_bn"), x) if self.batch_norm else conv(x)
        return F.relu(x, inplace=True)

    def stage(self, name: str, x: Tensor) -> Tensor:
        """Run one stage: (B, channels before, h, w) -> (B, stage_channels[name], h', w')."""
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
        prefix = "conv" if name == "stem" else f"inception_{name}_"
        return [module for layer, module in self.named_children() if layer.startswith(prefix)]


def halve(x: Tensor, padding: tuple[int, int] = (0, 0)) -> Tensor:
    """3x3 max pooling with stride 2, rounding up as Caffe does: (B, C, h, w) -> (B, C, h/2, w/2)."""
    return F.max_pool2d(x, 3, stride=2, padding=padding, ceil_mode=True)


def bn_block(
    conv1x1: int, reduce3x3: int, conv3x3: int, reduce_double: int, double3x3: int, pool_proj: int
) -> tuple[Branch, ...]:
    """The branches of a block of BN-Inception from their output channels; 0 if there is no such convolution.

    Blocks 3c and 4e halve the feature maps: no 1x1 branch, stride 2, and pooled maps that pass without a projection.
    """
    stride = 1 if pool_proj else 2
    double = Conv("double_3x3_1", double3x3, 3), Conv("double_3x3_2", double3x3, 3, stride)
    branches = (
        (Conv("3x3_reduce", reduce3x3), Conv("3x3", conv3x3, 3, stride)),
        (Conv("double_3x3_reduce", reduce_double), *double),
        (Conv("pool_proj", pool_proj),) if pool_proj else (),
    )
    return ((Conv("1x1", conv1x1),), *branches) if conv1x1 else branches


class BNInception(Inception):
    """Blocks of 1x1, 3x3 and double 3x3 convolutions, and pooling with a projection; for any H and W."""

    blocks: ClassVar = {
        "3a": bn_block(64, 64, 64, 64, 96, 32),
        "3b": bn_block(64, 64, 96, 64, 96, 64),
        "3c": bn_block(0, 128, 160, 64, 96, 0),
        "4a": bn_block(224, 64, 96, 96, 128, 128),
        "4b": bn_block(192, 96, 128, 96, 128, 128),
        "4c": bn_block(160, 128, 160, 128, 160, 128),
        "4d": bn_block(96, 128, 192, 160, 192, 128),
        "4e": bn_block(0, 128, 192, 192, 256, 0),
        "5a": bn_block(352, 192, 320, 160, 224, 128),
        "5b": bn_block(352, 192, 320, 192, 224, 128),
    }
    stages = ("stem", *blocks)
    pixel_mean = (104.0, 117.0, 128.0)
    batch_norm = True
    classifier = ("last_linear.",)
    published_file = "bn_inception-52deb4733.pth"
    weights_from = (
        "pretrained BN-Inception (ImageNet, ported from Caffe) was published as "
        "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth: download it"
    )

    def pool(self, name: str, x: Tensor) -> Tensor:
        if name in ("3c", "4e"):
            # With odd sizes the published pooling gives one row less than the strided convolutions. Padding it as they
            # are padded accepts every image size and changes nothing for even sizes.
            return halve(x, (x.shape[-2] % 2, x.shape[-1] % 2))
        if name == "5b":
            return super().pool(name, x)
        return F.avg_pool2d(x, 3, stride=1, padding=1)  # includes the zero padding, as Caffe does


def google_block(
    conv1x1: int, reduce3x3: int, conv3x3: int, reduce5x5: int, conv5x5: int, pool_proj: int
) -> tuple[Branch, ...]:
    """The branches of a block of GoogLeNet from their output channels: a row of Szegedy et al., Table 1."""
    return (
        (Conv("1x1", conv1x1),),
        (Conv("3x3_reduce", reduce3x3), Conv("3x3", conv3x3, 3)),
        (Conv("5x5_reduce", reduce5x5), Conv("5x5", conv5x5, 5)),
        (Conv("pool_proj", pool_proj),),
    )


class GoogLeNet(Inception):
    """Blocks of 1x1, 3x3 and 5x5 convolutions, and pooling with a projection; HDC taps the stages 4a, 4d and 5b."""

    blocks: ClassVar = {
        "3a": google_block(64, 96, 128, 16, 32, 32),
        "3b": google_block(128, 128, 192, 32, 96, 64),
        "4a": google_block(192, 96, 208, 16, 48, 64),
        "4b": google_block(160, 112, 224, 24, 64, 64),
        "4c": google_block(128, 128, 256, 24, 64, 64),
        "4d": google_block(112, 144, 288, 32, 64, 64),
        "4e": google_block(256, 160, 320, 32, 128, 128),
        "5a": google_block(256, 160, 320, 32, 128, 128),
        "5b": google_block(384, 192, 384, 48, 128, 128),
    }
    stages = ("stem", *blocks)
    pixel_mean = (104.0, 117.0, 123.0)
    batch_norm = False
    classifier = ("loss1_", "loss2_", "loss3_")
    published_file = "googlenet.pth"
    weights_from = (
        "pretrained GoogLeNet is BVLC's Caffe model (bvlc_googlenet) ported to PyTorch with Caffe's layer names, "
        "'/' written as '_' (googlenet.pth, made with MMdnn); torchvision's googlenet has batch normalization and does "
        "not fit"
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
