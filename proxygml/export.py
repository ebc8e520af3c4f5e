"""The trained network of a run for use elsewhere: as ONNX, as safetensors or as a program of torch.export.

Pixels are scaled inside the network, so that whoever holds the file gives it images (B, 3, H, W) as they were decoded.
What is written is compared with the network it came from before it is there under its name.
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

from proxygml import ingredients, training
from proxygml.backbones import load_weights
from proxygml.exported import (
    INPUT,
    OUTPUT,
    Description,
    description_path,
    file_hash,
    open_session,
    read_description,
)
from proxygml.extras import library
from proxygml.files import written_whole
from proxygml.recipes import Recipe
from proxygml.runs import Run

MOST_DIFFERENCE = 1e-4  # beside embeddings of length 1
COMPARED_IMAGES = 32
MOST_ONNX_BYTES = 2**31 - 2**24  # one ONNX file holds less than 2 GB; the graph needs a little beside the weights

Network = Callable[[Tensor], Tensor]  # images uint8 (B, 3, H, W) -> embeddings (B, D)


def export_run(
    run: Run, out: Path, format: str = "onnx", *, progress: Callable[[str, int, int, str], None] | None = None
) -> tuple[Path, Description]:
    """Write the trained network of a run and its description: where it is now, and what is said of it.

    `out` is the file, or a folder in which it is called model.onnx, model.safetensors or model.pt2. Its embeddings
    differ from the run's by at most MOST_DIFFERENCE: otherwise there is an error and no file.
    """
    progress = progress or (lambda *_: None)
    if format not in FORMATS:
        raise ValueError(f"expected a format among {', '.join(FORMATS)}, got {format!r}")
    path, how = _path(Path(out), format), FORMATS[format]
    for name in how.libraries:
        library(name, extra="export", user=f"export as {format}")
    recipe = run.recipe
    model = training.load_model(run)
    progress("exporting", 0, 1, "")
    pixels, what = images_to_compare(recipe)  # (n, 3, H, W)
    with written_whole(description_path(path)) as beside, written_whole(path) as draft:
        try:
            with _quiet():
                how.write(model, draft, torch.from_numpy(pixels[:2]))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # exporters raise errors of a dozen kinds, in pages
            cause = error.__cause__ or error  # torch.onnx puts advice to its own developers in front of it
            said = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise ValueError(f"{recipe.backbone} cannot be exported as {format}: {said}") from error
        progress("exporting", 1, 1, "")
        progress("comparing", 0, 1, "")
        difference = largest_difference(how.read(draft, recipe), model, torch.from_numpy(pixels))
        progress("comparing", 1, 1, "")
        if not difference <= MOST_DIFFERENCE:
            raise ValueError(
                f"{recipe.backbone} exported as {format} differs from PyTorch by {difference:.1e} on {what}, more than "
                f"{MOST_DIFFERENCE:.0e}: nothing was written, take another format"
            )
        description = Description(
            format=format,
            sha256=file_hash(draft),
            model=run.mark,
            image_size=recipe.image_size,
            crop_share=recipe.test_crop,
            embedding_dim=recipe.embedding_dim,
            unit_length=getattr(model, "normalise", False),
            compared_with=what,
            largest_difference=difference,
            recipe=asdict(recipe),
        )
        beside.write_text(description.to_json(), encoding="utf-8")
    return path, description


def load_network(path: Path) -> nn.Module:
    """The network in a file that `export_run` wrote as safetensors, in evaluation mode.

    It is built anew from the recipe in the JSON beside it; a backbone hf:NAME needs the model of that name again.
    """
    description = read_description(path, "safetensors")
    return _read_safetensors(path, Recipe().changed(description.recipe))


def images_to_compare(recipe: Recipe) -> tuple[np.ndarray, str]:
    """Images (n, 3, H, W), uint8, from all over the test half of the data, and what they are.

    Where the data is not here any more, or none of them can be read, they are noise.
    """
    found = []
    try:
        _, images = ingredients.load_images(recipe)
        crops = ingredients.test_crops(recipe, images)
        places = np.unique(np.linspace(0, len(images) - 1, COMPARED_IMAGES).astype(int))
    except (OSError, ValueError, ModuleNotFoundError):
        places = np.empty(0, int)
    for place in places:
        try:
            found.append(crops[int(place)][0])
        except Exception:  # on damaged bytes each format raises whatever its parser stumbles over
            continue
    if len(found) >= 2:
        return np.stack(found), f"{len(found)} test images of the run"
    shape = (COMPARED_IMAGES, 3, recipe.image_size, recipe.image_size)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return noise, f"{COMPARED_IMAGES} images of noise, since those of the run are not to be had"


@torch.no_grad()
def largest_difference(network: Network, model: nn.Module, images: Tensor) -> float:
    """The largest difference between two networks in any number of the embeddings of images (n, 3, H, W).

    Embeddings longer than 1 are compared as if they were of length 1. The first image also goes alone, as a batch of
    another size.
    """
    expected = model(images)  # (n, D)
    lengths = expected.norm(dim=1, keepdim=True).clamp_min(1)  # (n, 1)
    together = (network(images) - expected) / lengths  # (n, D)
    alone = (network(images[:1]) - expected[:1]) / lengths[:1]  # (1, D)
    return torch.cat([together, alone]).abs().max().item()


def _path(out: Path, format: str) -> Path:
    suffix = FORMATS[format].suffix
    if out.suffix == suffix and not out.is_dir():
        return out
    if out.suffix in {one.suffix for one in FORMATS.values()}:
        raise ValueError(f"expected a folder or a file that ends in {suffix} for the format {format}, got {out}")
    if out.is_file():
        raise ValueError(f"expected a folder or a file that ends in {suffix}, got {out}, which is another file")
    return out / f"model{suffix}"


def _write_onnx(model: nn.Module, path: Path, example: Tensor) -> None:
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size > MOST_ONNX_BYTES:
        raise ValueError(f"its weights are {size / 2**30:.1f} GB, and an ONNX file holds less than 2: take safetensors")
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: "batch"},),
        verbose=False,
    )
    program.save(path, external_data=False)  # type: ignore[union-attr]  # None only without dynamo


def _read_onnx(path: Path, recipe: Recipe) -> Network:
    session = open_session(path)
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


def _write_safetensors(model: nn.Module, path: Path, example: Tensor) -> None:
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path, {"format": "pt"})


def _read_safetensors(path: Path, recipe: Recipe) -> nn.Module:
    model = ingredients.build_model(recipe)
    loaded = load_weights(model, path)
    for names, how in ((loaded.missing, "lacks"), (loaded.unexpected, "has beside those of the network")):
        if names:
            raise ValueError(f"{path} does not fit {recipe.backbone}: it {how} {len(names)} tensors, first {names[0]}")
    return model.eval()


def _write_program(model: nn.Module, path: Path, example: Tensor) -> None:
    program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)


def _read_program(path: Path, recipe: Recipe) -> nn.Module:
    return torch.export.load(path).module()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say of themselves; whether they did right is seen from the embeddings."""
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
    """How a format's files end, how they are written and read, and the libraries of the extra that it needs."""

    suffix: str
    write: Callable[[nn.Module, Path, Tensor], None]
    read: Callable[[Path, Recipe], Network]
    libraries: tuple[str, ...] = ()


FORMATS = {
    "onnx": Format(".onnx", _write_onnx, _read_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "safetensors": Format(".safetensors", _write_safetensors, _read_safetensors),
    "torch-export": Format(".pt2", _write_program, _read_program),
}
