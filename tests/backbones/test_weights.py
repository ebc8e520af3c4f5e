"""Weight files: formats, wrappers, ignored classifiers, and errors for files that do not fit."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from proxygml.backbones.weights import load_weights


class Trunk(nn.Module):
    """A trunk of two layers."""

    classifier = ("fc.",)
    weights_from = "take the file small.pth"

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)


def example() -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = Trunk().state_dict()
    return {name: torch.rand_like(tensor) if tensor.ndim else tensor for name, tensor in tensors.items()}


def has_weights(trunk: Trunk, tensors: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[name]) for name, tensor in trunk.state_dict().items())


@pytest.mark.parametrize("name", ["weights.pth", "weights.pt", "weights.safetensors"])
def test_every_format_loads(tmp_path, name):
    tensors = example()
    save = save_file if name.endswith("safetensors") else torch.save
    save(tensors, tmp_path / name)
    trunk = Trunk()
    result = load_weights(trunk, tmp_path / name)
    assert has_weights(trunk, tensors)
    assert (set(result.loaded), result.missing, result.unexpected) == (set(tensors), (), ())


def test_legacy_pth_loads(tmp_path):
    tensors = example()
    torch.save(tensors, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    trunk = Trunk()
    load_weights(trunk, str(tmp_path / "old.pth"))
    assert has_weights(trunk, tensors)


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_checkpoint_is_unwrapped(tmp_path, wrapper):
    tensors = example()
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    torch.save({"epoch": 3, wrapper: wrapped}, tmp_path / "run.pth")
    trunk = Trunk()
    result = load_weights(trunk, tmp_path / "run.pth")
    assert has_weights(trunk, tensors)
    assert result.unexpected == ()


def test_unexpected_names_are_reported(tmp_path):
    tensors = example() | {"fc.weight": torch.zeros(2, 4), "fcx.weight": torch.zeros(2, 4)}
    del tensors["conv.bias"]
    torch.save(tensors, tmp_path / "weights.pth")
    result = load_weights(Trunk(), tmp_path / "weights.pth")
    assert (result.missing, result.unexpected) == (("conv.bias",), ("fcx.weight",))
    assert "fc.weight" not in result.loaded


def test_missing_num_batches_tracked_is_not_reported(tmp_path):
    tensors = example()
    del tensors["norm.num_batches_tracked"]
    torch.save(tensors, tmp_path / "weights.pth")
    assert load_weights(Trunk(), tmp_path / "weights.pth").missing == ()


def test_half_precision_is_converted(tmp_path):
    tensors = {name: tensor.half() if tensor.ndim else tensor for name, tensor in example().items()}
    torch.save(tensors, tmp_path / "weights.pth")
    trunk = Trunk()
    load_weights(trunk, tmp_path / "weights.pth")
    assert trunk.conv.weight.dtype == torch.float32
    assert torch.equal(trunk.conv.weight, tensors["conv.weight"].float())


def test_shape_mismatch_loads_nothing(tmp_path):
    tensors = example() | {"norm.weight": torch.zeros(5)}
    torch.save(tensors, tmp_path / "weights.pth")
    trunk = Trunk()
    before = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    with pytest.raises(ValueError, match=r"norm.weight \(4,\) \(the file has \(5,\)\)"):
        load_weights(trunk, tmp_path / "weights.pth")
    assert has_weights(trunk, before)


def test_error_for_other_names_lists_both(tmp_path):
    torch.save({"blocks.0.weight": torch.zeros(2)}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"expected names such as conv.weight, .*4 more; the file has blocks.0.weight"):
        load_weights(Trunk(), tmp_path / "weights.pth")


def test_checkpoint_without_tensors(tmp_path):
    torch.save({"epoch": 3, "net": {"conv.weight": torch.zeros(1)}}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="contains epoch, net, expected tensors by name"):
        load_weights(Trunk(), tmp_path / "weights.pth")


def test_other_files_are_rejected_in_one_line(tmp_path):
    torch.save([1, 2, 3], tmp_path / "list.pt")
    torch.save(Trunk(), tmp_path / "whole_module.pth")  # a pickled class, which could run code
    for name, content in (
        ("page.pth", b"<!DOCTYPE html>" * 9),
        ("empty.pt", b""),
        ("photo.safetensors", b"\xff\xd8" * 99),
    ):
        (tmp_path / name).write_bytes(content)
    for name in ("list.pt", "whole_module.pth", "page.pth", "empty.pt", "photo.safetensors"):
        assert_rejected_in_one_line(tmp_path / name)


@pytest.mark.parametrize("name", ["zip.pth", "legacy.pth", "tensors.safetensors"])
def test_truncated_files_are_rejected_in_one_line(tmp_path, name):
    if name == "tensors.safetensors":
        save_file(example(), tmp_path / name)
    else:
        torch.save(example(), tmp_path / name, _use_new_zipfile_serialization=name == "zip.pth")
    whole = (tmp_path / name).read_bytes()
    for length in range(0, len(whole) - 1, max(1, len(whole) // 40)):
        (tmp_path / name).write_bytes(whole[:length])
        assert_rejected_in_one_line(tmp_path / name)


def assert_rejected_in_one_line(path: Path) -> None:
    with pytest.raises(ValueError, match=r"download it again|expected tensors by name") as raised:
        load_weights(Trunk(), path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_hash_in_the_name_is_checked(tmp_path):
    torch.save(example(), tmp_path / "own.pth")
    digest = hashlib.sha256((tmp_path / "own.pth").read_bytes()).hexdigest()
    for ending in (digest[:8], digest, "20241118", "v2", "final-decade"):  # a date and words announce no hash
        path = (tmp_path / "own.pth").rename(tmp_path / f"small-{ending}.pth")
        load_weights(Trunk(), path)
        path.rename(tmp_path / "own.pth")
    path = (tmp_path / "own.pth").rename(tmp_path / "bn_inception-52deb4733.pth")
    with pytest.raises(ValueError, match=rf"announces SHA-256 52deb4733\.\.\., it has {digest[:9]}.*download it again"):
        load_weights(Trunk(), path)


def test_missing_file_error_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no weight file .*none.pth: take the file small.pth"):
        load_weights(Trunk(), tmp_path / "none.pth")


def test_unknown_extension(tmp_path):
    (tmp_path / "weights.caffemodel").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"expected .pth, .pt or .safetensors, the name ends in '.caffemodel'"):
        load_weights(Trunk(), tmp_path / "weights.caffemodel")
