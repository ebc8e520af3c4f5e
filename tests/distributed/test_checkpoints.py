"""Proxies that processes have written a part of each."""

from pathlib import Path

import pytest
import torch

from proxygml.distributed.checkpoints import checksums, load_shards, save_shards


def test_round_trip_and_flipped_bit(tmp_path: Path) -> None:
    folder, written = tmp_path / "proxies-0001", {"proxies": torch.randn(5, 2, 3), "exp_avg": torch.ones(5, 2, 3)}
    save_shards(folder, written, 5)
    expected = checksums(folder)
    (path,) = folder.glob("*.safetensors")
    found = {name: torch.zeros_like(tensor) for name, tensor in written.items()}
    load_shards(folder, found, 5, expected)
    assert all(found[name].equal(tensor) for name, tensor in written.items())
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    remedy = rf"remove {tmp_path}/last.pt to continue from the epoch before"
    with pytest.raises(ValueError, match=rf"{path} is damaged: {remedy}"):
        load_shards(folder, found, 5, expected)
    path.unlink()
    with pytest.raises(ValueError, match=rf"expected 1 files of proxies in {folder}, got 0: {remedy}"):
        load_shards(folder, found, 5, expected)
