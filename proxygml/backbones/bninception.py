"""BN-Inception (Ioffe and Szegedy 2015), the paper's trunk, with the layer names of the published Caffe-ported weights.

A block concatenates four branches: 1x1, 3x3, double 3x3, and pooling with a projection. Blocks 3c and 4e halve the
feature maps: they have no 1x1 branch, use stride 2, and pass the pooled maps on without a projection.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from proxygml.backbones.inception import Branch, Conv, Inception, halve


def block(
    conv1x1: int, reduce3x3: int, conv3x3: int, reduce_double: int, double3x3: int, pool_proj: int
) -> tuple[Branch, ...]:
    """The branches of a block from their output channels; 0 if there is no such convolution."""
    stride = 1 if pool_proj else 2
    double = Conv("double_3x3_1", double3x3, 3), Conv("double_3x3_2", double3x3, 3, stride)
    branches = (
        (Conv("3x3_reduce", reduce3x3), Conv("3x3", conv3x3, 3, stride)),
        (Conv("double_3x3_reduce", reduce_double), *double),
        (Conv("pool_proj", pool_proj),) if pool_proj else (),
    )
    return ((Conv("1x1", conv1x1),), *branches) if conv1x1 else branches


class BNInception(Inception):
    """Images (B, 3, H, W) in BGR -> feature maps (B, 1024, H/32, W/32), for any H and W."""

    blocks: ClassVar = {
        "3a": block(64, 64, 64, 64, 96, 32),
        "3b": block(64, 64, 96, 64, 96, 64),
        "3c": block(0, 128, 160, 64, 96, 0),
        "4a": block(224, 64, 96, 96, 128, 128),
        "4b": block(192, 96, 128, 96, 128, 128),
        "4c": block(160, 128, 160, 128, 160, 128),
        "4d": block(96, 128, 192, 160, 192, 128),
        "4e": block(0, 128, 192, 192, 256, 0),
        "5a": block(352, 192, 320, 160, 224, 128),
        "5b": block(352, 192, 320, 192, 224, 128),
    }
    stages = ("stem", *blocks)
    pixel_mean = (104.0, 117.0, 128.0)
    batch_norm = True
    classifier = ("last_linear.",)
    published_file = "bn_inception-52deb4733.pth"
    weights_from = (
        "pretrained BN-Inception (ImageNet, ported from Caffe) was published as "
        "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth: download it and pass its path as the "
        "weights"
    )

    def pool(self, name: str, x: Tensor) -> Tensor:
        if name in ("3c", "4e"):
            # With odd sizes the published pooling gives one row less than the strided convolutions. Padding it as they
            # are padded accepts every image size and changes nothing for even sizes.
            return halve(x, (x.shape[-2] % 2, x.shape[-1] % 2))
        if name == "5b":
            return super().pool(name, x)
        return F.avg_pool2d(x, 3, stride=1, padding=1)  # includes the zero padding, as Caffe does
