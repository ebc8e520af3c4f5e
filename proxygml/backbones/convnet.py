"""A small convolutional trunk that learns from nothing in minutes, for small images."""

from torch import Tensor, nn

from proxygml.backbones.trunk import Trunk


class ConvNet(Trunk):
    """Four blocks of convolution, batch norm, ReLU and 2 x 2 pooling: images (B, 3, H, W) -> (B, 256, H/16, W/16)."""

    stages = ("block1", "block2", "block3", "block4")
    channels = 256
    pixel_mean = (127.5, 127.5, 127.5)
    pixel_std = (127.5, 127.5, 127.5)

    def __init__(self) -> None:
        super().__init__()
        self.stage_channels = dict(zip(self.stages, (32, 64, 128, self.channels), strict=True))
        before = 3
        for name, after in self.stage_channels.items():
            self.add_module(
                name,
                nn.Sequential(
                    nn.Conv2d(before, after, 3, padding=1, bias=False),
                    nn.BatchNorm2d(after),
                    nn.ReLU(inplace=True),
                    nn.MaxPool2d(2),
                ),
            )
            before = after

    def forward(self, images: Tensor) -> Tensor:
        if min(images.shape[-2:]) < 16:
            raise ValueError(f"convnet halves images four times: expected 16 pixels or more, got {images.shape[-1]}")
        return super().forward(images)
