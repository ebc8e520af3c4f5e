"""Opens a run, an .npz of embeddings or an index as a Space."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from proxygml.data import ImageList, open_image
from proxygml.display import Progress
from proxygml.embeddings import Embeddings, concatenate
from proxygml.files import warn
from proxygml.model import LoadModel, Model, kind_of
from proxygml.retrieval import Index
from proxygml.retrieval.adding import item_name
from proxygml.retrieval.validation import check_model
from proxygml.server.items import IndexItems
from proxygml.server.space import Proxies, Space
from proxygml.tasks.classify import read_calibration
from proxygml.training.recipe import Split, is_class_name
from proxygml.vectors import open_vectors, query_model, read_all, run_parts

NO_UPLOAD = "these vectors came without their network: open a run, or an index of one, to upload photos"
READ_ONLY = "items can be added to an index and removed: `proxygml index build` makes one"
SPLIT_NAMES = {"train": "training", "test": "test", "all": "all"}
OpenImage = Callable[[int], Image.Image]


def open_space(
    location: str, *, split: Split = "all", data: Path | None, load: LoadModel = Model, progress: Progress
) -> Space:
    """A run, an .npz or an index; `data` is the folder of its images if they have moved; `load` opens the model."""
    path = Path(location)
    model: Model | None = None
    open_one: OpenImage | None
    if kind_of(location, ("run", "embeddings", "index")) == "run":
        name, model = f"{path.resolve().name}, {SPLIT_NAMES[split]} images", load(path, data=data)
        parts = run_parts(model, split, progress=progress)
        embeddings, open_one = _open_listed(parts, _load_images(model))
        calibration = read_calibration(*parts.values()) if len(parts) == 1 else None
    else:
        source = open_vectors(location)
        embeddings = read_all(source)
        if isinstance(source, Embeddings):  # perhaps by someone else, who must not choose which files are shown
            roots = [Path(), path.parent] if data is None else [data]
            open_one = _open_files(embeddings.paths, roots, confined=True)
            return Space(path.name, embeddings, open_image=open_one, no_upload=NO_UPLOAD)
        folder = source.model_folder()  # queries are embedded by the network that an index may contain
        name, model = source.location, None if folder is None else load(folder)
        calibration = read_calibration(source)
        paths = embeddings.paths if data is None else _moved_paths(embeddings.paths, data)
        open_one = _open_files(paths, [Path()], confined=False)
        if open_one is None and Path(str(paths[0])).is_absolute():
            warn(f"no image is shown: {paths[0]} does not exist; have they moved? --data FOLDER")
    own_network = model is not None and is_class_name(model.recipe.backbone)  # which an index does not store
    return Space(
        name,
        embeddings,
        open_image=open_one,
        encoder=None if own_network else model,
        no_upload=NO_UPLOAD,
        proxies=None if model is None else _load_proxies(model, embeddings),
        calibration=calibration,
    )


def open_items(
    location: str,
    *,
    run: Path | None = None,
    split: Split = "all",
    data: Path | None = None,
    load: LoadModel = Model,
    progress: Progress,
) -> IndexItems:
    """An index, a run or an .npz to search in; an index follows the changes of other processes."""
    source = open_vectors(location, split=split, data=data, load=load, progress=progress)
    index = Index.from_embeddings(source) if isinstance(source, Embeddings) else source
    model = query_model(location, index, run=run, load=load)
    if model is not None:
        check_model(model.model_id, index.model, index.location)
        _ = model.network  # loaded now rather than at the first request
    writer = Index.open(location) if kind_of(location) == "index" else None
    return IndexItems(index, encoder=model, no_upload=NO_UPLOAD, writer=writer, read_only=READ_ONLY)


def _load_images(model: Model) -> dict[str, ImageList]:
    """The images of a run by split; none, with a warning, if they are missing."""
    try:
        return model.load_images()
    except (OSError, ValueError) as error:
        warn(f"only embeddings are shown: {error}")
        return {}


def _open_listed(parts: dict[str, Index], images: dict[str, ImageList]) -> tuple[Embeddings, OpenImage]:
    """The embeddings of parts of a run, with the paths of its images; opens image i."""
    embeddings = concatenate([read_all(index) for index in parts.values()])
    listed: dict[str, tuple[ImageList, int]] = {}  # by the name in the index: below the root when it was embedded
    for part in parts.keys() & images.keys():
        named = replace(images[part], root=Path(parts[part].metadata["root"]))
        listed |= {item_name(named, path): (images[part], number) for number, path in enumerate(named.paths)}
    names = embeddings.paths.tolist()
    paths = [listed[name][0].paths[listed[name][1]] if name in listed else name for name in names]

    def open_one(number: int) -> Image.Image:
        if names[number] not in listed:
            raise FileNotFoundError(names[number])
        own, place = listed[names[number]]
        return own.open(place)

    return replace(embeddings, paths=np.array(paths)), open_one


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


def _moved_paths(paths: np.ndarray, data: Path) -> np.ndarray:
    """Paths of images that are now in the folder `data`: it replaces the folder with which most of them exist."""
    sample = [Path(str(path)) for path in paths[:: max(1, len(paths) // 20)]]
    # The last parent is / or, for a relative path, the current folder.
    found = Counter(old for path in sample for old in path.parents if (data / path.relative_to(old)).is_file())
    if not found:
        raise ValueError(f"expected the images of the index in {data}, but found neither {sample[0].name} nor others")
    ((old, _),) = found.most_common(1)
    moved = (data / path.relative_to(old) if path.is_relative_to(old) else path for path in map(Path, paths.tolist()))
    return np.array([str(path) for path in moved])


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
        warn(f"{outside}: name the folder that contains them with --data")

    def open_one(number: int) -> Image.Image:
        if (file := locate(root, str(paths[number]))) is None:
            raise PermissionError(f"{paths[number]} lies outside {root.absolute()}")
        return open_image(file)

    return open_one
