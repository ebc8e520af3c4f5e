"""What the losses share: validation of settings and batches, the precision they compute in, and `LibraryLoss`."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.precision import full_float32

MIN_NORM = 1e-12  # smallest divisor of a vector in F.normalize
MAX_ELEMENT = 1e15  # largest element of an embedding that a loss may square: sums of squares stay finite in float32


class LibraryLoss(nn.Module):
    """A loss of pytorch-metric-learning, with its miner if it has one, behind this package's interface.

    It validates batches and computes in float32 or higher. The library would convert the parameters to the dtype of
    the embeddings. Most losses normalize embeddings; without `directions`, norms count.
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
        self.num_classes, self.embedding_dim = num_classes, embedding_dim
        self.loss, self.miner, self.directions = loss, miner, directions

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        with full_precision(self, embeddings, labels) as (embeddings, labels):
            if self.directions:
                embeddings = rescaled(embeddings)
            else:
                check_magnitude(embeddings)
            parameters = {name: parameter.to(embeddings.dtype) for name, parameter in self.loss.named_parameters()}
            mined = () if self.miner is None else (self.miner(embeddings, labels),)
            return torch.func.functional_call(self.loss, parameters, (embeddings, labels, *mined))


@contextmanager
def full_precision(loss: Any, embeddings: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Validated embeddings (B, D) and int64 labels (B,) in the `highest_precision` of the loss, autocast and TF32 off.

    The loss is a module with the attributes num_classes and embedding_dim.
    """
    labels = checked_shapes(embeddings, labels, loss.embedding_dim)
    check_values(embeddings, labels, loss.num_classes)
    with without_autocast(embeddings.device.type), full_float32():
        yield embeddings.to(highest_precision(embeddings, *loss.parameters())), labels


def without_autocast(device_type: str) -> AbstractContextManager:
    """Turns autocast off; free where it is off already."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


def highest_precision(*tensors: Tensor) -> torch.dtype:
    """The dtype that all tensors promote to, float32 or higher."""
    precision = torch.float32
    for tensor in tensors:
        precision = torch.promote_types(precision, tensor.dtype)
    return precision


def normalized(vectors: Tensor) -> Tensor:
    """Unit vectors (..., D) of vectors of any norm, in float32 or higher; a vector of zeros stays zero."""
    return F.normalize(rescaled(vectors.to(highest_precision(vectors))), dim=-1)


def rescaled(vectors: Tensor) -> Tensor:
    """The same directions (..., D) with norms that can be squared: each vector divided by a power of 2, so exactly.

    Above 1e19 or below 1e-12, F.normalize alone would return zeros or short vectors, without a gradient. A vector of
    zeros has no gradient here either, since no direction is better for it than another.
    """
    largest = vectors.detach().abs().amax(dim=-1, keepdim=True)  # (..., 1)
    most = -int(math.log2(torch.finfo(vectors.dtype).tiny))
    exponents = torch.frexp(largest)[1].clamp(-most, most)
    return vectors * torch.exp2(-exponents.to(vectors.dtype)).where(largest > 0, 0)


def checked_shapes(embeddings: Tensor, labels: Tensor, embedding_dim: int) -> Tensor:
    """The labels as int64 on the device of the embeddings; an error if a type or shape is wrong."""
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


def check_values(embeddings: Tensor, labels: Tensor, num_classes: int) -> bool:
    """Whether the squares of all embeddings are in range; an error if a value is wrong."""
    if len(embeddings) == 0:
        raise ValueError("expected at least one embedding, got an empty batch")
    shortest, longest = (norm.item() for norm in torch.linalg.vector_norm(embeddings.detach(), dim=1).aminmax())
    if not math.isfinite(longest) and (rows := (~torch.isfinite(embeddings)).any(dim=1).sum().item()):
        raise ValueError(f"expected finite embeddings, got NaN or infinity in {rows} of {len(embeddings)} rows")
    lowest, highest = (label.item() for label in labels.aminmax())
    if lowest < 0 or highest >= num_classes:
        raise ValueError(f"expected labels in 0..{num_classes - 1}, got {lowest}..{highest}: number the classes from 0")
    return shortest >= MIN_NORM and longest < math.inf


class BatchCheck:
    """Checks the values of batches: of each batch on a CPU; elsewhere every 20 batches, so that no step waits."""

    EVERY = 20

    def __init__(self) -> None:
        self.batches = 0
        self.extremes: Tensor | None = None  # minimum since the last check of [lowest, -highest label, -bad rows]

    def __call__(self, embeddings: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Embeddings with norms that can be squared, and labels; an error if a value is wrong.

        On an accelerator, a wrong label is clamped until it is reported.
        """
        if embeddings.device.type == "cpu":
            in_range = check_values(embeddings, labels, num_classes)
            return (embeddings if in_range else rescaled(embeddings)), labels
        self.record(embeddings, labels, num_classes)
        return rescaled(embeddings), labels.clamp(0, num_classes - 1)

    def record(self, embeddings: Tensor, labels: Tensor, num_classes: int) -> None:
        """Keep the extremes of a batch on its device, and check them after every 20 batches."""
        lowest, highest = labels.aminmax()
        not_finite = (~embeddings.detach().isfinite()).any(dim=1).sum()
        extremes = torch.stack([lowest, -highest, -not_finite])
        self.extremes = extremes if self.extremes is None else torch.minimum(self.extremes, extremes)
        self.batches += 1
        if self.batches % self.EVERY:
            return
        lowest, highest, not_finite = self.extremes.tolist()
        self.extremes = None
        if not_finite:
            raise ValueError(f"expected finite embeddings, got NaN or infinity in one of the last {self.EVERY} batches")
        if lowest < 0 or -highest >= num_classes:
            raise ValueError(
                f"expected labels in 0..{num_classes - 1}, got {lowest}..{-highest} in the last {self.EVERY} batches: "
                "number the classes from 0"
            )


def check_magnitude(embeddings: Tensor) -> None:
    """An error if embeddings are too large for a loss that squares them."""
    largest = embeddings.detach().abs().max().item()
    if largest > MAX_ELEMENT:
        raise ValueError(f"expected embeddings up to {MAX_ELEMENT:g}, since this loss squares them, got {largest:g}")


def require_whole(**settings: int) -> None:
    _require(settings, lambda value: isinstance(value, Integral) and int(value) >= 1, "as a whole number of at least 1")


def require_positive(**settings: float) -> None:
    _require(settings, lambda value: 0 < value < math.inf, "above 0")


def require_not_negative(**settings: float) -> None:
    _require(settings, lambda value: 0 <= value < math.inf, "of at least 0")


def _require(settings: dict, is_valid: Callable[..., bool], expected: str) -> None:
    for name, value in settings.items():
        if not is_valid(value):
            raise ValueError(f"expected {name} {expected}, got {value!r}")


def require_choice(name: str, value: str, *choices: str) -> None:
    if value not in choices:
        raise ValueError(f"expected {name} as one of {', '.join(choices)}, got {value!r}")
