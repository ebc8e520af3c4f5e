"""ResNet against the network written out and against transformers' ResNet, and as a trunk."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.backbones.resnet import ResNet
from proxygml.backbones.weights import load_weights


def randomised(depth: int) -> ResNet:
    """A trunk whose batch normalisation is not at its start, so that every constant shows in the maps."""
    torch.manual_seed(0)
    trunk = ResNet(depth).eval()
    for name, tensor in trunk.state_dict().items():
        if name.endswith("running_mean"):
            tensor.normal_(0, 0.1)
        elif name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
            tensor.uniform_(0.5, 1.5)
    return trunk


@pytest.fixture
def trunk() -> ResNet:
    return randomised(50)


# Parameters and tensors of torchvision's networks without fc (512,000 + 1,000 and 2,048,000 + 1,000).
@pytest.mark.parametrize(
    ("depth", "parameters", "tensors"),
    [(18, 11_689_512 - 513_000, 120), (34, 21_797_672 - 513_000, 216), (50, 25_557_032 - 2_049_000, 318)],
)
def test_parameters_and_tensors_are_as_many_as_torchvisions(depth, parameters, tensors):
    trunk = ResNet(depth)
    assert sum(parameter.numel() for parameter in trunk.parameters()) == parameters
    assert len(trunk.state_dict()) == tensors


def test_names_are_torchvisions(trunk):
    shapes = {name: tuple(tensor.shape) for name, tensor in trunk.state_dict().items()}
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["bn1.running_mean"] == (64,)
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes["layer2.0.downsample.1.bias"] == (512,)
    assert shapes["layer3.5.conv3.weight"] == (1024, 256, 1, 1)
    assert shapes["layer4.2.bn3.num_batches_tracked"] == ()
    assert not any("bias" in name for name in shapes if "conv" in name)


@pytest.mark.parametrize("depth", [18, 50])
def test_maps_equal_the_network_written_out(depth):
    trunk = randomised(depth).double()
    weights = trunk.state_dict()

    def run(convolution: str, norm: str, maps: Tensor, stride: int) -> Tensor:
        weight = weights[f"{convolution}.weight"]
        maps = F.conv2d(maps, weight, None, stride, padding=weight.shape[-1] // 2)
        parts = [weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(maps, *parts, eps=1e-5)

    images = torch.randn(2, 3, 64, 96).double()
    maps = F.max_pool2d(run("conv1", "bn1", images, 2).relu(), 3, 2, 1)
    for block in sorted({name[:8] for name in weights if name.startswith("layer")}):
        stride = 2 if block.endswith(".0") and block != "layer1.0" else 1
        if depth == 18:
            inner = run(f"{block}.conv1", f"{block}.bn1", maps, stride).relu()
            inner = run(f"{block}.conv2", f"{block}.bn2", inner, 1)
        else:
            inner = run(f"{block}.conv1", f"{block}.bn1", maps, 1).relu()
            inner = run(f"{block}.conv2", f"{block}.bn2", inner, stride).relu()
            inner = run(f"{block}.conv3", f"{block}.bn3", inner, 1)
        if f"{block}.downsample.0.weight" in weights:
            maps = run(f"{block}.downsample.0", f"{block}.downsample.1", maps, stride)
        maps = (maps + inner).relu()
    with torch.no_grad():
        torch.testing.assert_close(trunk(images), maps)
    assert maps.gt(0).double().mean() > 0.1  # the comparison is of live maps


@torch.no_grad()
def test_maps_equal_those_of_transformers(trunk):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: proxygml[hub]")
    oracle = transformers.ResNetModel(transformers.ResNetConfig()).eval().double()

    def renamed(name: str) -> str:
        name = re.sub(r"^(conv|bn)1\.", r"embedder.embedder.\1.", name)
        name = re.sub(r"^layer(\d)\.(\d+)\.", lambda at: f"encoder.stages.{int(at[1]) - 1}.layers.{at[2]}.", name)
        name = re.sub(r"\.(conv|bn)(\d)\.", lambda at: f".layer.{int(at[2]) - 1}.{at[1]}.", name)
        name = name.replace("downsample.0", "shortcut.conv").replace("downsample.1", "shortcut.bn")
        return name.replace(".conv.", ".convolution.").replace(".bn.", ".normalization.")

    oracle.load_state_dict({renamed(name): tensor for name, tensor in trunk.state_dict().items()})
    images = torch.randn(2, 3, 64, 96).double()
    torch.testing.assert_close(trunk.double()(images), oracle(images).last_hidden_state)


@torch.no_grad()
def test_gives_2048_maps_of_7_by_7_at_224_pixels(trunk):
    assert trunk(torch.randn(1, 3, 224, 224)).shape == (1, trunk.channels, 7, 7) == (1, 2048, 7, 7)


def test_an_unknown_depth_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"depth 51.*18, 34, 50"):
        ResNet(51)


def test_a_torchvision_file_loads_without_its_classifier(trunk, tmp_path):
    tensors = ResNet(50).state_dict() | {"fc.weight": torch.zeros(1000, 2048), "fc.bias": torch.zeros(1000)}
    torch.save(tensors, tmp_path / "resnet50.pth")
    outcome = load_weights(trunk, tmp_path / "resnet50.pth")
    assert (len(outcome.loaded), outcome.missing, outcome.unexpected) == (318, (), ())
    assert torch.equal(trunk.layer4[2].conv3.weight, tensors["layer4.2.conv3.weight"])


def test_pixels_are_rgb_with_imagenets_mean_and_deviation(trunk):
    assert trunk.bgr is False
    assert trunk.pixel_mean == pytest.approx([255 * value for value in (0.485, 0.456, 0.406)])
    assert trunk.pixel_std == pytest.approx([255 * value for value in (0.229, 0.224, 0.225)])
