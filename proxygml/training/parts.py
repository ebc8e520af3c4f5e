"""Parts: a network, images and a loss that are passed as objects instead of named in a recipe.

The recipe then holds the names of their classes, as in "torchvision.models.resnet:ResNet". Nothing is imported by such
a name: whoever continues or loads the run passes the objects again.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from proxygml import losses
from proxygml.training.recipe import Recipe, is_class_name

SETTINGS = {"network": "backbone", "data": "dataset", "loss": "loss"}  # part: the setting that names its class


@dataclass(frozen=True)
class Parts:
    """What replaces the recipe's backbone, dataset and loss; None: as the recipe says."""

    network: nn.Module | None = None
    data: Any = None
    loss: nn.Module | Callable[..., nn.Module] | None = None  # or what makes one of num_classes and embedding_dim

    def __post_init__(self) -> None:
        if self.network is not None and not isinstance(self.network, nn.Module):
            raise ValueError(f"expected network as a torch.nn.Module, got {type(self.network).__name__}")
        if self.loss is not None and not callable(self.loss):
            raise ValueError(f"expected loss as a module loss(embeddings, labels), got {type(self.loss).__name__}")

    def name_in(self, recipe: Recipe) -> Recipe:
        """The recipe with the classes of these objects, and what the loss needs from the network."""
        given = {part: getattr(self, part) for part in SETTINGS if getattr(self, part) is not None}
        changes: dict[str, object] = {SETTINGS[part]: class_name(value) for part, value in given.items()}
        if "network" in given:
            changes["weights"] = None
        if "data" in given:
            changes["data"] = None
        if "loss" in given and recipe.unit_length is None:
            changes["unit_length"] = losses.needs_of(self.loss).unit_length
        return recipe.changed(changes)

    def require(self, recipe: Recipe, *parts: str) -> None:
        """Raise an error unless these parts (default: all) are objects where they were in training."""
        for part in parts or [field.name for field in fields(self)]:
            named, given = getattr(recipe, SETTINGS[part]), getattr(self, part)
            if is_class_name(named) and given is None:
                raise ValueError(
                    f"this run was trained with {part}={named}, which is not stored in it: pass {part}=..."
                )
            if given is not None and not is_class_name(named):
                raise ValueError(f"this run was trained with {SETTINGS[part]} {named}: leave out {part}=")


def class_name(value: object) -> str:
    """module:name of an object's class, or of a class or function."""
    if isinstance(value, nn.Module) or not (inspect.isclass(value) or inspect.isroutine(value)):
        value = type(value)
    return f"{value.__module__}:{value.__qualname__}"
