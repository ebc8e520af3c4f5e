"""Model: images -> vectors by the network of a run; what a path is; the one cache of a run's embeddings."""

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from proxygml import embeddings, files
from proxygml.data import ImageList, open_image
from proxygml.data.check import Problem, find_problems
from proxygml.data.folder import list_images
from proxygml.data.images import Crops, FeatureCrops
from proxygml.data.splits import Split, image_list
from proxygml.display import Progress, no_progress
from proxygml.embeddings import Embeddings
from proxygml.retrieval import Index, is_url
from proxygml.retrieval.contents import build_lock, erase
from proxygml.retrieval.url import IndexURL
from proxygml.retrieval.validation import is_text
from proxygml.training import build
from proxygml.training.run import Run

BLOCK = 1024  # images that are embedded and stored at a time: at most these are lost by Ctrl-C
MAX_NAMED = 20  # unreadable images that are reported by name
SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test",), "all": ("train", "test")}
NAMES = {"train": "training", "test": "test", "all": "training or test"}
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
    images if they have moved. Embedding leaves torch's random state unchanged.
    """

    def __init__(self, run: Run | str | Path, *, device: str | None = None, data: str | Path | None = None) -> None:
        if not isinstance(run, Run):
            kind_of(run, ("run",))
            run = Run.open(run)
        self.run, self.recipe = run, run.recipe
        if data is not None:
            self.recipe = self.recipe.changed({"data": os.path.abspath(data)})
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
        for problem in find_problems(ImageList(paths, np.zeros(len(paths)), ("files",)[: len(paths)]), decode=True):
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
        result = self._embed(crops, paths, workers=self.recipe.workers, progress=progress)
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
                batch_size=max(128, self.recipe.batch_size),
                workers=workers,
                device=self.device,
                process=(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1),
                progress=progress,
            )


@dataclass
class Added:
    """Numbers of items that were added to an index, that it contained already, and of images that cannot be read."""

    new: int = 0
    existing: int = 0
    skipped: int = 0


def images_below(folder: Path) -> ImageList:
    """All images below a folder, at any depth; the class is the path of the parent folder."""
    paths, classes = list_images(folder, loose=folder.resolve().name)
    return image_list(paths, classes, root=folder)


def item_name(images: ImageList, path: str) -> str:
    """The path of an image in an index: absolute for a file, unchanged for an image inside another file."""
    is_file = images.pixels is None and images.open_file is open_image
    return os.path.abspath(os.path.join(images.root or ".", path)) if is_file else path


def add_embeddings(index: Index, source: Embeddings | Index, progress: Progress) -> Added:
    """Add all vectors of embeddings or of another index, block by block."""
    added, done = Added(), 0
    for block in source.blocks():
        new = index.add(block)
        done += len(block)
        added.new += new
        added.existing += len(block) - new
        progress("adding", done, max(len(source), done), "")
    return added


def add_images(index: Index, model: Model, images: ImageList, progress: Progress) -> Added:
    """Embed the images that an index does not contain and add them; unreadable images are skipped and reported.

    Every block is stored when it is done: after Ctrl-C or a kill, the same call continues.
    """
    added = Added()
    for start in range(0, len(images), BLOCK):
        block = images.select(np.arange(start, min(start + BLOCK, len(images))))
        names = [item_name(block, path) for path in block.paths]
        existing = index.contains([name for name in names if is_text(name)])
        missing = np.array([place for place, name in enumerate(names) if name not in existing], np.int64)
        added.existing += len(names) - len(missing)
        if not len(missing):
            continue
        block = block.select(missing)
        problems = {problem.index: problem for problem in find_problems(block, decode=True)}
        for place, path in enumerate(block.paths):
            if not is_text(path):
                problems.setdefault(place, Problem(place, path, "its name is not valid Unicode: rename it"))
        for problem in list(problems.values())[: max(0, MAX_NAMED - added.skipped)]:
            progress(f"skipped {problem.path}", 0, 0, problem.reason)
        added.skipped += len(problems)
        readable = np.setdiff1d(np.arange(len(block)), list(problems))
        if not len(readable):
            continue

        def report(done: int, _: int, start: int = start) -> None:
            progress("embedding", start + done, len(images), "")

        result = model.embed(block.select(readable), report)
        paths = np.array([item_name(images, path) for path in result.paths], str)
        new = index.add(replace(result, paths=paths))
        added.new += new
        added.existing += len(paths) - new  # another process has added them
    if len(images):
        progress("embedding", len(images), len(images), "")
    if added.skipped > MAX_NAMED:
        progress("skipped", 0, 0, f"{added.skipped - MAX_NAMED:,} more images that cannot be read")
    return added


def open_vectors(
    location: str | Path,
    *,
    split: Split = "all",
    data: Path | None = None,
    device: str | None = None,
    progress: Progress = no_progress,
) -> Embeddings | Index:
    """The embeddings in an .npz, an index, or those of a run's images.

    Of a run, `split` chooses the images; `data` is their folder if they have moved, and `device` embeds them.
    """
    match kind_of(location, ("run", "embeddings", "index")):
        case "run":
            parts = list(run_parts(Model(location, data=data, device=device), split, progress=progress).values())
            return parts[0] if len(parts) == 1 else embeddings.concatenate([read_all(index) for index in parts])
        case "embeddings":
            return Embeddings.load(Path(location))
        case _:
            return Index.open(location)


def read_all(source: Embeddings | Index) -> Embeddings:
    """All items of an index as embeddings."""
    if isinstance(source, Embeddings):
        return source
    if not len(source):
        raise ValueError(f"{source.location} is empty: add to it with `proxygml index add`")
    return embeddings.concatenate(list(source.blocks()))


def run_parts(model: Model, split: Split = "all", *, progress: Progress = no_progress) -> dict[str, Index]:
    """The indexes of a run's training images, test images or both; their sizes are reported."""
    parts = {part: run_index(model, part, progress=progress) for part in SPLITS[split]}
    counts = " and ".join(f"{len(index):,} {NAMES[part]} images" for part, index in parts.items())
    progress(str(model.run.folder), 0, 0, counts)
    parts = {part: index for part, index in parts.items() if len(index)}
    if not parts:
        raise ValueError(f"{model.run.folder} has no {NAMES[split]} images: choose another --split")
    return parts


