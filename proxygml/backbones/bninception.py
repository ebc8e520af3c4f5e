"""BN-Inception (Ioffe and Szegedy 2015), the paper's trunk, under the names of the published Caffe-ported weights.

A block runs four branches on the same maps and concatenates them: 1x1, 3x3, double 3x3, and a pool with its projection.
Blocks 3c and 4e halve the maps: no 1x1 branch, stride 2, and the pooled maps pass through unprojected. Every
convolution has a bias and is followed by batch normalisation and ReLU.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones.inception import Inception, halve


class Block(NamedTuple):
    """Channels of one block's convolutions; 0 where the block has no such convolution."""

    one: int
    three_reduce: int
    three: int
    double_reduce: int
    double: int
    pool: str
    projection: int

    @property
    def stride(self) -> int:
        return 1 if self.projection else 2

    def channels(self, incoming: int) -> int:
        """Maps that the block gives when `incoming` maps come in."""
        return self.one + self.three + self.double + (self.projection or incoming)


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
    """Images (B, 3, H, W) in BGR -> maps (B, 1024, H/32, W/32); any H and W."""

    pixel_mean = (104.0, 117.0, 128.0)
    stages = ("stem", *BLOCKS)
    classifier = ("last_linear.",)
    published_file = "bn_inception-52deb4733.pth"
    weights_from = (
        "pretrained BN-Inception is the published file bn_inception-52deb4733.pth (ImageNet, ported from Caffe): "
        "download it and give its path as the weights"
    )

    def __init__(self) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, kernel=7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64, kernel=1)
        self._add("conv2_3x3", 64, 192, kernel=3)
        incoming = 192
        self.stage_channels = {"stem": incoming}
        for name, block in BLOCKS.items():
            prefix = f"inception_{name}"
            if block.one:
                self._add(f"{prefix}_1x1", incoming, block.one, kernel=1)
            self._add(f"{prefix}_3x3_reduce", incoming, block.three_reduce, kernel=1)
            self._add(f"{prefix}_3x3", block.three_reduce, block.three, kernel=3, stride=block.stride)
            self._add(f"{prefix}_double_3x3_reduce", incoming, block.double_reduce, kernel=1)
            self._add(f"{prefix}_double_3x3_1", block.double_reduce, block.double, kernel=3)
            self._add(f"{prefix}_double_3x3_2", block.double, block.double, kernel=3, stride=block.stride)
            if block.projection:
                self._add(f"{prefix}_pool_proj", incoming, block.projection, kernel=1)
            incoming = block.channels(incoming)
            self.stage_channels[name] = incoming

    def _add(self, name: str, incoming: int, outgoing: int, kernel: int, stride: int = 1) -> None:
        super()._add(name, incoming, outgoing, kernel, stride)
        self.add_module(f"{name}_bn", nn.BatchNorm2d(outgoing, eps=1e-5, momentum=0.1))

    def _run(self, name: str, maps: Tensor) -> Tensor:
        normalised = self.get_submodule(f"{name}_bn")(self.get_submodule(name)(maps))
        return F.relu(normalised, inplace=True)

    def stage(self, name: str, maps: Tensor) -> Tensor:
        """Maps after one stage: (B, channels before, h, w) -> (B, stage_channels[name], h', w')."""
        self.require_stage(name)
        if name == "stem":
            maps = halve(self._run("conv1_7x7_s2", maps))  # (B, 64, H/4, W/4)
            maps = self._run("conv2_3x3", self._run("conv2_3x3_reduce", maps))
            return halve(maps)  # (B, 192, H/8, W/8)
        block, prefix = BLOCKS[name], f"inception_{name}"
        three = self._run(f"{prefix}_3x3", self._run(f"{prefix}_3x3_reduce", maps))
        double = self._run(f"{prefix}_double_3x3_1", self._run(f"{prefix}_double_3x3_reduce", maps))
        double = self._run(f"{prefix}_double_3x3_2", double)
        if not block.projection:
            # On maps of odd size the published pool comes out one smaller than the strided convolutions beside it;
            # padding it as they are padded lets every image size through and changes nothing where it worked.
            rows, columns = maps.shape[-2] % 2, maps.shape[-1] % 2
            return torch.cat([three, double, halve(maps, padding=(rows, columns))], dim=1)
        if block.pool == "average":
            pooled = F.avg_pool2d(maps, 3, stride=1, padding=1)  # zeros of the padding count, as in Caffe
        else:
            pooled = F.max_pool2d(maps, 3, stride=1, padding=1)
        one = self._run(f"{prefix}_1x1", maps)
        return torch.cat([one, three, double, self._run(f"{prefix}_pool_proj", pooled)], dim=1)
