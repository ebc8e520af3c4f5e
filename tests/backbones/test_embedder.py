"""The Embedder: images to embeddings."""

import pytest
import torch

from proxygml.backbones import Embedder, build_trunk
from proxygml.backbones.trunk import Trunk


class Identity(Trunk):
    """A trunk that returns its input."""

    channels, pixel_mean, pixel_std, bgr = 3, (10.0, 20.0, 30.0), (1.0, 2.0, 5.0), False
    stages = ("all",)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images


class Reversed(Identity):
    bgr = True


def test_normalize() -> None:
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(Embedder(build_trunk("convnet"), 7)(images).norm(dim=1), torch.ones(4))
    raw = Embedder(build_trunk("convnet"), 7, normalize=False)(images)
    assert raw.shape == (4, 7)
    assert (raw.norm(dim=1) - 1).abs().min() > 1e-3


@pytest.mark.parametrize(("trunk", "expected"), [(Identity(), (90.0, 40.0, 14.0)), (Reversed(), (90.0, 40.0, 14.0))])
def test_pixels_are_scaled_in_the_trunks_channel_order(trunk: Identity, expected: tuple) -> None:
    order = [2, 1, 0] if trunk.bgr else [0, 1, 2]
    pixels = torch.tensor([100, 100, 100], dtype=torch.uint8)[order].view(1, 3, 1, 1)
    embedder = Embedder(trunk, 3, normalize=False)
    with torch.no_grad():
        embedder.head.weight.copy_(torch.eye(3))
        embedder.head.bias.zero_()
    torch.testing.assert_close(embedder(pixels)[0], torch.tensor(expected))
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    assert embedder(red)[0, 2 if trunk.bgr else 0] > 0


@pytest.mark.parametrize(("pooling", "expected"), [("average", 2.0), ("max", 5.0), ("average+max", 7.0)])
def test_pooling(pooling: str, expected: float) -> None:
    embedder = Embedder(Identity(), 3, pooling=pooling, normalize=False)
    embedder.head = torch.nn.Identity()
    maps = torch.tensor([0.0, 1.0, 2.0, 5.0]).view(1, 1, 2, 2)
    images = torch.cat([maps + 10, 2 * maps + 20, 5 * maps + 30], dim=1)  # pixels that are scaled to `maps`
    torch.testing.assert_close(embedder(images), torch.full((1, 3), expected))
    features = torch.stack(embedder.features(images), dim=1)  # (1, 2, 3)
    torch.testing.assert_close(embedder(features), torch.full((1, 3), expected))


def test_pixel_statistics_are_not_in_the_state_dict() -> None:
    assert not [name for name in Embedder(build_trunk("convnet"), 2).state_dict() if "pixel" in name]


def test_unknown_backbone() -> None:
    with pytest.raises(ValueError, match=r"a backbone, got 'resnet9000'.*known: convnet"):
        build_trunk("resnet9000")
