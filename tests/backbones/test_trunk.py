"""The interface that every trunk implements; layers are tested in the file of each trunk."""

import pytest
import torch

from proxygml.backbones import BACKBONES, build_trunk
from proxygml.backbones.trunk import Trunk


@pytest.fixture(params=BACKBONES, scope="module")
def trunk(request: pytest.FixtureRequest) -> Trunk:
    torch.manual_seed(0)
    return build_trunk(request.param)


@torch.no_grad()
def test_forward_runs_all_stages(trunk: Trunk) -> None:
    trunk.eval()
    x = images = torch.randn(2, 3, 64, 64)
    for name in trunk.stages:
        x = trunk.stage(name, x)
        assert x.shape[1] == trunk.stage_channels[name]
    assert x.shape[1] == trunk.channels
    assert torch.equal(x, trunk(images))


def test_stages_cover_every_parameter_once(trunk: Trunk) -> None:
    parameters = [p for name in trunk.stages for module in trunk.stage_modules(name) for p in module.parameters()]
    assert len(parameters) == len({id(p) for p in parameters})
    assert {id(p) for p in parameters} == {id(p) for p in trunk.parameters()}


def test_every_parameter_gets_a_gradient(trunk: Trunk) -> None:
    trunk.train()(torch.randn(4, 3, 64, 64)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in trunk.parameters())
