"""Opens a run, an .npz of embeddings or an index as a Space."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from proxygml.data import ImageList, open_image
from proxygml.data.splits import hold_out
from proxygml.embeddings import Embeddings
from proxygml.model import Model, item_name, kind_of, read_all, run_index
from proxygml.retrieval import open_index
from proxygml.server.space import Proxies, Space
from proxygml.training import build
from proxygml.training.run import Progress

NO_UPLOAD = "these vectors came without their network: open a run, or an index of one, to upload photos"
Split = tuple[ImageList, ImageList]  # training and test images


def open_space(location: str, *, split: str, data: Path | None, progress: Progress) -> Space:
    """A run, an .npz or an index; `data` is the folder of its images if they have moved."""
    match kind_of(location, ("run", "embeddings", "index")):
        case "run":
            return _open_run(Model(location), split, data, progress)
        case "index":
            return _open_index(location, data)
    path = Path(location)
    embeddings = Embeddings.load(path)
    open_one = _open_below(embeddings.paths, (Path(), path.parent) if data is None else (data,))
    return Space(path.name, embeddings, open_image=open_one, no_upload=NO_UPLOAD)


def _open_run(model: Model, split: str, data: Path | None, progress: Progress) -> Space:
    """Images of a run's dataset, embedded once and cached in its folder."""
    run = model.run
    index, added = run_index(model, split, data=data, progress=progress)
    if added.problems:
        progress("skipped", 0, 0, f"{len(added.problems)} images that cannot be read")
    embeddings = read_all(index)
    try:
        both = build.load_images(run.recipe if data is None else run.recipe.changed({"data": str(data)}))
    except (OSError, ValueError) as error:
        both = None
        warnings.warn(f"the images of {run.folder} are missing, only their embeddings are shown: {error}", stacklevel=2)
    images = None if both is None else both[0 if split == "train" else 1]
    names, numbers = embeddings.paths.tolist(), {}
    if images is not None:
        named = replace(images, root=Path(index.metadata["root"]))  # where they were when they were embedded
        numbers = {item_name(named, path): number for number, path in enumerate(images.paths)}
        paths = [images.paths[numbers[name]] if name in numbers else name for name in names]
        embeddings = replace(embeddings, paths=np.array(paths))

    def open_listed(number: int) -> Image.Image:
        if images is None or names[number] not in numbers:
            raise FileNotFoundError(str(embeddings.paths[number]))
        return images.open(numbers[names[number]])

    return Space(
        f"{run.folder.resolve().name}, {'training' if split == 'train' else 'test'} images",
        embeddings,
        open_image=open_listed,
        embed_image=lambda image: model.encode([image])[0],
        proxies=_load_proxies(model, both, embeddings),
    )


def _open_index(location: str, data: Path | None) -> Space:
    """All items of an index; uploads are embedded by the run that it contains, if any."""
    index = open_index(location)
    embeddings, folder = read_all(index), index.model_folder()
    model = None if folder is None else Model(folder)
    return Space(
        str(index.location),
        embeddings,
        open_image=_open_anywhere(embeddings.paths, data or Path()),
        embed_image=None if model is None else lambda image: model.encode([image])[0],
        no_upload=NO_UPLOAD,
        proxies=None if model is None else _load_proxies(model, None, embeddings),
    )


def _load_proxies(model: Model, both: Split | None, embeddings: Embeddings) -> Proxies | None:
    """The proxies of the best epoch; None for another loss, or if they are spread over processes."""
    recipe, state = model.recipe, model.run.load_best().get("loss", {})
    if recipe.loss != "proxygml" or "proxies" not in state:
        return None
    vectors = state["proxies"].float().numpy()  # (C, N, D)
    names = () if both is None else hold_out(both[0], recipe.held_out)[0].class_names
    if len(names) != len(vectors):  # images are missing, and classes with them
        names = tuple(f"training class {number}" for number in range(len(vectors)))
    labels = {name: label for label, name in enumerate(embeddings.class_names.tolist())}
    own = np.array([labels.get(name, -1) for name in names])
    return Proxies(vectors, names, own, recipe.links_for(len(vectors)), recipe.positive_bonus, recipe.scale)


def _open_anywhere(paths: np.ndarray, root: Path) -> Callable[[int], Image.Image] | None:
    """Opens image i by its path, anywhere on this machine; None if none of a sample of the files exists."""
    if not any((root / path).is_file() for path in _sample(paths)):
        return None
    return lambda number: open_image(root / str(paths[number]))


def _open_below(paths: np.ndarray, roots: Iterable[Path]) -> Callable[[int], Image.Image] | None:
    """Opens image i below the first root that contains some of the files, and never a file outside it.

    An .npz may come from someone else, who must not choose which files are shown. None if no root contains any.
    """
    sample = _sample(paths)
    root = next(
        (root for root in roots if any((file := _below(root, path)) and file.is_file() for path in sample)), None
    )
    if root is None:
        return None
    if not all(_below(root, path) for path in sample):
        outside = f"images outside {root.absolute()} are not shown"
        warnings.warn(f"{outside}: name the folder that contains them with --data", stacklevel=2)

    def open_below(number: int) -> Image.Image:
        if (file := _below(root, str(paths[number]))) is None:
            raise PermissionError(f"{paths[number]} lies outside {root.absolute()}")
        return open_image(file)

    return open_below


def _below(root: Path, path: str) -> Path | None:
    """The file at a path below `root`; None if it is outside once links are followed."""
    file = (root / path).resolve()
    return file if file.is_relative_to(root.resolve()) else None


def _sample(paths: np.ndarray) -> list[str]:
    return [str(path) for path in paths[:: max(1, len(paths) // 20)]]
