"""Load weight files into modules: .pth and .pt (tensors only, no code) and .safetensors."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from proxygml.backbones.pickles import check_pickles
from proxygml.files import one_line, require_file

WRAPPERS = ("state_dict", "model")  # keys under which training scripts put the tensors
HASH = re.compile("-([0-9a-f]{8,})$")  # torch.hub's convention: the start of the file's SHA-256 ends its name
REMEDY = "download it again, or save a state dict (tensors by name) with torch.save or safetensors"


class LoadedWeights(NamedTuple):
    """Names that were loaded, that the file lacks, and that the module does not have."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_weights(module: nn.Module, path: str | Path) -> LoadedWeights:
    """Load a weight file into a module; a file that does not fit leaves the module unchanged.

    Names that begin with one of the module's `classifier` prefixes are ignored.
    """
    path = Path(path)
    if not path.is_file():
        source = getattr(module, "weights_from", "pass the path of a .pth, .pt or .safetensors file")
        raise FileNotFoundError(f"no weight file {path}: {source}")
    expected = module.state_dict()
    classifier = tuple(getattr(module, "classifier", ()))
    tensors = {name: row_to_vector(tensor, expected.get(name)) for name, tensor in read_tensors(path).items()}
    loaded = [name for name in tensors if name in expected]
    unexpected = [name for name in tensors if name not in expected and not name.startswith(classifier)]
    # Files older than torch 0.4.1 lack num_batches_tracked, which has no effect on the output of these trunks.
    missing = [name for name in expected if name not in tensors and not name.endswith("num_batches_tracked")]
    mismatched = [
        f"{name} {tuple(expected[name].shape)} (the file has {tuple(tensors[name].shape)})"
        for name in loaded
        if tensors[name].shape != expected[name].shape
    ]
    if not loaded or mismatched:
        reason = f"the shapes {first_three(mismatched)}"
        if not loaded:
            reason = f"names such as {first_three(expected)}; the file has {first_three(tensors)}"
        network = type(module).__name__
        raise ValueError(f"{path} does not fit {network}: expected {reason}. Use weights made for this network")
    module.load_state_dict({name: tensors[name] for name in loaded}, strict=False)
    return LoadedWeights(tuple(loaded), tuple(missing), tuple(unexpected))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a weight file by name, unwrapped from {"state_dict": ...} and without a leading "module."."""
    suffix = path.suffix.lower()
    if suffix not in (".pth", ".pt", ".safetensors"):
        raise ValueError(f"{path} is no weight file: expected .pth, .pt or .safetensors, the name ends in {suffix!r}")
    check_hash(require_file(path))
    with path.open("rb") as file:  # outside the try: an OSError of the file itself stays one
        try:
            if suffix != ".safetensors":
                check_pickles(file)
            content = load_file(path) if suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        except UnpicklingError:
            reason = "it is damaged, is no weight file, or contains Python objects that are not tensors"
            raise ValueError(f"{path} cannot be read as weights ({reason}): {REMEDY}") from None
        except Exception:  # truncated, damaged or other files raise a dozen different errors
            reason = "it is truncated, damaged or no weight file"
            raise ValueError(f"{path} cannot be read as weights ({reason}): {REMEDY}") from None
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__}, expected tensors by name: {REMEDY}")
    tensors = {
        str(name).removeprefix("module."): value  # the prefix of nn.DataParallel
        for name, value in content.items()
        if isinstance(value, Tensor)
    }
    if not tensors:
        raise ValueError(f"{path} contains {first_three(content) or 'nothing'}, expected tensors by name: {REMEDY}")
    return tensors


def check_hash(path: Path) -> str:
    """The SHA-256 of a file; a ValueError if its name, as in resnet50-0676ba61.pth, announces another one.

    Digits alone may be a date and announce nothing.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    actual = digest.hexdigest()
    announced = HASH.search(path.stem)
    if announced and not announced[1].isdigit() and not actual.startswith(announced[1]):
        raise ValueError(
            f"{path} is damaged or another file: its name announces SHA-256 {announced[1]}..., it has "
            f"{actual[: len(announced[1])]}...: download it again, or rename it if it is your own"
        )
    return actual


def row_to_vector(tensor: Tensor, expected: Tensor | None) -> Tensor:
    """(1, n) -> (n,) if a vector is expected: bn_inception-52deb4733.pth stores batch normalization as rows."""
    is_row = expected is not None and expected.ndim == 1 and tensor.shape == (1, *expected.shape)
    return tensor[0] if is_row else tensor


def first_three(names: Iterable[str]) -> str:
    """The first three names and the number of the others."""
    listed = [one_line(name, max_length=100) for name in names]
    rest = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + rest
