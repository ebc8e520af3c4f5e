"""ResNet against the network written out and against transformers' ResNet."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.backbones.resnet import ResNet
from proxygml.backbones.weights import load_weights


def randomized(depth: int) -> ResNet:
    """A trunk with random batch normalization statistics, so that every constant affects the output."""
    torch.manual_seed(0)
    trunk = ResNet(depth).eval()
    for name, tensor in trunk.state_dict().items():
        if name.endswith("running_mean"):
            tensor.normal_(0, 0.1)
        elif name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
            tensor.uniform_(0.5, 1.5)
    return trunk.double()


@pytest.fixture(scope="module")
def resnet18() -> ResNet:
    return randomized(18)


@pytest.fixture(scope="module")
def resnet50() -> ResNet:
    return randomized(50)


# torchvision's numbers without fc (512,000 + 1,000 and 2,048,000 + 1,000).
@pytest.mark.parametrize(
    ("fixture", "parameters", "tensors"),
    [("resnet18", 11_689_512 - 513_000, 120), ("resnet50", 25_557_032 - 2_049_000, 318)],
)
def test_size_is_torchvisions(request, fixture, parameters, tensors):
    trunk = request.getfixturevalue(fixture)
    assert sum(parameter.numel() for parameter in trunk.parameters()) == parameters
    assert len(trunk.state_dict()) == tensors


def test_names_are_torchvisions(resnet50):
    shapes = {name: tuple(tensor.shape) for name, tensor in resnet50.state_dict().items()}
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["bn1.running_mean"] == (64,)
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes["layer2.0.downsample.1.bias"] == (512,)
    assert shapes["layer3.5.conv3.weight"] == (1024, 256, 1, 1)
    assert shapes["layer4.2.bn3.num_batches_tracked"] == ()
    assert not any("bias" in name for name in shapes if "conv" in name)


@pytest.mark.parametrize("depth", [18, 50])
def test_output_equals_the_network_written_out(request, depth):
    trunk = request.getfixturevalue(f"resnet{depth}")
    weights = trunk.state_dict()

    def run(conv: str, norm: str, x: Tensor, stride: int) -> Tensor:
        weight = weights[f"{conv}.weight"]
        x = F.conv2d(x, weight, None, stride, padding=weight.shape[-1] // 2)
        parts = [weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *parts, eps=1e-5)

    images = torch.randn(1, 3, 64, 96).double()
    x = F.max_pool2d(run("conv1", "bn1", images, 2).relu(), 3, 2, 1)
    for block in sorted({name[:8] for name in weights if name.startswith("layer")}):
        stride = 2 if block.endswith(".0") and block != "layer1.0" else 1
        if depth == 18:
            residual = run(f"{block}.conv1", f"{block}.bn1", x, stride).relu()
            residual = run(f"{block}.conv2", f"{block}.bn2", residual, 1)
        else:
            residual = run(f"{block}.conv1", f"{block}.bn1", x, 1).relu()
            residual = run(f"{block}.conv2", f"{block}.bn2", residual, stride).relu()
            residual = run(f"{block}.conv3", f"{block}.bn3", residual, 1)
        if f"{block}.downsample.0.weight" in weights:
            x = run(f"{block}.downsample.0", f"{block}.downsample.1", x, stride)
        x = (x + residual).relu()
    with torch.no_grad():
        torch.testing.assert_close(trunk(images), x)
    assert x.gt(0).double().mean() > 0.1  # not all zeros


@torch.no_grad()
@pytest.mark.slow
def test_output_equals_transformers(resnet50):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: proxygml[hub]")
    oracle = transformers.ResNetModel(transformers.ResNetConfig()).eval().double()

    def renamed(name: str) -> str:
        name = re.sub(r"^(conv|bn)1\.", r"embedder.embedder.\1.", name)
        name = re.sub(r"^layer(\d)\.(\d+)\.", lambda at: f"encoder.stages.{int(at[1]) - 1}.layers.{at[2]}.", name)
        name = re.sub(r"\.(conv|bn)(\d)\.", lambda at: f".layer.{int(at[2]) - 1}.{at[1]}.", name)
        name = name.replace("downsample.0", "shortcut.conv").replace("downsample.1", "shortcut.bn")
        return name.replace(".conv.", ".convolution.").replace(".bn.", ".normalization.")

    oracle.load_state_dict({renamed(name): tensor for name, tensor in resnet50.state_dict().items()})
    images = torch.randn(1, 3, 64, 96).double()
    torch.testing.assert_close(resnet50(images), oracle(images).last_hidden_state)


@torch.no_grad()
@pytest.mark.slow
def test_output_shape(resnet50, resnet18):
    assert resnet50(torch.randn(1, 3, 224, 224).double()).shape == (1, resnet50.channels, 7, 7) == (1, 2048, 7, 7)
    assert resnet18(torch.randn(1, 3, 64, 64).double()).shape == (1, 512, 2, 2)


def test_torchvision_file_loads_without_its_classifier(resnet18, tmp_path):
    tensors = resnet18.state_dict() | {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    torch.save(tensors, tmp_path / "resnet18.pth")
    trunk = ResNet(18)
    result = load_weights(trunk, tmp_path / "resnet18.pth")
    assert (len(result.loaded), result.missing, result.unexpected) == (120, (), ())
    assert torch.equal(trunk.layer4[1].conv2.weight, tensors["layer4.1.conv2.weight"].float())


def test_pixels_are_rgb_with_imagenet_statistics(resnet18):
    assert resnet18.bgr is False
    assert resnet18.pixel_mean == pytest.approx([255 * value for value in (0.485, 0.456, 0.406)])
    assert resnet18.pixel_std == pytest.approx([255 * value for value in (0.229, 0.224, 0.225)])
