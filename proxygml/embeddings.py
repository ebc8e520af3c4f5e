"""Embeddings: vectors with labels and paths, stored as .npz; and the functions that compute them."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast
from zipfile import ZipFile

import numpy as np

from proxygml.data.images import Crops, FeatureCrops
from proxygml.data.loading import load_batches
from proxygml.display import counted
from proxygml.files import atomic_write, check_texts, one_line, reject_zip_bomb, remove_temporaries, require_file
from proxygml.memory import keep_freed_memory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Embeddings:
    """Row i of `vectors` is image `paths[i]` of class `labels[i]`.

    Images of a class with an empty name have no label: -1.
    """

    vectors: np.ndarray  # (M, D) floats
    labels: np.ndarray  # (M,) integers; -1: no label
    paths: np.ndarray  # (M,) strings
    class_names: np.ndarray = field(default_factory=lambda: np.empty(0, "U1"))  # (C,) strings, or empty
    model: str = ""  # `Run.model_id` of the model that computed them; empty if unknown

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or not np.issubdtype(self.vectors.dtype, np.floating):
            raise ValueError(f"expected vectors as floats (M, D), got {self.vectors.dtype} {self.vectors.shape}")
        if self.labels.ndim != 1 or self.labels.dtype.kind not in "iu":
            raise ValueError(f"expected integer labels (M,), got {self.labels.dtype} {self.labels.shape}")
        if not len(self.vectors) == len(self.labels) == len(self.paths):
            raise ValueError(
                f"expected as many labels and paths as vectors, got {counted(len(self.vectors), 'vector')}, "
                f"{counted(len(self.labels), 'label')} and {counted(len(self.paths), 'path')}"
            )
        outside = self.labels[(self.labels < -1) | (self.labels >= len(self.class_names))]
        if len(self.class_names) and len(outside):
            raise ValueError(f"expected labels below {len(self.class_names)} (class_names), got {outside[0]}")
        nameless = np.isin(self.labels, np.flatnonzero(self.class_names == ""))  # (M,)
        if nameless.any():
            object.__setattr__(self, "labels", np.where(nameless, -1, self.labels))

    def class_name(self, label: int) -> str:
        """Name of a class; its number if classes have no names; empty for no label."""
        if label == -1:
            return ""
        return str(self.class_names[label]) if len(self.class_names) else str(label)

    @property
    def unlabeled(self) -> int:
        """How many images have no label."""
        return int((self.labels == -1).sum())

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dim(self) -> int:
        return self.vectors.shape[1]

    def blocks(self, size: int = 50_000) -> Iterator["Embeddings"]:
        """The same embeddings in blocks."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield replace(self, vectors=self.vectors[rows], labels=self.labels[rows], paths=self.paths[rows])

    def save(self, path: Path) -> None:
        """Write one .npz, atomically; without labels, if there are none."""
        arrays = asdict(self)
        if 0 < self.unlabeled == len(self):
            del arrays["labels"], arrays["class_names"]
        remove_temporaries(Path(path))
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Embeddings":
        """Load what `save` wrote, or any .npz with vectors and perhaps labels (integers or class names).

        Without paths, images are named by their row number.
        """
        with require_file(Path(path)).open("rb") as file:
            try:
                if file.read(2) != b"PK":
                    raise ValueError("expected an .npz as numpy.savez writes it")
                reject_zip_bomb(file)
                return cls._from_npz(np.load(file, allow_pickle=False))
            except Exception as error:  # numpy and zipfile raise any type of error on damaged files
                raise ValueError(f"{path} does not contain embeddings: {one_line(error)}") from error

    @classmethod
    def _from_npz(cls, stored: "np.lib.npyio.NpzFile") -> "Embeddings":
        archive = cast(ZipFile, stored.zip)
        for entry in archive.infolist():  # a damaged directory could silently drop an array
            archive.open(entry).close()  # compares the name in the directory with the name at the entry
            if entry.comment:
                raise ValueError(f"the directory is damaged at {entry.filename}")
        if "vectors" not in stored or ("class_names" in stored and "labels" not in stored):
            missing = "labels" if "vectors" in stored else "vectors"
            raise ValueError(f"no array {missing}, only {', '.join(stored) or 'nothing'}")
        names = [name for name in ("vectors", "labels", "paths", "class_names", "model") if name in stored]
        try:
            arrays = {name: np.asarray(stored[name]) for name in names}  # entries that are not .npy come as bytes
        except ValueError as error:
            if "Object arrays" not in str(error):
                raise
            remedy = "save labels.astype(str), or whole numbers, and paths.astype(str)"
            raise ValueError(f"it has an array of Python objects, which is not opened: {remedy}") from error
        for name, array in arrays.items():
            if array.ndim and len(array) and not array.nbytes:
                raise ValueError(f"{name} of shape {array.shape} has no bytes")
        rows = np.arange(len(arrays["vectors"]) if arrays["vectors"].ndim else 0)
        labels = arrays.get("labels", np.full(len(rows), -1))
        paths = arrays["paths"] if "paths" in arrays else rows.astype(f"U{len(str(len(rows)))}")
        class_names = arrays["class_names"] if "class_names" in arrays else np.empty(0, "U1")
        if labels.ndim == 1 and labels.dtype.kind == "U":
            class_names, labels = np.unique(labels, return_inverse=True)
        paths, class_names = (
            texts.astype(str) if texts.dtype.kind in "iu" else texts for texts in (paths, class_names)
        )
        check_texts("paths", paths)
        check_texts("class_names", class_names)
        model = str(arrays["model"]) if "model" in arrays and arrays["model"].size == 1 else ""
        return cls(arrays["vectors"], labels, paths, class_names, model)


