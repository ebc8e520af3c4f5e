"""A small convolutional trunk for small images that trains from random weights in minutes."""

from torch import Tensor, nn

from proxygml.backbones.trunk import Trunk


class ConvNet(Trunk):
    """Four blocks of convolution, batch norm, ReLU and 2x2 pooling: (B, 3, H, W) -> (B, 256, H/16, W/16)."""

    channels = 256
    stages = ("block1", "block2", "block3", "block4")
    pixel_mean = (127.5, 127.5, 127.5)
    pixel_std = (127.5, 127.5, 127.5)

    def __init__(self) -> None:
        super().__init__()
        self.stage_channels = dict(zip(self.stages, (32, 64, 128, self.channels), strict=True))
        in_channels = 3
        for name, out_channels in self.stage_channels.items():
            conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
            block = nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True), nn.MaxPool2d(2))
            self.add_module(name, block)
            in_channels = out_channels

    def forward(self, images: Tensor) -> Tensor:
        if min(images.shape[-2:]) < 16:
            raise ValueError(f"convnet halves images four times: expected 16 pixels or more, got {images.shape[-1]}")
        return super().forward(images)
