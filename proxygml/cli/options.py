"""Options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from proxygml.training.recipe import Device

if TYPE_CHECKING:
    from proxygml.model import Model

SILENT = tyro.conf.arg(help_behavior_hint="")  # the help says what happens without the option


@dataclass(frozen=True)
class Hardware:
    """What embeds images.

    Args:
        device: Accelerator that embeds images (default: the run's, if this machine has it).
        workers: Processes that decode images (default: the run's).
        batch_size: Images that the network embeds at a time (default: 32 on a CPU, else 128).
    """

    device: Annotated[Device | None, SILENT] = None
    workers: Annotated[int | None, SILENT] = None
    batch_size: Annotated[int | None, SILENT] = None

    def load(self, location: str | Path, data: Path | None = None) -> "Model":
        """The model at a path, on this hardware; `data` is the folder of its images if they have moved."""
        from proxygml.model import Model  # loads torch

        return Model(location, data=data, device=self.device, workers=self.workers, batch_size=self.batch_size)


AS_TRAINED = Hardware()
