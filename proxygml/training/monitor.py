"""What is watched of training steps: mean losses, and gradients that are not finite; no step waits for the device."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

MAX_SKIPPED = 20  # steps in a row with a gradient that is not finite: training does not recover from that


class StepMonitor:
    """Sums of losses over an epoch, and skipped steps, kept where they are computed and read now and then.

    On a CPU they are read after every step, elsewhere after every 20.
    """

    def __init__(self, device: torch.device, *, in_a_row: int = 0) -> None:
        self.every = 1 if device.type == "cpu" else 20
        self.precision = torch.float32 if device.type == "mps" else torch.float64
        self.sums: dict[str, Tensor] = {}
        self.steps = self.images = 0
        self.value = math.nan  # of the loss, as it was last read
        zero = torch.zeros((), dtype=torch.int64, device=device)
        self.counts = torch.stack([zero, zero + in_a_row, zero + in_a_row])  # skipped, in a row now, most in a row

    def add(self, terms: Mapping[str, Tensor], finite: Tensor, images: int) -> None:
        """One step: its loss and the parts of it, whether its gradient was finite, and how many images it had."""
        for name, term in terms.items():
            term = term.detach().to(self.precision)
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
        """An error where the loss is no number any more, or too many gradients in a row are not."""
        total, most = self.sums["loss"].item(), int(self.counts[2])
        if not math.isfinite(total):
            raise ValueError(f"the loss became {total}: lower learning_rate")
        if most >= MAX_SKIPPED:
            raise ValueError(f"the gradient was not finite in {MAX_SKIPPED} steps in a row: lower learning_rate")

    def means(self) -> dict[str, float]:
        """Of the loss and its parts, over all images so far; and `skipped_steps`, if any."""
        self.check()
        skipped = int(self.counts[0])
        means = {name: total.item() / self.images for name, total in self.sums.items()}
        return means | ({"skipped_steps": skipped} if skipped else {})

    @property
    def in_a_row(self) -> int:
        """Steps skipped in a row up to now."""
        return int(self.counts[1])


def are_finite(gradients: list[Tensor]) -> Tensor:
    """Whether no gradient has NaN or infinity in it: a truth value on their device."""
    values = [each._values() if each.is_sparse else each for each in gradients]
    norms = torch._foreach_norm([each for each in values if each.numel()], math.inf)  # NaN, if any entry is
    return torch.stack(norms).isfinite().all()


def terms_of(loss: nn.Module, value: Tensor) -> dict[str, Tensor]:
    """The loss and, where it tells them, its parts."""
    terms = getattr(loss, "last_terms", None)
    parts = {} if terms is None else {name: term for name, term in terms._asdict().items() if term is not None}
    return {"loss": value} | parts
