"""Model: images -> vectors by the network of a run; what a path is; the one cache of a run's embeddings."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from proxygml import embeddings, files
from proxygml.data import ImageList, open_image
from proxygml.data.check import find_problems
from proxygml.data.images import Crops, FeatureCrops
from proxygml.embeddings import Embeddings
from proxygml.retrieval import is_url
from proxygml.retrieval.url import IndexURL
from proxygml.training import build
from proxygml.training.run import Run

Kind = Literal["run", "embeddings", "index", "export", "images"]
KINDS: dict[Kind, str] = {
    "run": "the folder of a run",
    "embeddings": "an .npz of embeddings",
    "index": "an index (a folder or postgresql://...)",
    "export": "an exported model",
    "images": "a folder of images",
}


def kind_of(location: str | Path, expected: Sequence[Kind] = tuple(KINDS)) -> Kind:
    """What a path or URL names; an error that lists what was expected if it is none of `expected`."""
    path = Path(location)
    kind: Kind | None = None
    shown = str(IndexURL.parse(str(location))) if is_url(location) else location  # without its password
    if is_url(location) or (path / "items.sqlite").is_file():
        kind = "index"
    elif (path / "recipe.json").is_file():
        kind = "run"
    elif (path / "model.onnx").is_file():
        kind = "export"
    elif path.is_dir():
        kind = "images"
    elif path.exists():
        files.require_file(path)
        kind = "export" if path.suffix == ".onnx" else "embeddings"
    if kind is not None and kind in expected:
        return kind
    *others, last = (KINDS[each] for each in expected)
    names = f"{', '.join(others)} or {last}" if others else last
    if kind is None:
        raise FileNotFoundError(f"{shown} does not exist: expected {names}")
    given = "a folder without recipe.json or items.sqlite" if kind == "images" else KINDS[kind]
    raise ValueError(f"expected {names}, got {shown}, {given}")


class Model:
    """The trained network of a run, loaded at its first use, on `device`.

    By default, that is the recipe's device if this machine has it, or else the CPU. `data` is the folder of the run's
    images if they have moved. `workers` processes decode images, `batch_size` are embedded at a time (default: as in
    training, at least 128). Embedding leaves torch's random state unchanged.
    """

    def __init__(
        self,
        run: Run | str | Path,
        *,
        device: str | None = None,
        data: str | Path | None = None,
        workers: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        if not isinstance(run, Run):
            kind_of(run, ("run",))
            run = Run.open(run)
        self.run, self.recipe = run, run.recipe
        if data is not None:
            self.recipe = self.recipe.changed({"data": os.path.abspath(data)})
        self.workers = self.recipe.workers if workers is None else workers
        self.batch_size = max(128, self.recipe.batch_size) if batch_size is None else batch_size
        for name, minimum in (("workers", 0), ("batch_size", 1)):
            if getattr(self, name) < minimum:
                raise ValueError(f"expected {name} of at least {minimum}, got {getattr(self, name)}")
        found = build.find_device(device or self.recipe.device)
        if found is None and device is not None:
            raise ValueError(f"device {device} is not available: use --device cpu or auto")
        self.device = found or torch.device("cpu")
        self._lock = threading.Lock()

    @cached_property
    def model_id(self) -> str:
        return self.run.model_id

    @cached_property
    def network(self) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):  # weights are first drawn, then replaced
            return build.load_model(self.run).to(self.device)

    def load_images(self) -> dict[str, ImageList]:
        """The run's images by split: train and test."""
        build.require_data(self.recipe, self.run.folder)
        return dict(zip(("train", "test"), build.load_images(self.recipe), strict=True))

    def encode(self, images: Sequence[Path | Image.Image]) -> np.ndarray:
        """Vectors (M, D) of images, given as files or opened; a file that cannot be read is an error.

        A large JPEG that is decoded already (`load`, `convert`) gets a slightly different vector than its file.
        """
        paths = [str(image) for image in images if not isinstance(image, Image.Image)]
        for problem in find_problems(ImageList(paths, np.zeros(len(paths)), ("files",)[: len(paths)])):
            raise ValueError(f"{problem.path} cannot be read: {problem.reason}")

        def open_one(index: int) -> Image.Image:
            image = images[index]
            return image if isinstance(image, Image.Image) else open_image(Path(image))

        labels = np.zeros(len(images), np.int64)
        crops = Crops(open_one, labels, size=self.recipe.image_size, test_crop=self.recipe.test_crop)
        return self._embed(crops, labels.astype(str), workers=0).vectors

    def embed(self, images: ImageList, progress: Callable[[int, int], None] | None = None) -> Embeddings:
        """Embeddings of images; if torch.distributed is initialized, every process embeds a part and gets all."""
        crops, paths = build.test_crops(self.recipe, images), np.asarray(images.paths)
        result = self._embed(crops, paths, workers=self.workers, progress=progress)
        return replace(result, class_names=np.asarray(images.class_names), model=self.model_id)

    def _embed(
        self,
        crops: Crops | FeatureCrops,
        paths: np.ndarray,
        *,
        workers: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> Embeddings:
        precision = self.recipe.precision
        number_format = torch.bfloat16 if precision.startswith("bf16") else torch.float16
        with (
            self._lock,
            torch.random.fork_rng(devices=[]),  # a DataLoader draws a seed
            torch.autocast(self.device.type, number_format, enabled=precision.endswith("mixed")),
        ):
            return embeddings.embed(
                self.network,
                crops,
                paths,
                batch_size=self.batch_size,
                workers=workers,
                device=self.device,
                process=(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1),
                progress=progress,
            )


LoadModel = Callable[..., Model]  # path, data=folder -> its model
