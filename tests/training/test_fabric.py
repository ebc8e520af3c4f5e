"""What is set for the devices of a run."""

from types import SimpleNamespace

import pytest
import torch

from proxygml.training import fabric
from proxygml.training.recipe import Recipe


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_cudnn_chooses_the_fastest_convolutions(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = SimpleNamespace(
        device=torch.device(device), launch=lambda: None, seed_everything=lambda seed, verbose: None
    )
    monkeypatch.setattr(fabric, "Fabric", lambda **_: launched)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)  # restored afterwards
    fabric.start_fabric(Recipe(device=device))
    assert torch.backends.cudnn.benchmark == (device == "cuda")


def test_several_nodes_are_told_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="several nodes need MASTER_ADDR, MASTER_PORT, NODE_RANK, or torchrun: docs/"):
        fabric.start_fabric(Recipe(nodes=2))