def run_index(model: Model, split: str, *, progress: Progress = no_progress) -> Index:
    """The index of a run's test or training images, cached in its folder; built, or completed, if needed.

    If the folder cannot be written, the index is in memory.
    """
    folder = model.run.folder / ("index" if split == "test" else f"index-{split}")
    if folder.is_symlink():  # somebody may have sent the run: a stale index would be erased there
        raise ValueError(f"{folder} is a link: remove it, and the index is built again")
    dim, model_id = model.recipe.embedding_dim, model.model_id
    if (folder / "items.sqlite").is_file():
        index = Index.open(folder)
        if index.model == model_id and index.metadata.get("complete") == "yes":
            _follow_images(index, model, split)
            return index
        index.close()
    images = model.load_images()[split]
    with ExitStack() as stack:
        try:
            stack.enter_context(build_lock(folder))
            index = _open_cache(folder, dim, model_id)
            index.save_model(model.run.folder)
        except files.UnwritableError as error:
            warnings.warn(f"{error}: the embeddings are not kept, the next time takes as long", stacklevel=2)
            index = Index.create(None, dim=dim, model=model_id)
        add_images(index, model, images, progress)
        index.set_metadata("root", os.path.abspath(images.root or "."))
        index.set_metadata("data", model.recipe.data or "")
        index.set_metadata("complete", "yes")
    return index


def _follow_images(index: Index, model: Model, split: str) -> None:
    """Change the paths in a run's index if its images have moved and are found."""
    data = model.recipe.data or ""
    if index.metadata.get("data") != data and os.path.exists(data):
        root = os.path.abspath(model.load_images()[split].root or ".")
        with suppress(files.UnwritableError):
            index.relocate(index.metadata["root"], root)
            index.set_metadata("root", root)
            index.set_metadata("data", data)


def _open_cache(folder: Path, dim: int, model_id: str) -> Index:
    """The unfinished index in a folder, or a new one if that was made by another network."""
    if (folder / "items.sqlite").is_file():
        index = Index.open(folder)
        if index.model == model_id:
            return index
        index.close()
        erase(folder)
    return Index.create(folder, dim=dim, model=model_id)
