"""Export the trained network of a run: a folder with the network as ONNX and a script that needs no PyTorch.

The network normalizes pixels itself: its input is decoded images (B, 3, H, W). It is compared with the original before
it is saved.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from proxygml.data import decoding
from proxygml.display import Progress, no_progress
from proxygml.files import atomic_write, one_line
from proxygml.optional import library
from proxygml.training import build
from proxygml.training.run import Run
from proxygml.version import __version__

INPUT, OUTPUT = "images", "embeddings"
MAX_DIFFERENCE = 1e-4  # for unit embeddings
COMPARED_IMAGES = 32
MAX_ONNX_BYTES = 2**31 - 2**24  # an ONNX file is limited to 2 GB; the graph takes some of it
SCRIPT = Path(__file__).with_name("embed.py")
PREPARATION = (
    "rotate the image upright according to its EXIF orientation",
    "convert it to 8-bit RGB, with transparency on white",
    "crop the center square with a side of crop_fraction times the shorter side",
    "resize it to image_size x image_size: bilinear with antialiasing (Pillow's BILINEAR)",
    "pass it as uint8, channels first; the network itself normalizes and orders the channels",
)
README = """\
# A network that turns images into vectors
```
pip install numpy pillow onnxruntime
python embed.py photo.jpg                        # prints the vector: {dim} numbers
python embed.py photos/*.jpg --out vectors.npz   # vectors, paths, labels (folder names)
```
{comparison}

- `model.onnx`: the network. Input `images`: uint8 (B, 3, {size}, {size}), RGB. Output `embeddings`: float32 (B, {dim}).
- `preprocessing.json`: size, crop and steps that prepare an image; id of the network.
- `decoding.py`, `embed.py`: the steps in Python, exactly as in training. `from embed import embed` works too.

Large JPEGs are decoded at 1/2, 1/4 or 1/8 of their size. Other decoders give slightly different vectors: use one.
Written by proxygml {version}.
"""

Network = Callable[[Tensor], Tensor]  # images uint8 (B, 3, H, W) -> embeddings (B, D)


def export_run(run: Run, out: Path, *, data: Path | None = None, progress: Progress = no_progress) -> dict:
    """Write a run's network to a folder that works without this package and PyTorch; returns its preprocessing.json.

    `data` is where the run's images are, if they have moved. If the embeddings differ from the run's by more than
    MAX_DIFFERENCE, a ValueError is raised and nothing is written.
    """
    out, recipe = Path(out), run.recipe
    if out.exists() and not (out.is_dir() and ((out / "preprocessing.json").exists() or not any(out.iterdir()))):
        raise ValueError(f"expected a new or empty folder, or an earlier export, got {out}")
    for name in ("onnx", "onnxscript", "onnxruntime"):
        library(name, extra="export", user="export")
    model = build.load_model(run)
    progress("exporting", 0, 1, "")
    pixels, source = _comparison_images(run, data, progress)  # (n, 3, H, W)
    with atomic_write(out / "preprocessing.json") as settings_file, atomic_write(out / "model.onnx") as network_file:
        try:
            with _quiet():
                _write_onnx(model, network_file, torch.from_numpy(pixels[:2]))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # exporters raise many types of errors, with pages of text
            cause = error.__cause__ or error  # torch.onnx wraps it in advice to its developers
            reason = one_line((str(cause).strip() or type(cause).__name__).splitlines()[0])
            raise ValueError(f"{recipe.backbone} cannot be exported: {reason}") from error
        progress("exporting", 1, 1, "")
        progress("comparing", 0, 1, "")
        difference = largest_difference(_read_onnx(network_file), model, torch.from_numpy(pixels))
        progress("comparing", 1, 1, "")
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(
                f"{recipe.backbone} as ONNX differs from PyTorch by {difference:.1e} on {source}, more than "
                f"{MAX_DIFFERENCE:.0e}: nothing was written"
            )
        settings = {
            "image_size": recipe.image_size,
            "crop_fraction": recipe.test_crop,
            "preparation": PREPARATION,
            "embedding_dim": recipe.embedding_dim,
            "unit_length": getattr(model, "normalize", False),
            "model": run.model_id,
            "compared_with": source,
            "largest_difference": difference,
            "proxygml": __version__,
        }
        settings_file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    comparison = f"Compared with PyTorch on {source}: the largest difference is {difference:.1e}."
    if settings["unit_length"]:
        comparison += " Vectors have unit length: a dot product is a cosine."
    text = README.format(dim=recipe.embedding_dim, size=recipe.image_size, comparison=comparison, version=__version__)
    (out / "README.md").write_text(text, encoding="utf-8")
    for script in (SCRIPT, Path(decoding.__file__)):
        shutil.copyfile(script, out / script.name)
    return settings


def _comparison_images(run: Run, data: Path | None, progress: Progress) -> tuple[np.ndarray, str]:
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


def _write_onnx(model: nn.Module, path: Path, example: Tensor) -> None:
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


def _read_onnx(path: Path) -> Network:
    onnxruntime = library("onnxruntime", extra="export", user="export")
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
