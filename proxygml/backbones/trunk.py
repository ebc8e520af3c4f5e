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
    takes_maps: bool = False  # instead of images, once its first stages are left out
    map_channels: int  # of the maps that it then takes

    def forward(self, images: Tensor) -> Tensor:
        if self.takes_maps and images.shape[1] != self.map_channels:
            raise ValueError(
                f"{type(self).__name__} from stage {self.stages[0]} on takes maps of {self.map_channels} channels, "
                f"got {images.shape[1]}: name the network and the stage that they were made for"
            )
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

    def begin_at(self, name: str) -> None:
        """Leave out the stages before one: what comes in are then the maps that those have made of images."""
        self.require_stage(name)
        place = self.stages.index(name)
        for early in self.stages[:place]:
            for module in self.modules_of(early):
                module.requires_grad_(False)
        if place > 0:
            self.takes_maps, self.map_channels = True, self.stage_channels[self.stages[place - 1]]
        self.stages = self.stages[place:]

    def require_stage(self, name: str) -> None:
        """A ValueError that lists the stages, unless `name` is one."""
        if name not in self.stages:
            raise ValueError(f"no stage {name!r} in {type(self).__name__}: take one of {', '.join(self.stages)}")