def check_nonzero(items: Embeddings) -> None:
    """An error if some vectors are zero, as after a failed embedding: they have no cosine similarity to others."""
    zero = np.flatnonzero(~items.vectors.any(axis=1))
    if len(zero):
        raise ValueError(
            f"zero vectors: {len(zero):,} of {len(items):,}, first image {items.paths[zero[0]]}: leave them out"
        )


def concatenate(parts: Sequence[Embeddings]) -> Embeddings:
    """Several embeddings of one model as one; classes with the same name are merged."""
    if len(parts) == 1:
        return parts[0]
    names = np.unique(np.concatenate([part.class_names for part in parts]))
    labels = np.concatenate([np.append(np.searchsorted(names, part.class_names), -1)[part.labels] for part in parts])
    vectors, paths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("vectors", "paths"))
    return Embeddings(vectors, labels, paths, names, parts[0].model)


def embed(
    model: "torch.nn.Module",
    images: Crops | FeatureCrops,
    paths: np.ndarray,
    *,
    batch_size: int | None = None,
    workers: int = 0,
    device: "torch.device | str" = "cpu",
    process: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None] | None = None,
) -> Embeddings:
    """Embeddings (M, D) of all images, in order, by the model in evaluation mode.

    Without a batch size, it is 32 on a CPU, where feature maps then stay in the processor's cache, or else 128. With
    several processes, all call this; `process` = (rank, world size) embeds its part, and all return the whole.
    """
    import torch  # slow to import, and only needed here
    from torch.utils.data import DataLoader, Subset

    from proxygml.distributed.collectives import gather_rows

    on_cpu = torch.device(device).type == "cpu"
    if on_cpu:
        keep_freed_memory()
    batch_size = batch_size or (32 if on_cpu else 128)
    rank, world_size = process
    if len(images) < world_size:
        raise ValueError(f"expected an image for each of {world_size} processes, got {len(images)}")
    indices = np.array_split(np.arange(len(images)), world_size)[rank]
    subset: Subset = Subset(images, indices)  # type: ignore[arg-type]  # both have __len__ and __getitem__
    was_training = model.training
    model.eval()
    workers = min(workers, os.cpu_count() or 1)  # a recipe may come from a larger machine, or from a stranger
    parts, done = [], 0
    for batch, _ in load_batches(DataLoader(subset, batch_size=batch_size, num_workers=workers)):
        with torch.no_grad():
            parts.append(model(batch.to(device)).float())  # (batch, D)
        done += len(batch)
        if progress is not None:
            progress(done, len(subset))
    model.train(was_training)
    vectors = torch.cat(parts)
    if world_size > 1:
        vectors = gather_rows(vectors, shared=False)
    return Embeddings(vectors.cpu().numpy(), np.asarray(images.labels), np.asarray(paths))


def raw_pixels(images: Crops, *, side: int = 32) -> np.ndarray:
    """Centered gray pixels as unit vectors (M, side * side): a baseline without learning."""
    small = Crops(images.open_image, images.labels, size=side, test_crop=images.test_crop)
    pixels = np.stack([small[i][0].mean(axis=0).ravel() for i in range(len(small))])  # (M, side * side)
    pixels -= pixels.mean(axis=1, keepdims=True)
    return (pixels / np.maximum(np.linalg.norm(pixels, axis=1, keepdims=True), 1e-12)).astype(np.float32)
