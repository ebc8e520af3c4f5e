"""Folded batch normalization: equal values and gradients."""

import pytest
import torch
from torch import Tensor, nn

from proxygml.backbones.folding import conv_bn


def layers(*, bias: bool, groups: int) -> tuple[nn.Conv2d, nn.BatchNorm2d, Tensor]:
    """A convolution, a batch normalization with random statistics and weights, and images, all in float64."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6 * groups, 3, stride=2, padding=1, groups=groups, bias=bias).double()
    bn = nn.BatchNorm2d(6 * groups).double()
    for tensor in (bn.running_mean, bn.running_var, bn.weight.data, bn.bias.data):
        tensor.uniform_(0.5, 2)
    return conv, bn, torch.randn(3, 4, 7, 5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_frozen_statistics_give_equal_values_and_gradients(bias: bool, groups: int) -> None:
    conv, bn, images = layers(bias=bias, groups=groups)
    bn.eval()
    tensors = [images, *conv.parameters(), *bn.parameters()]
    weights = torch.randn_like(conv(images))
    folded, expected = conv_bn(conv, bn, images), bn(conv(images))
    torch.testing.assert_close(folded, expected)
    gradients = (torch.autograd.grad((output * weights).sum(), tensors) for output in (folded, expected))
    torch.testing.assert_close(*gradients)


def test_training_updates_the_statistics() -> None:
    conv, bn, images = layers(bias=False, groups=1)
    before = bn.running_mean.clone()
    maps = conv_bn(conv, bn, images)
    assert not torch.equal(bn.running_mean, before)
    torch.testing.assert_close(maps.mean(dim=(0, 2, 3)), bn.bias)
