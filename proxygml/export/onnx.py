"""A trained network as ONNX, with a script that needs no PyTorch.

The network normalizes pixels itself: its input is decoded images (B, 3, H, W). It is compared with the original before
it is kept.
"""

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from proxygml.data import decoding
from proxygml.display import Progress
from proxygml.files import one_line
from proxygml.optional import library
from proxygml.training import build
from proxygml.training.run import Run

INPUT, OUTPUT = "images", "embeddings"
MAX_DIFFERENCE = 1e-4  # for unit embeddings
COMPARED_IMAGES = 32
MAX_ONNX_BYTES = 2**31 - 2**24  # an ONNX file is limited to 2 GB; the graph takes some of it
SCRIPTS = (Path(__file__).with_name("embed.py"), Path(decoding.__file__))

Network = Callable[[Tensor], Tensor]  # images uint8 (B, 3, H, W) -> embeddings (B, D)


def require_libraries() -> None:
    """An error that says how to install what ONNX needs."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        library(name, extra="export", user="export --onnx")


def write_onnx(run: Run, model: nn.Module, path: Path, data: str | None, progress: Progress) -> dict[str, Any]:
    """Write a network as ONNX; returns what it was compared with, and the largest difference.

    `data` is where the run's images are. If embeddings differ by more than MAX_DIFFERENCE, that is a ValueError.
    """
    progress("exporting", 0, 1, "")
    pixels, source = _comparison_images(run, data, progress)  # (n, 3, H, W)
    backbone = run.recipe.backbone
    try:
        with _quiet():
            _export(model, path, torch.from_numpy(pixels[:2]))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # exporters raise many types of errors, with pages of text
        cause = error.__cause__ or error  # torch.onnx wraps it in advice to its developers
        reason = one_line((str(cause).strip() or type(cause).__name__).splitlines()[0])
        raise ValueError(f"{backbone} cannot be exported: {reason}") from error
    progress("exporting", 1, 1, "")
    progress("comparing", 0, 1, "")
    difference = largest_difference(_read(path), model, torch.from_numpy(pixels))
    progress("comparing", 1, 1, "")
    if not difference <= MAX_DIFFERENCE:
        raise ValueError(
            f"{backbone} as ONNX differs from PyTorch by {difference:.1e} on {source}, more than "
            f"{MAX_DIFFERENCE:.0e}: nothing was written"
        )
    return {"compared_with": source, "largest_difference": difference}


def copy_scripts(out: Path) -> None:
    """The script that turns images into vectors, and the decoder of this package."""
    for script in SCRIPTS:
        shutil.copyfile(script, out / script.name)


def _comparison_images(run: Run, data: str | None, progress: Progress) -> tuple[np.ndarray, str]:
    """Images uint8 (n, 3, H, W) of the run, and a phrase for them; noise, with a message, if they cannot be read."""
    recipe, pixels, kind = run.recipe, [], "test"
    try:
        train, images = build.load_run_images(run, data)
        if not len(images):
            images, kind = train, "training"
        crops = build.test_crops(recipe, images)
        indices = np.unique(np.linspace(0, len(images) - 1, COMPARED_IMAGES).astype(int))
    except (OSError, ValueError, ModuleNotFoundError) as error:
        progress("comparing on noise", 0, 0, one_line(error))
        indices = np.empty(0, int)
    for index in indices:
        try:
            pixels.append(crops[int(index)][0])
        except Exception:  # decoders raise any type of error on damaged files
            continue
    if len(pixels) >= 2:
        return np.stack(pixels), f"{len(pixels)} {kind} images of the run"
    shape = (COMPARED_IMAGES, 3, recipe.test_side, recipe.test_side)
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


def _export(model: nn.Module, path: Path, example: Tensor) -> None:
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size > MAX_ONNX_BYTES:
        raise ValueError(f"its weights take {size / 2**30:.1f} GB, the limit of ONNX is 2 GB")
    program = torch.onnx.export(
        torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},)),
        dynamo=True,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: "batch"},),
        verbose=False,
    )
    program.save(path, external_data=False)  # type: ignore[union-attr]  # None only without dynamo


def _read(path: Path) -> Network:
    onnxruntime = library("onnxruntime", extra="export", user="export --onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the exporter's warnings and logs; the comparison shows whether an export is right."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
