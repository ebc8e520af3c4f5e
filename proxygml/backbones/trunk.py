"""What every backbone is before its head: maps from images, in stages that can be tapped or frozen."""

from torch import Tensor, nn


class Trunk(nn.Module):
    """Normalised images (B, 3, H, W) -> maps (B, channels, h, w), through `stages` in turn."""

    channels: int
    stages: tuple[str, ...]
    stage_channels: dict[str, int]  # maps after each stage
    pixel_mean: tuple[float, ...]  # of the images it was trained on, on the scale 0..255
    pixel_std: tuple[float, ...]
    bgr: bool = False

    def forward(self, images: Tensor) -> Tensor:
        maps = images
        for name in self.stages:
            maps = self.stage(name, maps)
        return maps

    def stage(self, name: str, maps: Tensor) -> Tensor:
        """Maps after one stage: (B, channels before, h, w) -> (B, stage_channels[name], h', w')."""
        for module in self.modules_of(name):
            maps = module(maps)
        return maps

    def modules_of(self, name: str) -> list[nn.Module]:
        """The modules of one stage, in the order in which they run: as a rule one, of the same name."""
        self.require_stage(name)
        return [self.get_submodule(name)]

    def require_stage(self, name: str) -> None:
        """A ValueError that lists the stages, unless `name` is one."""
        if name not in self.stages:
            raise ValueError(f"no stage {name!r} in {type(self).__name__}: take one of {', '.join(self.stages)}")
