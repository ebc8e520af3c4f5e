"""Model: images -> vectors by a trained network; `load(path)` -> Model; the one answer to what a path is."""

import copy
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from proxygml import embeddings, evaluation, files
from proxygml.data import ImageList
from proxygml.data.check import find_problems
from proxygml.data.images import Crops, FeatureCrops
from proxygml.data.lazy import to_image
from proxygml.data.objects import labeled_images
from proxygml.display import Progress, counter, shown
from proxygml.embeddings import Embeddings
from proxygml.export.folder import open_folder, write_folder
from proxygml.retrieval import Index, is_url
from proxygml.retrieval.adding import add_images
from proxygml.retrieval.url import IndexURL
from proxygml.training import build
from proxygml.training.evaluator import by_query
from proxygml.training.parts import Parts
from proxygml.training.pretrained import is_backbone, pretrained_run
from proxygml.training.recipe import is_class_name
from proxygml.training.run import EXPORTED, Run

Kind = Literal["run", "model", "embeddings", "index", "space", "images"]
KINDS: dict[Kind, str] = {
    "run": "the folder of a run",
    "model": "a model folder",
    "embeddings": "an .npz of embeddings",
    "index": "an index (a folder or postgresql://...)",
    "space": "a fitted space",
    "images": "a folder of images",
}
MODELS: tuple[Kind, ...] = ("run", "model")


def kind_of(location: str | Path, expected: Sequence[Kind] = tuple(KINDS)) -> Kind:
    """What a path or URL names; an error that lists what was expected if it is none of `expected`."""
    path = Path(location)
    kind: Kind | None = None
    named = str(IndexURL.parse(str(location))) if is_url(location) else location  # without its password
    if is_url(location) or (path / "items.sqlite").is_file():
        kind = "index"
    elif (path / EXPORTED).is_file():
        kind = "model"
    elif (path / "recipe.json").is_file():
        kind = "run"
    elif (path / "space.json").is_file():
        kind = "space"
    elif path.is_dir():
        kind = "images"
    elif path.exists():
        files.require_file(path)
        kind = "model" if path.suffix in (".onnx", ".safetensors") else "embeddings"
    in_folder = kind == "model" and not path.is_dir()
    if kind is not None and kind in expected and not in_folder:
        return kind
    *others, last = (KINDS[each] for each in expected)
    names = f"{', '.join(others)} or {last}" if others else last
    if kind is None:
        raise FileNotFoundError(f"{named} does not exist: expected {names}")
    given = "a folder without recipe.json or items.sqlite" if kind == "images" else KINDS[kind]
    raise ValueError(f"expected {names}, got {named}, {'a file of a model: name its folder' if in_folder else given}")


def load(path: str | Path, *, network: nn.Module | None = None, device: str | None = None) -> "Model":
    """The model at a path: a run, a folder that `Model.export` wrote, or an index that contains its network.

    The name of a backbone, as "efficientnet-lite0", loads its pretrained weights, to embed without training.
    A run that was trained with a network of your own needs it again: build it as for training, its weights are
    replaced. By default, the device is that of the run if this machine has it, or else the CPU.

    >>> from proxygml import load
    >>> model = load("runs/mine")  # doctest: +SKIP
    >>> model.encode(["crow.jpg", "owl.jpg"]).shape  # doctest: +SKIP
    (2, 512)
    """
    if not is_backbone(path) and kind_of(path, (*MODELS, "index")) == "index":
        index = Index.open(path)
        path = index.model_folder() or ""
        if not path:
            raise ValueError(f"{index.location} does not contain the network of its vectors: load the run of it")
    model = Model(path, network=network, device=device)
    model.network  # noqa: B018  # read now, so that what does not fit is reported here
    return model


