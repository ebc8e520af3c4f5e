"""Vectors with labels and paths, in one .npz: whoever brings features of their own enters here."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from proxygml.files import check_texts, one_line, refuse_swelling, written_whole
from proxygml.images import Crops, FeatureCrops
from proxygml.loading import loaded

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Embeddings:
    """Row i of `vectors` is image `paths[i]` of class `labels[i]`."""

    vectors: np.ndarray  # (M, D) floats
    labels: np.ndarray  # (M,) integers
    paths: np.ndarray  # (M,) strings
    class_names: np.ndarray = field(default_factory=lambda: np.empty(0, "U1"))  # (C,) strings, or none
    model: str = ""  # the mark of the model that made them, as `Run.mark`; empty where that is not known

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or not np.issubdtype(self.vectors.dtype, np.floating):
            raise ValueError(f"expected vectors as floats (M, D), got {self.vectors.dtype} {self.vectors.shape}")
        if self.labels.ndim != 1 or self.labels.dtype.kind not in "iu":
            came = f"{self.labels.dtype} {self.labels.shape}"
            raise ValueError(f"expected integer labels (M,), got {came}: number the classes")
        if not len(self.vectors) == len(self.labels) == len(self.paths):
            raise ValueError(
                f"expected as many labels and paths as vectors, got {len(self.vectors)} vectors, "
                f"{len(self.labels)} labels and {len(self.paths)} paths"
            )
        outside = self.labels[(self.labels < 0) | (self.labels >= len(self.class_names))]
        if len(self.class_names) and len(outside):
            raise ValueError(f"expected labels below {len(self.class_names)}, as there are names, got {outside[0]}")

    def class_name(self, label: int) -> str:
        """What a class is called; its number where it has no name."""
        return str(self.class_names[label]) if len(self.class_names) else str(label)

    def save(self, path: Path) -> None:
        """Write all to one .npz, whole or not at all."""
        with written_whole(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Embeddings":
        """What `save` wrote, or any .npz with vectors and labels, which may be names of classes.

        Images without paths are called by their number.
        """
        with Path(path).open("rb") as file:  # what the system says of the file is said as it is
            try:
                refuse_swelling(file)
                return cls._of(np.load(file, allow_pickle=False))
            except Exception as error:  # on damaged bytes numpy and zipfile raise whatever they stumble over
                raise ValueError(f"{path} does not hold embeddings: {one_line(error)}") from error

    @classmethod
    def _of(cls, stored: "np.lib.npyio.NpzFile | np.ndarray") -> "Embeddings":
        if isinstance(stored, np.ndarray) or stored.zip is None:
            raise ValueError("one array, where vectors and labels are needed")
        for entry in stored.zip.infolist():  # an altered directory would leave an array out without a word
            stored.zip.open(entry).close()  # compares its name with that at its place in the file
            if entry.comment:
                raise ValueError(f"{entry.filename} has swallowed what follows it")
        missing = {"vectors", "labels"} - set(stored)
        if missing:
            raise ValueError(f"no array {' and '.join(sorted(missing))}, only {', '.join(stored) or 'nothing'}")
        known = [name for name in ("vectors", "labels", "paths", "class_names", "model") if name in stored]
        arrays = {name: np.asarray(stored[name]) for name in known}  # what is no array comes as bytes
        vectors, labels = arrays["vectors"], arrays["labels"]
        for name, array in arrays.items():
            if array.ndim and len(array) and not array.nbytes:  # however many rows it claims
                raise ValueError(f"{name} of shape {array.shape} has no bytes")
        paths = arrays["paths"] if "paths" in arrays else np.arange(labels.size).astype(str)
        names = arrays["class_names"] if "class_names" in arrays else np.empty(0, "U1")
        if labels.ndim == 1 and labels.dtype.kind == "U":
            names, labels = np.unique(labels, return_inverse=True)
        paths, names = (texts.astype(str) if texts.dtype.kind in "iu" else texts for texts in (paths, names))
        check_texts("paths", paths)
        check_texts("class_names", names)
        model = str(arrays["model"]) if "model" in arrays and arrays["model"].size == 1 else ""
        return cls(vectors, labels, paths, names, model)


def joined(parts: Sequence[Embeddings]) -> Embeddings:
    """All of several that one model made; their classes are told apart by name."""
    if len(parts) == 1:
        return parts[0]
    names = np.unique(np.concatenate([part.class_names for part in parts]))
    labels = [np.searchsorted(names, part.class_names)[part.labels] for part in parts]
    vectors, paths = (np.concatenate([getattr(part, each) for part in parts]) for each in ("vectors", "paths"))
    return Embeddings(vectors, np.concatenate(labels), paths, names, parts[0].model)


def embed(
    model: "torch.nn.Module",
    images: Crops | FeatureCrops,
    paths: np.ndarray,
    *,
    batch_size: int = 128,
    workers: int = 0,
    device: "torch.device | str" = "cpu",
    process: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None] | None = None,
) -> Embeddings:
    """The embeddings (M, D) of all images, in their order, by the model in evaluation mode.

    Of several processes, all of which call it, `process` (rank, how many) embeds its part, and all have the whole.
    """
    import torch  # here: whoever reads vectors, or makes them with an exported network, needs none
    from torch.utils.data import DataLoader, Subset

    from proxygml.gathering import gather_rows

    rank, processes = process
    if len(images) < processes:
        raise ValueError(f"expected an image for each of {processes} processes, got {len(images)}")
    places = np.array_split(np.arange(len(images)), processes)[rank]
    mine: Subset = Subset(images, places)  # type: ignore[arg-type]  # both have what it needs: a length and items
    was_training = model.training
    model.eval()
    parts, done = [], 0
    for batch, _ in loaded(DataLoader(mine, batch_size=batch_size, num_workers=workers)):
        with torch.no_grad():
            parts.append(model(batch.to(device)).float())  # (batch, D)
        done += len(batch)
        if progress is not None:
            progress(done, len(mine))
    model.train(was_training)
    vectors = torch.cat(parts)
    if processes > 1:
        vectors = gather_rows(vectors, shared=False)
    return Embeddings(vectors.cpu().numpy(), np.asarray(images.labels), np.asarray(paths))


def raw_pixels(images: Crops, *, side: int = 32) -> np.ndarray:
    """Grey pixels (M, side * side) as vectors of unit length around their mean: what no learning gives."""
    small = Crops(images.open_image, images.labels, size=side, test_crop=images.test_crop)
    pixels = np.stack([small[i][0].mean(axis=0).ravel() for i in range(len(small))])  # (M, side * side)
    pixels -= pixels.mean(axis=1, keepdims=True)
    return (pixels / np.maximum(np.linalg.norm(pixels, axis=1, keepdims=True), 1e-12)).astype(np.float32)
