"""GoogLeNet against the network written out from Szegedy et al. (2015)."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.backbones.inception import BNInception, GoogLeNet, local_response_norm
from proxygml.backbones.weights import load_weights


@pytest.fixture(scope="module")
def trunk() -> GoogLeNet:
    torch.manual_seed(0)
    return GoogLeNet().eval()


def test_size_is_the_published_one(trunk):
    # 6,998,552 without the two auxiliary classifiers, 1,025,000 of them in the main one.
    assert sum(parameter.numel() for parameter in trunk.parameters()) == 6_998_552 - 1_025_000
    assert not list(trunk.buffers())  # no batch normalization


def test_output_equals_the_network_written_out(trunk):
    trunk = copy.deepcopy(trunk).double()
    weights = trunk.state_dict()

    def run(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = weights[f"{name}.weight"]
        return F.conv2d(x, weight, weights[f"{name}.bias"], stride, padding=weight.shape[-1] // 2).relu()

    def halve(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, ceil_mode=True)

    images = torch.randn(1, 3, 96, 64).double() * 50
    maps = lrn_by_hand(halve(run("conv1_7x7_s2", images, stride=2)))
    maps = halve(lrn_by_hand(run("conv2_3x3", run("conv2_3x3_reduce", maps))))
    for block in ("3a", "3b", "pool", "4a", "4b", "4c", "4d", "4e", "pool", "5a", "5b"):
        if block == "pool":
            maps = halve(maps)
            continue
        name = f"inception_{block}"
        branches = [
            run(f"{name}_1x1", maps),
            run(f"{name}_3x3", run(f"{name}_3x3_reduce", maps)),
            run(f"{name}_5x5", run(f"{name}_5x5_reduce", maps)),
            run(f"{name}_pool_proj", F.max_pool2d(maps, 3, 1, 1)),
        ]
        maps = torch.cat(branches, dim=1)
    with torch.no_grad():
        torch.testing.assert_close(trunk(images), maps)
    assert maps.gt(0).double().mean() > 0.1  # not all zeros


def lrn_by_hand(maps: Tensor) -> Tensor:
    """x_c / (1 + (alpha / 5) * sum of x^2 over channels c-2..c+2) ^ .75 with alpha 1e-4, as Caffe defines it."""
    columns = []
    for channel in range(maps.shape[1]):
        energy = maps[:, max(channel - 2, 0) : channel + 3].square().sum(dim=1)
        columns.append(maps[:, channel] / (1 + 1e-4 / 5 * energy) ** 0.75)
    return torch.stack(columns, dim=1)


def test_local_response_norm_is_caffes():
    maps = torch.randn(2, 9, 3, 3) * 200
    torch.testing.assert_close(local_response_norm(maps), lrn_by_hand(maps))


@torch.no_grad()
@pytest.mark.parametrize("size", [(32, 32), (100, 75), (113, 127)])
def test_any_image_size(trunk, size):
    assert trunk(torch.randn(1, 3, *size)).shape[:2] == (1, 1024)


@torch.no_grad()
def test_shapes_of_the_stages_that_hdc_taps(trunk):
    x = torch.randn(1, 3, 224, 224)
    shapes = {}
    for name in trunk.stages:
        x = trunk.stage(name, x)
        shapes[name] = tuple(x.shape[1:])
    taps = [shapes[name] for name in ("4a", "4d", "5b")]
    assert taps == [(512, 14, 14), (528, 14, 14), (1024, 7, 7)]  # Szegedy et al., Table 1


@torch.no_grad()
def test_random_initialization_keeps_the_scale(trunk):
    assert 1 < trunk(torch.randn(4, 3, 64, 64) * 60).std() < 1000


def test_caffe_ported_file_loads_without_its_classifiers(trunk, tmp_path):
    tensors = trunk.state_dict()
    for name in ("loss1_conv", "loss1_fc_1", "loss2_classifier", "loss3_classifier_1"):
        tensors[f"{name}.weight"] = torch.zeros(2, 2)
    torch.save(tensors, tmp_path / "googlenet.pth")
    target = GoogLeNet()
    result = load_weights(target, tmp_path / "googlenet.pth")
    assert (result.missing, result.unexpected) == ((), ())
    assert torch.equal(target.inception_4d_5x5.weight, trunk.inception_4d_5x5.weight)


def test_bn_inception_weights_are_rejected(trunk, tmp_path):
    torch.save(BNInception().state_dict(), tmp_path / "bn.pth")
    with pytest.raises(ValueError, match=r"inception_3a_3x3_reduce.weight \(96, 192, 1, 1\) .*\(64, 192, 1, 1\)"):
        load_weights(trunk, tmp_path / "bn.pth")


def test_pixels_are_bgr_minus_the_caffe_mean(trunk):
    assert (trunk.bgr, trunk.pixel_mean, trunk.pixel_std) == (True, (104, 117, 123), (1, 1, 1))
    assert "torchvision" in trunk.weights_from
