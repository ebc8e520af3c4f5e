"""What BN-Inception and GoogLeNet share: Caffe's names, its pixels, and convolutions by name."""

import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones.trunk import Trunk


class Inception(Trunk):
    """Images (B, 3, H, W) in BGR -> maps (B, 1024, H/32, W/32), 7 x 7 at 224 pixels; a stem, then inception blocks."""

    channels = 1024
    pixel_std = (1.0, 1.0, 1.0)
    bgr = True

    def _add(self, name: str, incoming: int, outgoing: int, kernel: int, stride: int = 1) -> None:
        convolution = nn.Conv2d(incoming, outgoing, kernel, stride, padding=kernel // 2)
        # fan_in keeps the scale over 22 layers, with no batch normalisation or a frozen one (He et al. 2015).
        nn.init.kaiming_normal_(convolution.weight, mode="fan_in", nonlinearity="relu")
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]  # it has one
        self.add_module(name, convolution)

    def modules_of(self, name: str) -> list[nn.Module]:
        """The convolutions, and batch normalisations if there are any, of one stage."""
        self.require_stage(name)
        prefix = "conv" if name == "stem" else f"inception_{name}_"
        return [module for layer, module in self.named_children() if layer.startswith(prefix)]


def halve(maps: Tensor, padding: tuple[int, int] = (0, 0)) -> Tensor:
    """Max pool 3x3 with stride 2, rounding up as Caffe does: (B, channels, h, w) -> (B, channels, h/2, w/2)."""
    return F.max_pool2d(maps, 3, stride=2, padding=padding, ceil_mode=True)
