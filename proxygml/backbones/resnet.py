"""ResNet (He et al. 2016) with torchvision's layer names, so that its published weights load."""

import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones.folding import conv_bn
from proxygml.backbones.trunk import Trunk

DEPTHS = {  # blocks per layer, output channels over inner channels of a block, published weights
    18: ((2, 2, 2, 2), 1, "resnet18-f37072fd.pth"),
    50: ((3, 4, 6, 3), 4, "resnet50-0676ba61.pth"),
}


class ResNet(Trunk):
    """Images (B, 3, H, W) in RGB -> feature maps (B, 512 * expansion, H/32, W/32): 2048 channels at depth 50."""

    stages = ("stem", "layer1", "layer2", "layer3", "layer4")
    classifier = ("fc.",)

    def __init__(self, depth: int) -> None:
        super().__init__()
        blocks, expansion, self.published_file = DEPTHS[depth]
        self.weights_from = (
            f"pretrained ResNet-{depth} (ImageNet) is https://download.pytorch.org/models/{self.published_file}: "
            "download it"
        )
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = 64
        self.stage_channels = {"stem": channels}
        for index, repeats in enumerate(blocks):
            width = 64 * 2**index
            layer = nn.Sequential()
            for position in range(repeats):
                stride = 2 if index > 0 and position == 0 else 1
                layer.append(ResidualBlock(channels, width, width * expansion, stride))
                channels = width * expansion
            self.add_module(f"layer{index + 1}", layer)
            self.stage_channels[f"layer{index + 1}"] = channels
        self.channels = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stage_modules(self, name: str) -> list[nn.Module]:
        return [self.conv1, self.bn1, self.relu, self.maxpool] if name == "stem" else super().stage_modules(name)


class ResidualBlock(nn.Module):
    """Feature maps (B, in_channels, h, w) -> (B, out_channels, h/stride, w/stride).

    Two 3x3 convolutions if out_channels equals width; otherwise a 1x1, 3x3, 1x1 bottleneck with the stride in the 3x3
    convolution, as in torchvision (the paper has it in the first 1x1).
    """

    def __init__(self, in_channels: int, width: int, out_channels: int, stride: int) -> None:
        super().__init__()
        if width == out_channels:
            layers: tuple[tuple[int, ...], ...] = ((in_channels, width, 3, stride), (width, width, 3, 1))
        else:
            layers = ((in_channels, width, 1, 1), (width, width, 3, stride), (width, out_channels, 1, 1))
        self.depth = len(layers)
        for index, (before, after, kernel, step) in enumerate(layers, start=1):
            self.add_module(f"conv{index}", nn.Conv2d(before, after, kernel, step, padding=kernel // 2, bias=False))
            self.add_module(f"bn{index}", nn.BatchNorm2d(after))
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        for index in range(1, self.depth + 1):
            residual = conv_bn(getattr(self, f"conv{index}"), getattr(self, f"bn{index}"), residual)
            if index < self.depth:
                residual = F.relu(residual, inplace=True)
        if self.downsample is not None:
            x = conv_bn(getattr(self.downsample, "0"), getattr(self.downsample, "1"), x)
        return F.relu(residual + x, inplace=True)
