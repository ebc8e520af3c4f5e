"""What can be looked at: a run, an .npz of embeddings, or an index. Each becomes a Space."""

import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image

from proxygml import embeddings
from proxygml.data import ImageList, open_image
from proxygml.data.images import Crops
from proxygml.data.readable import readable_images
from proxygml.data.splits import hold_out
from proxygml.embeddings import Embeddings
from proxygml.server.space import Proxies, Space
from proxygml.training import build, evaluator
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run

Progress = Callable[[str, int, int, str], None]
OWN_FEATURES = "these vectors came without the network that made them: open a run, or an index of one, to upload photos"


def open_space(place: str, *, split: str, data: Path | None, progress: Progress) -> Space:
    """The run, the .npz or the index at `place`; `data` is where its images are, if not where it says."""
    path = Path(place)
    if (path / "recipe.json").is_file():
        return _of_run(Run.open(path), split, data, progress)
    if path.is_dir() or "://" in place:
        return _of_index(place, data)
    if not path.exists():
        raise FileNotFoundError(f"no {path}: expected the folder of a run or of an index, or an .npz of embeddings")
    loaded = Embeddings.load(path)
    return Space(
        path.name,
        loaded,
        open_image=_files_below(loaded.paths, (Path(), path.parent) if data is None else (data,)),
        no_upload=OWN_FEATURES,
    )


def _of_run(run: Run, split: str, data: Path | None, progress: Progress) -> Space:
    """Images of a run's dataset, embedded by its network once and kept in its folder."""
    recipe = run.recipe if data is None else run.recipe.changed({"data": str(data)})
    kept, images = run.folder / f"embeddings-{split}.npz", None
    loaded = Embeddings.load(kept) if kept.exists() else None
    try:
        both = build.load_images(recipe)
        images = both[0 if split == "train" else 1]
    except (OSError, ValueError) as error:
        if loaded is None or loaded.model != run.model_id:
            raise
        both = None
        warnings.warn(f"the images of {run.folder} are not there, only what was kept of them: {error}", stacklevel=2)
    if loaded is None or loaded.model != run.model_id:

        def checked(done: int, total: int) -> None:
            progress("checking images", done, total, "")

        every = cast(ImageList, images)
        images = readable_images(every, skip_broken=recipe.skip_broken, progress=checked)
        if broken := len(every) - len(images):
            progress("skipped", 0, 0, f"{broken} images that cannot be read")
        loaded = evaluator.embed_images(run, images, progress=progress)
        try:
            loaded.save(kept)
        except OSError as error:
            warnings.warn(f"the embeddings could not be kept, the next time takes as long: {error}", stacklevel=2)
    return Space(
        f"{run.folder.resolve().name}, {'training' if split == 'train' else 'test'} images",
        loaded,
        open_image=_of_list(images, loaded.paths),
        embed_image=embedder(run),
        proxies=_proxies(run, recipe, both, split),
    )


def _of_index(place: str, data: Path | None) -> Space:
    """All that an index holds; where it keeps the run that made it, that embeds uploads."""
    from proxygml.retrieval import open_index

    index = open_index(place)
    blocks = list(index.blocks())
    if not blocks:
        raise ValueError(f"{index.location} holds nothing yet: proxygml index add fills it")
    vectors, labels, paths = (
        np.concatenate([getattr(block, part) for block in blocks]) for part in ("vectors", "labels", "paths")
    )
    loaded = Embeddings(vectors, labels, paths, class_names=blocks[0].class_names)
    kept = index.model_folder()
    run = None if kept is None else Run.open(kept)
    return Space(
        str(index.location),
        loaded,
        open_image=_files(loaded.paths, data or Path()),
        embed_image=None if run is None else embedder(run),
        no_upload=OWN_FEATURES,
        proxies=None if run is None else _proxies(run, run.recipe, None, "test"),
    )


def embedder(run: Run) -> Callable[[Image.Image], np.ndarray]:
    """From an image to its vector (D,) by the network of a run, which is loaded when it is first needed."""
    loaded: list[build.Network] = []
    lock = threading.Lock()

    def embed(image: Image.Image) -> np.ndarray:
        with lock:
            if not loaded:
                loaded.append(build.load_model(run))
            crops = Crops(lambda _: image, np.zeros(1, int), size=run.recipe.image_size, test_crop=run.recipe.test_crop)
            return embeddings.embed(loaded[0], crops, np.array(["upload"])).vectors[0]

    return embed


def _proxies(run: Run, recipe: Recipe, both: tuple[ImageList, ImageList] | None, split: str) -> Proxies | None:
    """The proxies of the best epoch, if the paper's loss trained it and they were not spread over processes."""
    state = run.load_best().get("loss", {})
    if recipe.loss != "proxygml" or "proxies" not in state:
        return None
    vectors = state["proxies"].float().numpy()  # (C, N, D)
    classes = np.arange(len(vectors))
    names = tuple(f"training class {number}" for number in classes)
    if both is not None:
        train_images = both[0]
        # Which classes were trained on, by their number: those not held out.
        numbered = replace(train_images, class_names=tuple(map(str, range(len(train_images.class_names)))))
        trained = np.array([int(name) for name in hold_out(numbered, recipe.held_out)[0].class_names])
        if len(trained) == len(vectors):  # with images left out, classes may be others
            classes, names = trained, tuple(train_images.class_names[number] for number in trained)
    labels = classes if split == "train" and both is not None else np.full(len(vectors), -1)
    return Proxies(vectors, names, labels, recipe.links_for(len(vectors)), recipe.positive_bonus, recipe.scale)


def _of_list(images: ImageList | None, paths: np.ndarray) -> Callable[[int], Image.Image]:
    """Image i by its path among the images of a dataset, some of which may not have been embedded."""
    place = {} if images is None else {path: number for number, path in enumerate(images.paths)}

    def open_listed(number: int) -> Image.Image:
        if images is None or (path := str(paths[number])) not in place:
            raise FileNotFoundError(str(paths[number]))
        return images.open(place[path])

    return open_listed


def _files(paths: np.ndarray, root: Path) -> Callable[[int], Image.Image] | None:
    """Image i from the file that its path names; an index names photos anywhere. None where none of some is there."""
    if not any((root / path).is_file() for path in _some(paths)):
        return None
    return lambda number: open_image(root / str(paths[number]))


def _files_below(paths: np.ndarray, roots: Iterable[Path]) -> Callable[[int], Image.Image] | None:
    """As `_files`, but none outside the first root below which some are: whoever sent an .npz does not choose.

    None where none of some images is there.
    """
    some = _some(paths)
    root = next((root for root in roots if any((file := _below(root, path)) and file.is_file() for path in some)), None)
    if root is None:
        return None
    if not all(_below(root, path) for path in some):
        outside = f"images outside {root.absolute()} are not shown"
        warnings.warn(f"{outside}: name the folder that holds them with --data", stacklevel=2)

    def open_below(number: int) -> Image.Image:
        if (file := _below(root, str(paths[number]))) is None:
            raise PermissionError(f"{paths[number]} lies outside {root.absolute()}")
        return open_image(file)

    return open_below


def _below(root: Path, path: str) -> Path | None:
    """The file that a path names, unless it lies outside `root` once links are followed."""
    file = (root / path).resolve()
    return file if file.is_relative_to(root.resolve()) else None


def _some(paths: np.ndarray) -> list[str]:
    return [str(path) for path in paths[:: max(1, len(paths) // 20)]]
