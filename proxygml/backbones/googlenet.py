"""GoogLeNet (Szegedy et al. 2015) without batch normalisation: the "G" trunk of the paper's Table 2 and of HDC.

Layers carry Caffe's names with "/" written as "_" (inception_3a_1x1, conv2_3x3_reduce, ...), which are the names of
BVLC's model ported to PyTorch by MMdnn. torchvision's googlenet is another network (batch normalisation, 3x3 instead of
5x5, no local response normalisation): its weights do not fit.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.backbones.inception import Inception, halve


class Block(NamedTuple):
    """Channels of one inception block: a row of Szegedy et al., Table 1."""

    one: int
    three_reduce: int
    three: int
    five_reduce: int
    five: int
    projection: int

    def channels(self) -> int:
        """Maps that the block gives."""
        return self.one + self.three + self.five + self.projection


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
POOL_FIRST = ("4a", "5a")  # stages that begin by halving their maps


class GoogLeNet(Inception):
    """Images (B, 3, H, W) in BGR -> maps (B, 1024, H/32, W/32); HDC taps the stages 4a, 4d and 5b."""

    pixel_mean = (104.0, 117.0, 123.0)
    stages = ("stem", *BLOCKS)
    classifier = ("loss1_", "loss2_", "loss3_")
    published_file = "googlenet.pth"
    weights_from = (
        "pretrained GoogLeNet is BVLC's Caffe model (bvlc_googlenet) ported to PyTorch under Caffe's layer names with "
        "'/' written as '_' (googlenet.pth, made with MMdnn); torchvision's googlenet has batch normalisation and does "
        "not fit. Give the file's path as the weights"
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
            self._add(f"{prefix}_1x1", incoming, block.one, kernel=1)
            self._add(f"{prefix}_3x3_reduce", incoming, block.three_reduce, kernel=1)
            self._add(f"{prefix}_3x3", block.three_reduce, block.three, kernel=3)
            self._add(f"{prefix}_5x5_reduce", incoming, block.five_reduce, kernel=1)
            self._add(f"{prefix}_5x5", block.five_reduce, block.five, kernel=5)
            self._add(f"{prefix}_pool_proj", incoming, block.projection, kernel=1)
            incoming = block.channels()
            self.stage_channels[name] = incoming

    def _run(self, name: str, maps: Tensor) -> Tensor:
        return F.relu(self.get_submodule(name)(maps), inplace=True)

    def stage(self, name: str, maps: Tensor) -> Tensor:
        """Maps after one stage: (B, channels before, h, w) -> (B, stage_channels[name], h', w')."""
        self.require_stage(name)
        if name == "stem":
            maps = normalise_locally(halve(self._run("conv1_7x7_s2", maps)))  # (B, 64, H/4, W/4)
            maps = self._run("conv2_3x3", self._run("conv2_3x3_reduce", maps))
            return halve(normalise_locally(maps))  # (B, 192, H/8, W/8)
        if name in POOL_FIRST:
            maps = halve(maps)
        prefix = f"inception_{name}"
        one = self._run(f"{prefix}_1x1", maps)
        three = self._run(f"{prefix}_3x3", self._run(f"{prefix}_3x3_reduce", maps))
        five = self._run(f"{prefix}_5x5", self._run(f"{prefix}_5x5_reduce", maps))
        pooled = F.max_pool2d(maps, 3, stride=1, padding=1)
        return torch.cat([one, three, five, self._run(f"{prefix}_pool_proj", pooled)], dim=1)


def normalise_locally(maps: Tensor) -> Tensor:
    """Caffe's local response normalisation over 5 neighbouring channels: (B, channels, h, w) -> the same shape."""
    return F.local_response_norm(maps, size=5, alpha=1e-4, beta=0.75, k=1.0)
