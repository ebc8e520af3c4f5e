"""What is set for the devices of a run."""

from types import SimpleNamespace

import pytest
import torch

from proxygml.distributed import fabric


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_cudnn_chooses_the_fastest_convolutions(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = SimpleNamespace(
        device=torch.device(device), launch=lambda: None, seed_everything=lambda seed, verbose: None
    )
    monkeypatch.setattr(fabric, "Fabric", lambda **_: launched)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)  # restored afterwards
    fabric.launch_fabric(device=device)
    assert torch.backends.cudnn.benchmark == (device == "cuda")
