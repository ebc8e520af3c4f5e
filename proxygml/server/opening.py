"""Opens a run, an .npz of embeddings or an index as a Space."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from proxygml.data import ImageList, open_image
from proxygml.embeddings import Embeddings
from proxygml.model import Model, item_name, kind_of, open_vectors, read_all
from proxygml.server.space import Proxies, Space
from proxygml.training import build
from proxygml.training.run import Progress

NO_UPLOAD = "these vectors came without their network: open a run, or an index of one, to upload photos"
OpenImage = Callable[[int], Image.Image]


def open_space(location: str, *, split: str, data: Path | None, progress: Progress) -> Space:
    """A run, an .npz or an index; `data` is the folder of its images if they have moved."""
    source = open_vectors(location, split=split, data=data, progress=progress)
    embeddings, path = read_all(source), Path(location)
    model: Model | None = None
    if isinstance(source, Embeddings):  # perhaps by someone else, who must not choose which files are shown
        roots = [Path(), path.parent] if data is None else [data]
        open_one = _open_files(embeddings.paths, roots, confined=True)
        return Space(path.name, embeddings, open_image=open_one, no_upload=NO_UPLOAD)
    if kind_of(location) == "run":
        name, model = f"{path.resolve().name}, {'training' if split == 'train' else 'test'} images", Model(path)
        images = _load_images(model, split, data)
        embeddings, open_one = _open_listed(embeddings, images, Path(source.metadata["root"]))
    else:  # queries are embedded by the network that an index may contain
        folder = source.model_folder()
        name, model = source.location, None if folder is None else Model(folder)
        open_one = _open_files(embeddings.paths, [data or Path()], confined=False)
    return Space(
        name,
        embeddings,
        open_image=open_one,
        embed_image=None if model is None else lambda image: model.encode([image])[0],
        no_upload=NO_UPLOAD,
        proxies=None if model is None else _load_proxies(model, embeddings),
    )


def _load_images(model: Model, split: str, data: Path | None) -> ImageList | None:
    """Training or test images of a run; None, with a warning, if they are missing."""
    try:
        train, test = build.load_images(model.recipe if data is None else model.recipe.changed({"data": str(data)}))
        return train if split == "train" else test
    except (OSError, ValueError) as error:
        folder = model.run.folder
        warnings.warn(f"the images of {folder} are missing, only their embeddings are shown: {error}", stacklevel=3)
        return None


def _open_listed(embeddings: Embeddings, images: ImageList | None, root: Path) -> tuple[Embeddings, OpenImage]:
    """Embeddings with the paths of a run's images, which were below `root` when embedded; opens image i."""
    names, numbers = embeddings.paths.tolist(), {}
    if images is not None:
        named = replace(images, root=root)
        numbers = {item_name(named, path): number for number, path in enumerate(images.paths)}
        paths = [images.paths[numbers[name]] if name in numbers else name for name in names]
        embeddings = replace(embeddings, paths=np.array(paths))

    def open_one(number: int) -> Image.Image:
        if images is None or names[number] not in numbers:
            raise FileNotFoundError(names[number])
        return images.open(numbers[names[number]])

    return embeddings, open_one


def _load_proxies(model: Model, embeddings: Embeddings) -> Proxies | None:
    """The proxies of the best epoch; None for another loss, or if they are spread over processes."""
    recipe, best = model.recipe, model.run.load_best()
    proxies, names = best.get("loss", {}).get("proxies"), best.get("class_names", ())
    if recipe.loss != "proxygml" or proxies is None or len(names) != len(proxies):
        return None
    vectors = proxies.float().numpy()  # (C, N, D)
    labels = {name: label for label, name in enumerate(embeddings.class_names.tolist())}
    own = np.array([labels.get(name, -1) for name in names])
    return Proxies(vectors, tuple(names), own, recipe.links_for(len(vectors)), recipe.positive_bonus, recipe.scale)


def _open_files(paths: np.ndarray, roots: Sequence[Path], *, confined: bool) -> OpenImage | None:
    """Opens image i below the first root with some of the files, if confined never outside it; None without any."""

    def locate(root: Path, path: str) -> Path | None:
        file = (root / path).resolve()  # follows links
        return file if not confined or file.is_relative_to(root.resolve()) else None

    sample = [str(path) for path in paths[:: max(1, len(paths) // 20)]]
    found = (root for root in roots if any((file := locate(root, path)) and file.is_file() for path in sample))
    root = next(found, None)
    if root is None:
        return None
    if not all(locate(root, path) for path in sample):
        outside = f"images outside {root.absolute()} are not shown"
        warnings.warn(f"{outside}: name the folder that contains them with --data", stacklevel=3)

    def open_one(number: int) -> Image.Image:
        if (file := locate(root, str(paths[number]))) is None:
            raise PermissionError(f"{paths[number]} lies outside {root.absolute()}")
        return open_image(file)

    return open_one
