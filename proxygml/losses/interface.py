"""What losses share that come from elsewhere: the check of a batch, and the precision in which they are computed."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral

import torch
from torch import Tensor, nn

LONGEST = 1e15  # of the numbers of an embedding that is squared: sums of squares stay finite in float32


class LibraryLoss(nn.Module):
    """A loss of pytorch-metric-learning, with its miner if it has one, behind this package's interface.

    It refuses batches that cannot be right, computes in float32 at least, and leaves the type of the parameters alone,
    where the library would turn them into the type of the embeddings. Of most losses only the `directions` of
    embeddings count.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        loss: nn.Module,
        miner: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None,
        *,
        directions: bool = True,
    ) -> None:
        super().__init__()
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim)
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.loss = loss
        self.miner = miner
        self.directions = directions

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        labels = checked_labels(embeddings, labels, self.num_classes, self.embedding_dim)
        if not self.directions:
            check_lengths(embeddings)
        precision = highest_precision(embeddings, *self.loss.parameters())
        with without_autocast(embeddings.device.type):
            embeddings = rescaled(embeddings.to(precision)) if self.directions else embeddings.to(precision)
            parameters = {name: parameter.to(precision) for name, parameter in self.loss.named_parameters()}
            mined = () if self.miner is None else (self.miner(embeddings, labels),)
            return torch.func.functional_call(self.loss, parameters, (embeddings, labels, *mined))


def without_autocast(device_type: str) -> AbstractContextManager:
    """In which operations keep the types of what they are given; entering autocast where there is none takes time."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


def highest_precision(*tensors: Tensor) -> torch.dtype:
    """The type in which all of them lose nothing, float32 at least."""
    precision = torch.float32
    for tensor in tensors:
        precision = torch.promote_types(precision, tensor.dtype)
    return precision


def rescaled(vectors: Tensor) -> Tensor:
    """The same directions (..., D), with lengths that can be squared: each vector divided by some power of 2.

    That loses no digit. Where numbers are above 1e19 or below 1e-12, F.normalize alone would give zeros or what is too
    short, and no gradient. A vector of zeros has none here either, since no direction is better for it than another.
    """
    largest = vectors.detach().abs().amax(dim=-1, keepdim=True)  # (..., 1)
    most = -int(math.log2(torch.finfo(vectors.dtype).tiny))
    exponents = torch.frexp(largest)[1].clamp(-most, most)
    return vectors * torch.exp2(-exponents.to(vectors.dtype)).where(largest > 0, 0)


def checked_labels(embeddings: Tensor, labels: Tensor, num_classes: int, embedding_dim: int) -> Tensor:
    """The labels as int64 on the embeddings' device, once both are known to be usable."""
    labels = checked_shapes(embeddings, labels, embedding_dim)
    check_values(embeddings, labels, num_classes)
    return labels


def checked_shapes(embeddings: Tensor, labels: Tensor, embedding_dim: int) -> Tensor:
    """The labels as int64 on the embeddings' device, once both are known to be of the right types and shapes."""
    for name, given in (("embeddings", embeddings), ("labels", labels)):
        if not isinstance(given, Tensor):
            raise ValueError(f"expected {name} as a tensor, got {type(given).__name__}")
    if embeddings.ndim != 2 or embeddings.shape[1] != embedding_dim:
        raise ValueError(f"expected embeddings of shape (batch, {embedding_dim}), got {tuple(embeddings.shape)}")
    if not embeddings.is_floating_point():
        raise ValueError(f"expected embeddings of a float type, got {embeddings.dtype}")
    if labels.shape != embeddings.shape[:1]:
        raise ValueError(f"expected labels of shape ({len(embeddings)},), got {tuple(labels.shape)}")
    if len(labels) and (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool):
        raise ValueError(f"expected integer labels, got {labels.dtype}: convert them with labels.long()")
    return labels.to(embeddings.device, torch.int64)


def check_values(embeddings: Tensor, labels: Tensor, num_classes: int) -> float:
    """An error where embeddings are none or not finite, or a label is of no class.

    Otherwise the length of all embeddings as one vector, which is infinite where the squares of numbers are.
    """
    if len(embeddings) == 0:
        raise ValueError("expected at least one embedding, got an empty batch")
    length = torch.linalg.vector_norm(embeddings.detach()).item()
    if not math.isfinite(length) and (rows := (~torch.isfinite(embeddings)).any(dim=1).sum().item()):
        raise ValueError(f"expected finite embeddings, got NaN or infinity in {rows} of {len(embeddings)} rows")
    lowest, highest = (label.item() for label in labels.aminmax())
    if lowest < 0 or highest >= num_classes:
        raise ValueError(f"expected labels in 0..{num_classes - 1}, got {lowest}..{highest}: number the classes from 0")
    return length


class BatchCheck:
    """Checks the values of batches: each at once on a CPU; elsewhere every 20 batches, so that no step waits for it."""

    EVERY = 20

    def __init__(self) -> None:
        self.batches = 0
        self.extremes: Tensor | None = None  # lowest and -highest label, -rows that are not finite; since the last read

    def __call__(self, embeddings: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Embeddings with norms that can be squared, and labels; an error where values cannot be right.

        Until a wrong label is reported, it counts as the nearest right one.
        """
        if embeddings.device.type == "cpu":
            norm = check_values(embeddings, labels, num_classes)
            return (rescaled(embeddings) if math.isinf(norm) else embeddings), labels
        self.look_at(embeddings, labels, num_classes)
        return rescaled(embeddings), labels.clamp(0, num_classes - 1)

    def look_at(self, embeddings: Tensor, labels: Tensor, num_classes: int) -> None:
        """Keep the extremes of a batch where it lies; after every 20 batches, read them."""
        lowest, highest = labels.aminmax()
        broken = (~embeddings.detach().isfinite()).any(dim=1).sum()
        extremes = torch.stack([lowest, -highest, -broken])
        self.extremes = extremes if self.extremes is None else torch.minimum(self.extremes, extremes)
        self.batches += 1
        if self.batches % self.EVERY:
            return
        lowest, highest, broken = self.extremes.tolist()
        self.extremes = None
        if broken:
            raise ValueError(f"expected finite embeddings, got NaN or infinity in one of the last {self.EVERY} batches")
        if lowest < 0 or -highest >= num_classes:
            raise ValueError(
                f"expected labels in 0..{num_classes - 1}, got {lowest}..{-highest} in the last {self.EVERY} batches: "
                "number the classes from 0"
            )


def check_lengths(embeddings: Tensor) -> None:
    """An error where embeddings are too long for a loss that squares them, as lengths count in it."""
    largest = embeddings.detach().abs().max().item()
    if largest > LONGEST:
        raise ValueError(f"expected finite embeddings up to {LONGEST:g}, whose squares count here, got {largest:g}")


def require_whole(**settings: int) -> None:
    for name, value in settings.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"expected {name} as a whole number of at least 1, got {value}")


def require_positive(**settings: float) -> None:
    for name, value in settings.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"expected {name} above 0, got {value!r}")


def require_not_negative(**settings: float) -> None:
    for name, value in settings.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"expected {name} of at least 0, got {value!r}")


def require_choice(name: str, value: str, *choices: str) -> None:
    if value not in choices:
        raise ValueError(f"expected {name} as one of {', '.join(choices)}, got {value!r}")
