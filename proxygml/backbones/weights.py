"""Weight files into trunks: .pth and .pt (tensors only, no code) and .safetensors."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from proxygml.files import one_line, refuse_swelling

WRAPPERS = ("state_dict", "model")  # keys under which training scripts put the tensors


@dataclass(frozen=True)
class Loaded:
    """Names that were loaded, that the file lacks, and that the module does not have."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_weights(module: nn.Module, path: str | Path) -> Loaded:
    """Which names of the file went into the module; a refused file leaves the module as it was.

    Names that begin with one of the module's `classifier` prefixes are dropped: an embedding has no use for them.
    """
    path = Path(path)
    if not path.is_file():
        source = getattr(module, "weights_from", "give the path of a .pth, .pt or .safetensors file")
        raise FileNotFoundError(f"no weight file {path}: {source}")
    found = read_tensors(path)
    expected = module.state_dict()
    classifier = tuple(getattr(module, "classifier", ()))
    tensors = {name: as_vector(tensor, expected.get(name)) for name, tensor in found.items()}
    loaded = [name for name in tensors if name in expected]
    unexpected = [name for name in tensors if name not in expected and not name.startswith(classifier)]
    # Files older than torch 0.4.1 do not count batches; nothing that these trunks compute depends on the count.
    missing = [name for name in expected if name not in tensors and not name.endswith("num_batches_tracked")]
    if not loaded:
        raise ValueError(
            f"{path} does not fit {type(module).__name__}: expected names such as {some(expected)}; "
            f"the file has {some(found)}. Give weights that were made for this network"
        )
    differing = [
        f"{name} {tuple(expected[name].shape)} (the file has {tuple(tensors[name].shape)})"
        for name in loaded
        if tensors[name].shape != expected[name].shape
    ]
    if differing:
        raise ValueError(
            f"{path} does not fit {type(module).__name__}: expected the shapes {some(differing)}. "
            "Give weights that were made for this network"
        )
    module.load_state_dict({name: tensors[name] for name in loaded}, strict=False)
    return Loaded(tuple(loaded), tuple(missing), tuple(unexpected))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a weight file by name, unwrapped from {"state_dict": ...} and from a leading "module."."""
    suffix = path.suffix.lower()
    if suffix not in (".pth", ".pt", ".safetensors"):
        raise ValueError(f"{path} is no weight file: expected .pth, .pt or .safetensors, the name ends in {suffix!r}")
    remedy = "fetch it again, or save a state dict (tensors by name) with torch.save or safetensors"
    with path.open("rb") as file:  # what the system says of the file is said as it is
        try:
            refuse_swelling(file)
            content = load_file(path) if suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        except Exception as error:  # files cut short, damaged or of another kind raise a dozen different errors
            raise ValueError(f"{path} cannot be read as weights ({reason(error)}): {remedy}") from None
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected tensors by name: {remedy}")
    tensors = {
        str(name).removeprefix("module."): value  # what nn.DataParallel puts in front
        for name, value in content.items()
        if isinstance(value, Tensor)
    }
    if not tensors:
        raise ValueError(f"{path} holds {some(content) or 'nothing'}, expected tensors by name: {remedy}")
    return tensors


def as_vector(tensor: Tensor, expected: Tensor | None) -> Tensor:
    """The tensor; one row (1, n) where a vector (n,) is expected becomes that vector.

    bn_inception-52deb4733.pth keeps its batch normalisation as such rows.
    """
    is_row = expected is not None and expected.ndim == 1 and tensor.shape == (1, *expected.shape)
    return tensor[0] if is_row else tensor


def reason(error: Exception) -> str:
    """One short line for what torch or safetensors said in many."""
    if isinstance(error, UnpicklingError) and "weights_only" in str(error).lower():
        return "it is damaged, is no weight file, or holds Python objects that are not tensors"
    return "it is cut short, damaged or no weight file"


def some(names: Iterable[str]) -> str:
    """The first three names and how many more there are."""
    listed = [one_line(name, most=100) for name in names]
    rest = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + rest
