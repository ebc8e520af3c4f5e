"""The vectors at a path: an .npz, an index, or those of a run's images, embedded once and cached in its folder.

`transform` applies a fitted space to vectors.
"""

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from proxygml import embeddings, files
from proxygml.display import Progress, counted, no_progress
from proxygml.embeddings import Embeddings
from proxygml.model import MODELS, LoadModel, Model, kind_of
from proxygml.retrieval import Index
from proxygml.retrieval.adding import add_images
from proxygml.retrieval.contents import build_lock, erase
from proxygml.retrieval.validation import check_model
from proxygml.training.recipe import Split
from proxygml.training.run import EXPORTED

SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test",), "all": ("train", "test")}
NAMES = {"train": "training", "test": "test", "all": "training or test"}


def open_vectors(
    location: str | Path,
    *,
    split: Split = "all",
    data: Path | None = None,
    load: LoadModel = Model,
    progress: Progress = no_progress,
) -> Embeddings | Index:
    """The embeddings in an .npz, an index, or those of the images of a run or of its model folder.

    Of these, `split` chooses the images; `data` is their folder if they have moved, and `load` opens the model.
    """
    match kind_of(location, (*MODELS, "embeddings", "index")):
        case "run" | "model":
            parts = list(run_parts(load(location, data=data), split, progress=progress).values())
            return parts[0] if len(parts) == 1 else embeddings.concatenate([read_all(index) for index in parts])
        case "embeddings":
            return Embeddings.load(Path(location))
        case _:
            return Index.open(location)


def query_model(
    location: str | Path, index: Index, *, run: Path | None = None, load: LoadModel = Model
) -> Model | None:
    """The model that embeds queries for an index: that of `run`, of the run at `location`, or the one in the index."""
    folder = run or (Path(location) if kind_of(location) in MODELS else index.model_folder())
    return None if folder is None else load(folder)


def read_all(source: Embeddings | Index) -> Embeddings:
    """All items of an index as embeddings."""
    if isinstance(source, Embeddings):
        return source
    if not len(source):
        raise ValueError(f"{source.location} is empty: add to it with `proxygml index add`")
    return embeddings.concatenate(list(source.blocks()))


def require_labels(source: Embeddings, location: str | Path) -> Embeddings:
    """The same embeddings; an error if some have no label."""
    if missing := source.unlabeled:
        found = f"{missing:,} of {len(source):,} in {location} have none"
        raise ValueError(f"expected a label for each vector, but {found}")
    return source


def transform(space: Path, source: Embeddings) -> Embeddings:
    """Embeddings in a fitted space, of vectors by the network on whose vectors it was fitted."""
    from proxygml.features.estimator import ProxyGMLEmbedding  # loads scikit-learn
    from proxygml.features.storage import read_settings

    kind_of(space, ("space",))
    settings = read_settings(space)
    check_model(source.model, settings["features_model"], space)
    vectors = ProxyGMLEmbedding.load(space).transform(source.vectors)
    return replace(source, vectors=vectors, model=f"{source.model}+{settings['id']}")


def run_parts(model: Model, split: Split = "all", *, progress: Progress = no_progress) -> dict[str, Index]:
    """The indexes of a run's training images, test images or both; their sizes are reported."""
    parts = {part: run_index(model, part, progress=progress) for part in SPLITS[split]}
    counts = " and ".join(counted(len(index), f"{NAMES[part]} image") for part, index in parts.items())
    progress(str(model.run.folder), 0, 0, counts)
    parts = {part: index for part, index in parts.items() if len(index)}
    if not parts:
        raise ValueError(f"{model.run.folder} has no {NAMES[split]} images: choose another --split")
    return parts


def run_index(model: Model, split: str, *, progress: Progress = no_progress) -> Index:
    """The index of a run's test or training images, cached in its folder; built, or completed, if needed.

    If the folder cannot be written, the index is in memory; also that of a model folder, which may go elsewhere.
    """
    folder = model.run.folder / ("index" if split == "test" else f"index-{split}")
    if folder.is_symlink():  # somebody may have sent the run: a stale index would be erased there
        raise ValueError(f"{folder} is a link: remove it, and the index is built again")
    dim, model_id = model.recipe.embedding_dim, model.model_id
    if (model.run.folder / EXPORTED).is_file():
        index = Index.create(None, dim=dim, model=model_id)
        add_images(index, model.embed, model.load_images()[split], progress)
        return index
    if (folder / "items.sqlite").is_file():
        index = Index.open(folder)
        if index.model == model_id and index.metadata.get("complete") == "yes":
            _follow_images(index, model, split)
            return index
        index.close()
    model.require_network()
    images = model.load_images()[split]
    with ExitStack() as stack:
        try:
            stack.enter_context(build_lock(folder))
            index = _open_cache(folder, dim, model_id)
            index.save_model(model.run.folder)
        except files.UnwritableError as error:
            files.warn(f"{error}: the embeddings are not kept, the next time takes as long")
            index = Index.create(None, dim=dim, model=model_id)
        add_images(index, model.embed, images, progress)
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
