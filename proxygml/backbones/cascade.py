"""HDC's network: a trunk with an embedding after each of three of its stages (Yuan et al., ICCV 2017).

Two side heads after an early and a middle stage, as GoogLeNet's auxiliary classifiers, and one at the end. Layers and
dropout are those of the released code, which also weighs the last embedding double when images are compared.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones import PixelScaling
from proxygml.backbones.trunk import Trunk


class CascadedEmbedder(nn.Module):
    """Images (B, 3, H, W) in RGB, 0..255 -> embeddings (B, D): those of three heads, about D / 3 numbers each.

    In training each third is of unit length; in evaluation the thirds are multiplied by `weights`, so that the deepest
    counts more in distances. The two side heads sit after the stages `taps` of the trunk; None takes 4a and 4d, those
    of the paper, or in a trunk without them the stages at about half and three quarters of its way.
    """

    scales: Tensor

    def __init__(
        self,
        trunk: Trunk,
        embedding_dim: int,
        *,
        taps: tuple[str, str] | None = None,
        weights: tuple[float, float, float] = (1.0, 1.0, 2.0),
    ) -> None:
        super().__init__()
        if embedding_dim < 3:
            raise ValueError(f"expected an embedding_dim that three heads can share, got {embedding_dim}: take 384")
        if len(weights) != 3 or not all(weight > 0 for weight in weights):
            raise ValueError(f"expected three weights above 0, one for each head, got {tuple(weights)}")
        self.trunk = trunk
        self.taps = choose_taps(trunk.stages) if taps is None else tuple(taps)
        places = [trunk.stages.index(tap) for tap in self.taps if tap in trunk.stages]
        if len(self.taps) != 2 or len(places) != 2 or not places[0] < places[1] < len(trunk.stages) - 1:
            raise ValueError(
                f"expected as taps two stages in their order, before the last of {', '.join(trunk.stages)}, "
                f"got {', '.join(self.taps)}"
            )
        early, middle = (trunk.stage_channels[tap] for tap in self.taps)
        sizes = [len(part) for part in torch.arange(embedding_dim).tensor_split(3)]  # equal, or one more in the first
        self.head = nn.ModuleList(
            [side_head(early, sizes[0]), side_head(middle, sizes[1]), last_head(trunk.channels, sizes[2])]
        )
        scales = torch.tensor(weights).repeat_interleave(torch.tensor(sizes))  # (D,)
        self.register_buffer("scales", scales, persistent=False)
        self.scale_pixels = PixelScaling(trunk)
        # Convolutions on a CPU take about 2/3 of the time.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its types lack this form

    def forward(self, images: Tensor) -> Tensor:
        maps = self.scale_pixels(images)
        tapped = []
        for name in self.trunk.stages:
            maps = self.trunk.stage(name, maps)
            if name in self.taps:
                tapped.append(maps)
        thirds = [F.normalize(head(seen), dim=-1) for head, seen in zip(self.head, [*tapped, maps], strict=True)]
        embeddings = torch.cat(thirds, dim=-1)  # (B, D)
        return embeddings if self.training else embeddings * self.scales


class SidePool(nn.Module):
    """Maps (B, F, h, w) -> (B, F, 4, 4), by the average of 5 x 5 places, 3 apart, and where that is not 4 x 4 again."""

    def forward(self, maps: Tensor) -> Tensor:
        if min(maps.shape[-2:]) >= 5:
            maps = F.avg_pool2d(maps, 5, stride=3, ceil_mode=True)  # Caffe rounds up; nothing at the rim is lost
        return F.adaptive_avg_pool2d(maps, 4)  # the same maps where they were 14 x 14, as at 224 pixels


def side_head(channels: int, dimension: int) -> nn.Sequential:
    """Maps (B, channels, h, w) -> vectors (B, dimension)."""
    return nn.Sequential(
        SidePool(),
        nn.Conv2d(channels, 128, 1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024),
        nn.ReLU(inplace=True),
        nn.Dropout(0.7),
        nn.Linear(1024, dimension),
    )


def last_head(channels: int, dimension: int) -> nn.Sequential:
    """Maps (B, channels, h, w) -> vectors (B, dimension)."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(channels, dimension),
    )


def choose_taps(stages: tuple[str, ...]) -> tuple[str, str]:
    """4a and 4d where there are such stages, else those that end at about half and three quarters of the way."""
    if "4a" in stages and "4d" in stages:
        return "4a", "4d"
    if len(stages) < 4:
        raise ValueError(
            f"expected a trunk of at least four stages to tap, got {', '.join(stages)}: take another backbone"
        )
    half, three_quarters = -(-len(stages) // 2), -(-3 * len(stages) // 4)  # rounded up, counted from 1
    return stages[half - 1], stages[three_quarters - 1]