class Model:
    """A trained network: images -> vectors; `load` returns it. It is read at its first use.

    `run` is a run, a folder that `export` wrote, or the name of a pretrained backbone; `network` is the instance that a
    network of your own needs. `device` is by default the recipe's if this machine has it, or else the CPU. `data` is
    the folder of the run's images if they have moved. `workers` processes decode images, `batch_size` are embedded at a
    time (default: 32 on a CPU, else 128). Embedding leaves torch's random state unchanged.
    """

    def __init__(
        self,
        run: Run | str | Path,
        *,
        network: nn.Module | None = None,
        device: str | None = None,
        data: str | Path | None = None,
        workers: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        if not isinstance(run, Run):
            if is_backbone(run):
                run = pretrained_run(str(run))
            else:
                run = open_folder(Path(run)) if kind_of(run, MODELS) == "model" else Run.open(run)
        self.run, self.recipe, self._module = run, run.recipe, network
        if data is not None:
            self.recipe = self.recipe.changed({"data": os.path.abspath(data)})
        self.workers = self.recipe.workers if workers is None else workers
        self.batch_size = batch_size
        if self.workers < 0:
            raise ValueError(f"expected workers of at least 0, got {self.workers}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"expected batch_size of at least 1, got {batch_size}")
        found = build.find_device(device or self.recipe.device)
        if found is None and device is not None:
            raise ValueError(f"device {device} is not available: use --device cpu or auto")
        self.device = found or torch.device("cpu")
        self._lock = threading.Lock()

    def require_network(self) -> None:
        """An error if a network of your own is needed and was not passed."""
        Parts(network=self._module).require(self.recipe, "network")

    @cached_property
    def model_id(self) -> str:
        """The id of the weights, which embeddings and indexes record."""
        return self.run.model_id

    @cached_property
    def network(self) -> nn.Module:
        """The module: images (B, 3, H, W) in RGB, 0..255 -> embeddings (B, D)."""
        with torch.random.fork_rng(devices=[]):  # weights are first drawn, then replaced
            return build.load_model(self.run, self._module).to(self.device)

    def load_images(self) -> dict[str, ImageList]:
        """The run's images by split: train and test."""
        if is_class_name(self.recipe.dataset):
            raise ValueError(
                f"{self.run.folder} needs data={self.recipe.dataset}, which is not stored in it: pass the images to a "
                "method of `load`'s model, or --dataset MODULE:NAME to `proxygml embed` or `index build`"
            )
        build.require_data(self.recipe, self.run.folder)
        return dict(zip(("train", "test"), build.load_images(self.recipe), strict=True))

    def encode(
        self, images: Iterable[Any], *, batch_size: int | None = None, progress: bool | Progress = False
    ) -> np.ndarray:
        """Vectors (M, D) of images: paths, PIL images, or arrays or tensors (H, W), (H, W, 3) or (3, H, W).

        Arrays are bytes, or floats in 0..1. A file that cannot be read is an error. A large JPEG that you have opened
        is decoded at a smaller size; one that is decoded already (`load`, `convert`) gets a slightly different vector
        than its file. The command for it is `embed`.
        """
        single = isinstance(images, (str, Path, Image.Image))
        if single or (getattr(images, "ndim", 4) == 3 and {images.shape[0], images.shape[2]} & {1, 3}):  # type: ignore[attr-defined]
            raise ValueError(f"expected several images, got one ({type(images).__name__}): pass [image]")
        listed = list(images)
        if not listed:
            return np.empty((0, self.recipe.embedding_dim), np.float32)
        paths = [str(image) for image in listed if isinstance(image, (str, Path))]
        for problem in find_problems(ImageList(paths, np.zeros(len(paths)), ("files",)[: len(paths)])):
            raise ValueError(f"{problem.path} cannot be read: {problem.reason}")
        labels = np.zeros(len(listed), np.int64)
        size, test_crop = self.recipe.test_side, self.recipe.test_crop
        crops = Crops(lambda row: to_image(listed[row]), labels, size=size, test_crop=test_crop)
        with shown(progress) as report:
            counted = counter(report, "embedding")
            return self._embed(crops, labels.astype(str), workers=0, batch_size=batch_size, progress=counted).vectors

    def crop(self, image: Image.Image) -> np.ndarray:
        """What the network sees of an opened image: bytes (3, H, W)."""
        labels = np.zeros(1, np.int64)
        return Crops(lambda _: image, labels, size=self.recipe.test_side, test_crop=self.recipe.test_crop)[0][0]

    def encode_crops(self, crops: Sequence[np.ndarray]) -> np.ndarray:
        """Vectors (M, D) of what `crop` returned: `encode` in two steps, so that other threads can decode."""
        labels = np.zeros(len(crops), np.int64)
        stacked = FeatureCrops(np.stack(crops)[:, None], labels)  # (M, 1, 3, H, W)
        return self._embed(stacked, labels.astype(str), workers=0).vectors

    def embed(self, images: ImageList, progress: Callable[[int, int], None] | None = None) -> Embeddings:
        """Embeddings of images; if torch.distributed is initialized, every process embeds a part and gets all."""
        crops, paths = build.test_crops(self.recipe, images), np.asarray(images.paths)
        result = self._embed(crops, paths, workers=self.workers, progress=progress)
        return replace(result, class_names=np.asarray(images.class_names), model=self.model_id)

    def evaluate(
        self,
        data: Any = None,
        *,
        recall_at: Sequence[int] | None = None,
        cluster: bool = True,
        seed: int | None = None,
        progress: bool | Progress = False,
    ) -> evaluation.Scores:
        """Scores on labeled images, by default on the run's test images.

        `data` is a folder of images, or an object as `train` takes it; queries are searched for in their gallery.
        """
        images = self.load_images()["test"] if data is None else labeled_images(data)
        with shown(progress) as report:
            embedded = self.embed(images, counter(report, "embedding"))
            return evaluation.evaluate(
                **by_query(embedded, images.queries),
                recall_at=self.recipe.recall_at if recall_at is None else recall_at,
                cluster=cluster,
                seed=self.recipe.seed if seed is None else seed,
                progress=counter(report, "scoring"),
            )

    def index(
        self, data: Any, out: str | Path | None = None, *, kind: str | None = None, progress: bool | Progress = False
    ) -> Index:
        """An index of images, with this network in it; `data` as for `evaluate`, or paths, which have no labels.

        `out` is a new folder or postgresql:// URL, or an index of this model to add to; None keeps the index in memory.
        """
        images = labeled_images(data)
        with shown(progress) as report:
            index = self._open_index(out, kind, len(images))
            add_images(index, self.embed, images, report)
            if out is not None and index.model_folder() is None:
                index.save_model(self.run.folder)
            index.refresh(counter(report, f"building {index.kind}"))
        return index

    def _open_index(self, out: str | Path | None, kind: str | None, size: int) -> Index:
        if out is not None:
            with suppress(FileNotFoundError):
                return Index.open(out)
        return Index.create(out, dim=self.recipe.embedding_dim, model=self.model_id, kind=kind, expected_size=size)

    def export(
        self, out: str | Path, *, onnx: bool = False, license: str | None = None, progress: bool | Progress = False
    ) -> dict[str, Any]:
        """Write a folder that `load` opens anywhere, without the run, its images or a download of weights.

        `onnx` adds the network as ONNX and a script that needs neither this package nor PyTorch; it is compared with
        this one on the run's test images. `license` is that of the weights, for the model card: an SPDX name.
        Returns the content of preprocessing.json.
        """
        network = self.network if self.device.type == "cpu" else copy.deepcopy(self.network).cpu()
        with shown(progress) as report:
            data = self.recipe.data
            return write_folder(self.run, network, Path(out), onnx=onnx, license=license, data=data, progress=report)

    def _embed(
        self,
        crops: Crops | FeatureCrops,
        paths: np.ndarray,
        *,
        workers: int,
        batch_size: int | None = None,
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
                batch_size=self.batch_size if batch_size is None else batch_size,
                workers=workers,
                device=self.device,
                process=(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1),
                progress=progress,
            )


LoadModel = Callable[..., Model]  # path, data=folder -> its model
