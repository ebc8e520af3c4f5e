"""Pickles that ask for gigabytes or hours are refused before torch reads them; what people save is read."""

import os
import pickle
import zipfile

import pytest
import torch
from torch import nn

from proxygml.backbones.weights import read_tensors

TENSORS = {"conv.weight": torch.arange(12.0).reshape(4, 3), "norm.num_batches_tracked": torch.tensor(3)}
TENSOR = (  # with four bytes of data, a million rows of them
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0000X\3\0\0\0cpuK\1tQ"
    b"K\0J\0\0\x10\0\x85K\0\x85\x89ccollections\nOrderedDict\n)RtR"
)
BOMBS = {
    "a billion bytes": b"c__builtin__\nbytearray\nJ\0\0\0\x40\x85R",
    "a tensor of its own": b"}K\1ctorch\nFloatTensor\nJ\0\0\0\x40\x85Rs",
    "a copy of a small tensor": b"}K\1ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n("
    + TENSOR
    + b"ctorch\nfloat64\nX\3\0\0\0cpu\x89tRs",
    "pairs of pairs": b"}))\x86" + 60 * b"q\1h\1\x86" + b"K\1s",
    "a million nested tuples": b"})" + 10**6 * b"\x85" + b"K\1s",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_not_unpickled(tmp_path, monkeypatch, name):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpickled"))
    pickled = b"\x80\2" + BOMBS[name] + b"."
    with zipfile.ZipFile(tmp_path / "zip.pth", "w") as archive:
        archive.writestr("weights/DATA.pkl", pickled)  # torch finds names in any case
        archive.writestr("weights/data/0", bytes(4))
    first = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {}))
    (tmp_path / "legacy.pth").write_bytes(first + pickled + pickle.dumps([], 2))
    for file in ("zip.pth", "legacy.pth"):
        with pytest.raises(ValueError, match="contains Python objects that are not tensors"):
            read_tensors(tmp_path / file)


def test_compressed_tensors_are_not_unpacked(tmp_path):
    torch.save({"conv.weight": torch.zeros(10**5)}, tmp_path / "plain.pth")
    packed = zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "plain.pth") as plain, packed:
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member))
    read_tensors(tmp_path / "plain.pth")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        read_tensors(tmp_path / "packed.pth")


def test_values_that_training_scripts_save_are_read(tmp_path):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], betas=(0.8, 0.9))
    state = {"model": TENSORS, "seed": 2**70, "name": "ä", "data": b"x" * 300, "size": torch.Size([2])}
    state |= {"optimizer": optimizer.state_dict(), "parameter": nn.Parameter(torch.ones(1)), "type": torch.float16}
    for new in (True, False):
        torch.save(state, tmp_path / "all.pt", _use_new_zipfile_serialization=new)
        assert set(read_tensors(tmp_path / "all.pt")) == set(TENSORS)


def test_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"a\.pth is a pipe or device: expected a file"):
        read_tensors(tmp_path / "a.pth")
