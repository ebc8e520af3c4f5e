"""ResNet (He et al. 2016) under torchvision's names, so that its published weights load."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones.trunk import Trunk


class Depth(NamedTuple):
    """Blocks in each of the four layers, and how many times wider a block's output is than its inside."""

    blocks: tuple[int, int, int, int]
    expansion: int
    published: str


DEPTHS = {
    18: Depth((2, 2, 2, 2), 1, "resnet18-f37072fd.pth"),
    34: Depth((3, 4, 6, 3), 1, "resnet34-b627a593.pth"),
    50: Depth((3, 4, 6, 3), 4, "resnet50-0676ba61.pth"),
    101: Depth((3, 4, 23, 3), 4, "resnet101-63fe2227.pth"),
}


class ResNet(Trunk):
    """Images (B, 3, H, W) in RGB -> maps (B, 512 * expansion, H/32, W/32): 2048 maps at depth 50 and 101."""

    pixel_mean = (123.675, 116.28, 103.53)
    pixel_std = (58.395, 57.12, 57.375)
    stages = ("stem", "layer1", "layer2", "layer3", "layer4")
    classifier = ("fc.",)

    def __init__(self, depth: int = 50) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise ValueError(f"no ResNet of depth {depth}: take one of {', '.join(map(str, DEPTHS))}")
        blocks, expansion, published = DEPTHS[depth]
        self.published_file = published
        self.weights_from = (
            f"pretrained ResNet-{depth} is torchvision's published file {published} (ImageNet): "
            "download it and give its path as the weights"
        )
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        incoming = 64
        self.stage_channels = {"stem": incoming}
        for number, repeats in enumerate(blocks):
            width = 64 * 2**number
            layer = nn.Sequential()
            for position in range(repeats):
                stride = 2 if number > 0 and position == 0 else 1
                layer.append(ResidualBlock(incoming, width, width * expansion, stride))
                incoming = width * expansion
            self.add_module(f"layer{number + 1}", layer)
            self.stage_channels[f"layer{number + 1}"] = incoming
        self.channels = incoming
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def modules_of(self, name: str) -> list[nn.Module]:
        """The modules of one stage, in the order in which they run."""
        if name == "stem":
            return [self.conv1, self.bn1, self.relu, self.maxpool]
        return super().modules_of(name)


class ResidualBlock(nn.Module):
    """Maps (B, incoming, h, w) -> (B, outgoing, h/stride, w/stride), added to what came in.

    Where the output is as wide as the inside the block is two 3x3 convolutions, otherwise 1x1, 3x3, 1x1 with the
    stride in the 3x3 (torchvision's way, not the paper's).
    """

    def __init__(self, incoming: int, width: int, outgoing: int, stride: int) -> None:
        super().__init__()
        if width == outgoing:
            rows: tuple[tuple[int, int, int, int], ...] = ((incoming, width, 3, stride), (width, width, 3, 1))
        else:
            rows = ((incoming, width, 1, 1), (width, width, 3, stride), (width, outgoing, 1, 1))
        self.convolutions = len(rows)
        for number, (before, after, kernel, step) in enumerate(rows, start=1):
            convolution = nn.Conv2d(before, after, kernel, step, padding=kernel // 2, bias=False)
            self.add_module(f"conv{number}", convolution)
            self.add_module(f"bn{number}", nn.BatchNorm2d(after))
        self.downsample = None
        if stride != 1 or incoming != outgoing:
            shortcut = nn.Conv2d(incoming, outgoing, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outgoing))

    def forward(self, maps: Tensor) -> Tensor:
        inner = maps
        for number in range(1, self.convolutions + 1):
            inner = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(inner))
            if number < self.convolutions:
                inner = F.relu(inner, inplace=True)
        shortcut = maps if self.downsample is None else self.downsample(maps)
        return F.relu(inner + shortcut, inplace=True)
