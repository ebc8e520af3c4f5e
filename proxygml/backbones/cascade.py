"""HDC's network: a trunk with embedding heads after three of its stages (Yuan et al., ICCV 2017).

Two side heads, like GoogLeNet's auxiliary classifiers, follow an early and a middle stage; the third follows the last
stage. Layers, dropout and the double weight of the last embedding in comparisons are those of the released code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones import PixelScaling
from proxygml.backbones.trunk import Trunk

WEIGHTS = (1.0, 1.0, 2.0)  # of the three embeddings in evaluation


class CascadedEmbedder(nn.Module):
    """Images (B, 3, H, W) in RGB, 0..255 -> embeddings (B, D): three concatenated parts of about D / 3.

    In training each part has unit length; in evaluation the parts have the lengths WEIGHTS, so that the deepest counts
    more in distances.
    """

    scales: Tensor

    def __init__(self, trunk: Trunk, embedding_dim: int) -> None:
        super().__init__()
        if embedding_dim < 3:
            raise ValueError(f"expected embedding_dim of at least 3, one per head, got {embedding_dim}: 384 is usual")
        self.trunk = trunk
        self.taps = choose_taps(trunk.stages)
        early, middle = (trunk.stage_channels[tap] for tap in self.taps)
        sizes = [len(part) for part in torch.arange(embedding_dim).tensor_split(3)]  # differ by at most 1
        self.head = nn.ModuleList(
            [side_head(early, sizes[0]), side_head(middle, sizes[1]), last_head(trunk.channels, sizes[2])]
        )
        scales = torch.tensor(WEIGHTS).repeat_interleave(torch.tensor(sizes))  # (D,)
        self.register_buffer("scales", scales, persistent=False)
        self.scale_pixels = PixelScaling(trunk)
        # Cuts the time of convolutions on a CPU by a third.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in the stubs

    def forward(self, images: Tensor) -> Tensor:
        x = self.scale_pixels(images)
        tapped = []
        for name in self.trunk.stages:
            x = self.trunk.stage(name, x)
            if name in self.taps:
                tapped.append(x)
        parts = [F.normalize(head(maps), dim=-1) for head, maps in zip(self.head, [*tapped, x], strict=True)]
        embeddings = torch.cat(parts, dim=-1)  # (B, D)
        return embeddings if self.training else embeddings * self.scales


class SidePool(nn.Module):
    """Feature maps (B, F, h, w) -> (B, F, 4, 4): average pooling with 5x5 windows and stride 3, then to 4x4."""

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[-2:]) >= 5:
            x = F.avg_pool2d(x, 5, stride=3, ceil_mode=True)  # Caffe rounds up, so the border is included
        return F.adaptive_avg_pool2d(x, 4)  # changes nothing for 14x14 maps, i.e. 224 pixels


def side_head(in_channels: int, out_features: int) -> nn.Sequential:
    """Feature maps (B, in_channels, h, w) -> (B, out_features)."""
    return nn.Sequential(
        SidePool(),
        nn.Conv2d(in_channels, 128, 1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024),
        nn.ReLU(inplace=True),
        nn.Dropout(0.7),
        nn.Linear(1024, out_features),
    )


def last_head(in_channels: int, out_features: int) -> nn.Sequential:
    """Feature maps (B, in_channels, h, w) -> (B, out_features)."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(in_channels, out_features))


def choose_taps(stages: tuple[str, ...]) -> tuple[str, str]:
    """The stages with side heads: 4a and 4d as in HDC, or the ones at about 1/2 and 3/4 of another trunk."""
    if "4a" in stages and "4d" in stages:
        return "4a", "4d"
    if len(stages) < 4:
        raise ValueError(f"expected a trunk with at least four stages, got {', '.join(stages)}: use another backbone")
    half, three_quarters = -(-len(stages) // 2), -(-3 * len(stages) // 4)  # rounded up, counted from 1
    return stages[half - 1], stages[three_quarters - 1]
