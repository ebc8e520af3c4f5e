"""BN-Inception against the list of layers of the published checkpoint."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.backbones.inception import BNInception
from proxygml.backbones.weights import load_weights

LAYERS = Path(__file__).parents[3] / "shared" / "data" / "bn_inception_layers.tsv"


@pytest.fixture(scope="module")
def layers() -> dict[str, dict[str, str]]:
    if not LAYERS.is_file():
        pytest.skip(f"needs the list of published layers {LAYERS}")
    lines = [line.split("\t") for line in LAYERS.read_text().splitlines() if not line.startswith("#")]
    rows = [dict(zip(lines[0], line, strict=False)) for line in lines[1:]]
    return {row["name"]: row for row in rows if row["kind"] != "linear"}


@pytest.fixture(scope="module")
def trunk() -> BNInception:
    torch.manual_seed(0)
    trunk = BNInception().eval()
    randomize_statistics(trunk)
    return trunk


def published_shapes(layers: dict[str, dict[str, str]]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, row in layers.items():
        if row["kind"] == "conv":
            before, after = map(int, row["channels"].split("->"))
            kernel = int(re.search(r"kernel (\d+)", row["geometry"])[1])
            shapes[f"{name}.weight"] = (after, before, kernel, kernel)
            shapes[f"{name}.bias"] = (after,)
        elif row["kind"] == "batchnorm":
            for part in ("weight", "bias", "running_mean", "running_var"):
                shapes[f"{name}.{part}"] = (int(row["channels"]),)
    return shapes


def test_names_and_shapes_match_the_published_layers(trunk, layers):
    ours = {name: tuple(tensor.shape) for name, tensor in trunk.state_dict().items() if tensor.ndim}
    assert ours == published_shapes(layers)


def test_size_and_names_are_the_published_ones(trunk):
    # The whole network has 11,295,240 parameters, 1,025,000 of them in the classifier.
    assert sum(parameter.numel() for parameter in trunk.parameters()) == 11_295_240 - 1_025_000
    shapes = {name: tuple(tensor.shape) for name, tensor in trunk.state_dict().items()}
    assert shapes["conv1_7x7_s2.weight"] == (64, 3, 7, 7)
    assert shapes["inception_3c_double_3x3_2.weight"] == (96, 96, 3, 3)
    assert shapes["inception_4e_3x3_reduce.bias"] == (128,)
    assert shapes["inception_5b_pool_proj_bn.running_var"] == (128,)
    assert "inception_3c_1x1.weight" not in shapes
    assert "inception_4e_pool_proj.weight" not in shapes


def test_output_equals_a_network_run_from_the_list_of_layers(trunk, layers):
    trunk = copy.deepcopy(trunk).double()
    weights = trunk.state_dict()

    def run(name: str, x: Tensor) -> Tensor:
        row = layers[name]
        size, stride, padding = map(int, re.findall(r"(?:kernel|stride|pad) (\d+)", row["geometry"]))
        if row["kind"] == "maxpool":
            return F.max_pool2d(x, size, stride, padding, ceil_mode=True)
        if row["kind"] == "avgpool":
            return F.avg_pool2d(x, size, stride, padding, ceil_mode=True)
        x = F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], stride, padding)
        mean, variance, scale, shift = (
            weights[f"{name}_bn.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        assert layers[f"{name}_bn"]["geometry"] == "eps 1e-05 momentum 0.1"
        return F.batch_norm(x, mean, variance, scale, shift, eps=1e-5).relu()

    x = images = torch.randn(1, 3, 96, 64).double() * 50
    for name in ("conv1_7x7_s2", "pool1_3x3_s2", "conv2_3x3_reduce", "conv2_3x3", "pool2_3x3_s2"):
        x = run(name, x)
    for block in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        branches = []
        for branch in (
            ("1x1",),
            ("3x3_reduce", "3x3"),
            ("double_3x3_reduce", "double_3x3_1", "double_3x3_2"),
            ("pool", "pool_proj"),
        ):
            names = [f"inception_{block}_{layer}" for layer in branch if f"inception_{block}_{layer}" in layers]
            output = x
            for name in names:
                output = run(name, output)
            branches += [output] if names else []
        x = torch.cat(branches, dim=1)
    with torch.no_grad():
        torch.testing.assert_close(trunk(images), x)
    assert x.gt(0).double().mean() > 0.1  # not all zeros


def randomize_statistics(trunk: BNInception) -> None:
    for name, buffer in trunk.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)


@torch.no_grad()
@pytest.mark.parametrize("size", [(32, 32), (100, 75), (112, 112), (113, 127), (227, 33)])
def test_any_image_size(trunk, size):
    assert trunk(torch.randn(1, 3, *size)).shape[:2] == (1, 1024)


@torch.no_grad()
def test_output_shape(trunk):
    assert trunk(torch.randn(1, 3, 224, 224)).shape == (1, 1024, 7, 7)


@torch.no_grad()
@pytest.mark.parametrize("size", [6, 7])
def test_pooling_and_convolution_align(trunk, size):
    x = torch.randn(1, 320, size, size)
    pooled = trunk.stage("3c", x)[0, -320:]
    first = size % 2  # odd maps are padded by one, even maps are not, as published
    for row in range(pooled.shape[1]):
        for column in range(pooled.shape[2]):
            top, left = 2 * row - first, 2 * column - first
            window = x[0, :, max(top, 0) : top + 3, max(left, 0) : left + 3]
            torch.testing.assert_close(pooled[:, row, column], window.amax(dim=(1, 2)))


@torch.no_grad()
def test_hdc_taps_have_the_published_widths(trunk):
    assert (trunk.stage_channels["4a"], trunk.stage_channels["4d"]) == (576, 608)


def test_random_initialization_keeps_the_scale():
    torch.manual_seed(0)
    with torch.no_grad():
        assert 1 < BNInception().eval()(torch.randn(4, 3, 64, 64) * 60).std() < 1000


def test_published_file_format_loads(trunk, tmp_path):
    # As published: batch normalization as rows (1, n), no num_batches_tracked, with the classifier.
    tensors = {
        name: tensor[None] if "_bn." in name else tensor
        for name, tensor in trunk.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    tensors |= {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}
    torch.save(tensors, tmp_path / "bn_inception.pth")
    target = BNInception().eval()
    result = load_weights(target, tmp_path / "bn_inception.pth")
    assert (result.missing, result.unexpected) == ((), ())
    assert len(result.loaded) == len(tensors) - 2
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(target(images), trunk(images))


def test_pixels_are_bgr_minus_the_caffe_mean(trunk):
    assert (trunk.bgr, trunk.pixel_mean, trunk.pixel_std) == (True, (104, 117, 128), (1, 1, 1))
    assert "bn_inception-52deb4733.pth" in trunk.weights_from
