"""What every trunk promises; its own layers are tested in its own file."""

import pytest
import torch

from proxygml.backbones import BACKBONES, build_trunk
from proxygml.backbones.trunk import Trunk


@pytest.fixture(params=BACKBONES)
def trunk(request: pytest.FixtureRequest) -> Trunk:
    torch.manual_seed(0)
    return build_trunk(request.param)


@torch.no_grad()
def test_stages_in_a_row_are_the_forward_pass(trunk: Trunk) -> None:
    trunk.eval()
    maps = images = torch.randn(2, 3, 64, 64)
    for name in trunk.stages:
        maps = trunk.stage(name, maps)
        assert maps.shape[1] == trunk.stage_channels[name]
    assert maps.shape[1] == trunk.channels
    assert torch.equal(maps, trunk(images))


def test_stages_hold_every_parameter_once(trunk: Trunk) -> None:
    held = [
        parameter for name in trunk.stages for module in trunk.modules_of(name) for parameter in module.parameters()
    ]
    assert len(held) == len({id(parameter) for parameter in held})
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in trunk.parameters()}


def test_every_parameter_learns_from_the_random_start(trunk: Trunk) -> None:
    trunk(torch.randn(4, 3, 64, 64)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in trunk.parameters())


def test_an_unknown_stage_is_refused_with_the_names_of_the_stages(trunk: Trunk) -> None:
    for ask in (trunk.modules_of, lambda name: trunk.stage(name, torch.zeros(1))):
        with pytest.raises(ValueError, match=f"no stage 'no such' in .*{', '.join(trunk.stages)}"):
            ask("no such")
