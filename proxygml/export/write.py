"""Export the trained network of a run as ONNX, safetensors or a torch.export program.

The network normalizes pixels itself: its input is decoded images (B, 3, H, W). Every exported file is compared with the
original network before it is saved.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from proxygml.backbones import load_weights
from proxygml.export import runtime
from proxygml.export.runtime import INPUT, OUTPUT, Description
from proxygml.files import atomic_write
from proxygml.optional import library
from proxygml.training import build
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run

MAX_DIFFERENCE = 1e-4  # for unit embeddings
COMPARED_IMAGES = 32
MAX_ONNX_BYTES = 2**31 - 2**24  # an ONNX file is limited to 2 GB; the graph takes some of it

Network = Callable[[Tensor], Tensor]  # images uint8 (B, 3, H, W) -> embeddings (B, D)


def export_run(
    run: Run, out: Path, format: str = "onnx", *, progress: Callable[[str, int, int, str], None] | None = None
) -> tuple[Path, Description]:
    """Export the trained network of a run; returns the path of the file and its description.

    `out` is the file, or a folder for model.onnx, model.safetensors or model.pt2. If the embeddings differ from the
    run's by more than MAX_DIFFERENCE, a ValueError is raised and nothing is written.
    """
    progress = progress or (lambda *_: None)
    if format not in FORMATS:
        raise ValueError(f"expected a format among {', '.join(FORMATS)}, got {format!r}")
    path, (_, write, read, libraries) = _output_path(Path(out), format), FORMATS[format]
    for name in libraries:
        library(name, extra="export", user=f"export as {format}")
    recipe = run.recipe
    model = build.load_model(run)
    progress("exporting", 0, 1, "")
    pixels, source = _comparison_images(recipe)  # (n, 3, H, W)
    with atomic_write(runtime.description_path(path)) as description_file, atomic_write(path) as temporary:
        try:
            with _quiet():
                write(model, temporary, torch.from_numpy(pixels[:2]))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # exporters raise many types of errors, with pages of text
            cause = error.__cause__ or error  # torch.onnx wraps it in advice to its developers
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise ValueError(f"{recipe.backbone} cannot be exported as {format}: {reason}") from error
        progress("exporting", 1, 1, "")
        progress("comparing", 0, 1, "")
        difference = largest_difference(read(temporary, recipe), model, torch.from_numpy(pixels))
        progress("comparing", 1, 1, "")
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(
                f"{recipe.backbone} exported as {format} differs from PyTorch by {difference:.1e} on {source}, more "
                f"than {MAX_DIFFERENCE:.0e}: nothing was written, use another format"
            )
        description = Description(
            format=format,
            sha256=runtime.file_hash(temporary),
            model=run.model_id,
            image_size=recipe.image_size,
            crop_fraction=recipe.test_crop,
            embedding_dim=recipe.embedding_dim,
            unit_length=getattr(model, "normalize", False),
            compared_with=source,
            largest_difference=difference,
            recipe=asdict(recipe),
        )
        description_file.write_text(description.to_json(), encoding="utf-8")
    return path, description


def load_network(path: Path) -> nn.Module:
    """The network that `export_run` wrote as safetensors, in evaluation mode.

    It is rebuilt from the recipe in its JSON; a backbone hf:NAME needs that model again.
    """
    description = runtime.read_description(path, "safetensors")
    return _read_safetensors(path, Recipe().changed(description.recipe))


def _comparison_images(recipe: Recipe) -> tuple[np.ndarray, str]:
    """Images uint8 (n, 3, H, W) spread over the test set, and a phrase for them; noise if they cannot be read."""
    pixels = []
    try:
        _, images = build.load_images(recipe)
        crops = build.test_crops(recipe, images)
        indices = np.unique(np.linspace(0, len(images) - 1, COMPARED_IMAGES).astype(int))
    except (OSError, ValueError, ModuleNotFoundError):
        indices = np.empty(0, int)
    for index in indices:
        try:
            pixels.append(crops[int(index)][0])
        except Exception:  # decoders raise any type of error on damaged files
            continue
    if len(pixels) >= 2:
        return np.stack(pixels), f"{len(pixels)} test images of the run"
    shape = (COMPARED_IMAGES, 3, recipe.image_size, recipe.image_size)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return noise, f"{COMPARED_IMAGES} images of noise, since the run's images cannot be read"


@torch.no_grad()
def largest_difference(network: Network, model: nn.Module, images: Tensor) -> float:
    """The largest absolute difference between the embeddings of two networks for images (n, 3, H, W).

    Embeddings longer than 1 are scaled to unit length. The first image is also compared alone, as another batch size.
    """
    expected = model(images)  # (n, D)
    lengths = expected.norm(dim=1, keepdim=True).clamp_min(1)  # (n, 1)
    batch = (network(images) - expected) / lengths  # (n, D)
    single = (network(images[:1]) - expected[:1]) / lengths[:1]  # (1, D)
    return torch.cat([batch, single]).abs().max().item()


def _output_path(out: Path, format: str) -> Path:
    suffix = FORMATS[format].suffix
    if out.suffix == suffix and not out.is_dir():
        return out
    if out.is_file() or out.suffix in {other.suffix for other in FORMATS.values()}:
        raise ValueError(f"expected a folder or a {suffix} file for the format {format}, got {out}")
    return out / f"model{suffix}"


def _trace(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The network as a program for any batch size."""
    return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def _write_onnx(model: nn.Module, path: Path, example: Tensor) -> None:
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size > MAX_ONNX_BYTES:
        raise ValueError(f"its weights take {size / 2**30:.1f} GB, the limit of ONNX is 2 GB: use safetensors")
    program = torch.onnx.export(
        _trace(model, example),
        dynamo=True,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: "batch"},),
        verbose=False,
    )
    program.save(path, external_data=False)  # type: ignore[union-attr]  # None only without dynamo


def _read_onnx(path: Path, recipe: Recipe) -> Network:
    session = runtime.open_session(path)
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


def _write_safetensors(model: nn.Module, path: Path, example: Tensor) -> None:
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path, {"format": "pt"})


def _read_safetensors(path: Path, recipe: Recipe) -> nn.Module:
    model = build.build_model(recipe)
    loaded = load_weights(model, path)
    for names, problem in ((loaded.missing, "lacks"), (loaded.unexpected, "has the additional")):
        if names:
            raise ValueError(f"{path} does not fit {recipe.backbone}: it {problem} tensors {', '.join(names[:3])}")
    return model.eval()


def _write_program(model: nn.Module, path: Path, example: Tensor) -> None:
    torch.export.save(_trace(model, example), path)


def _read_program(path: Path, recipe: Recipe) -> nn.Module:
    return torch.export.load(path).module()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the exporters' warnings and logs; the comparison shows whether an export is right."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class Format(NamedTuple):
    """File suffix, writer, reader and optional libraries of a format."""

    suffix: str
    write: Callable[[nn.Module, Path, Tensor], None]
    read: Callable[[Path, Recipe], Network]
    libraries: tuple[str, ...] = ()


FORMATS = {
    "onnx": Format(".onnx", _write_onnx, _read_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "safetensors": Format(".safetensors", _write_safetensors, _read_safetensors),
    "torch-export": Format(".pt2", _write_program, _read_program),
}
