"""StepMonitor: mean losses and skipped steps of an epoch, summed on the device so that no step waits for it."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

MAX_SKIPPED = 20  # steps in a row with a gradient that is not finite: training does not recover from that


class StepMonitor:
    """Sums of losses and counts of skipped steps on the device, read every step on a CPU, else every 20 steps."""

    def __init__(self, device: torch.device, *, in_a_row: int = 0) -> None:
        self.every = 1 if device.type == "cpu" else 20
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums: dict[str, Tensor] = {}
        self.steps = self.images = 0
        self.value = math.nan  # of the loss, when it was last read
        zero = torch.zeros((), dtype=torch.int64, device=device)
        self.counts = torch.stack([zero, zero + in_a_row, zero + in_a_row])  # skipped, now in a row, most in a row

    def add(self, terms: Mapping[str, Tensor], finite: Tensor, images: int) -> None:
        """Add one step: its loss terms, whether its gradient was finite, and its number of images."""
        for name, term in terms.items():
            term = term.detach().to(self.dtype)
            self.sums[name] = self.sums.get(name, torch.zeros_like(term)) + term * images
        skipped, now, most = self.counts
        now = (now + 1).where(~finite, 0)
        self.counts = torch.stack([skipped + ~finite, now, torch.maximum(most, now)])
        self.steps += 1
        self.images += images
        if self.steps % self.every == 0:
            self.value = terms["loss"].item()
            self.check()

    def check(self) -> None:
        """Raise a ValueError if the loss is not finite, or the gradient was not for too many steps in a row."""
        total, most = self.sums["loss"].item(), int(self.counts[2])
        if not math.isfinite(total):
            raise ValueError(f"the loss became {total}: lower learning_rate")
        if most >= MAX_SKIPPED:
            raise ValueError(f"the gradient was not finite in {MAX_SKIPPED} steps in a row: lower learning_rate")

    def means(self) -> dict[str, float]:
        """Means of the loss terms over all images so far, and `skipped_steps`, if any."""
        self.check()
        skipped = int(self.counts[0])
        means = {name: total.item() / self.images for name, total in self.sums.items()}
        return means | ({"skipped_steps": skipped} if skipped else {})

    @property
    def in_a_row(self) -> int:
        """Number of steps skipped in a row up to now."""
        return int(self.counts[1])


def are_finite(gradients: Sequence[Tensor | None]) -> Tensor:
    """Whether the norm of every gradient is finite, as a boolean tensor on their device.

    Not so with NaN, infinity, or values too large for the squares that Adam takes.
    """
    values = [each._values() if each.is_sparse else each for each in gradients if each is not None]
    norms = torch._foreach_norm([each for each in values if each.numel()])  # the maximum norm takes 40 times as long
    return torch.stack(norms).isfinite().all()


def loss_terms(loss: nn.Module, value: Tensor) -> dict[str, Tensor]:
    """The loss by the name "loss", and its parts if it has `last_terms`."""
    terms = getattr(loss, "last_terms", None)
    parts = {} if terms is None else {name: term for name, term in terms._asdict().items() if term is not None}
    return {"loss": value} | parts
