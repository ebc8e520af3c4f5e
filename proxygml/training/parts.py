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
    data: Any = None  # or a function that returns it
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
        if "data" in given and recipe.data is not None and not callable(self.data):
            raise ValueError(
                f"expected data={changes['dataset']} alone, got the folder {recipe.data} in the recipe too"
            )
        if "loss" in given and recipe.unit_length is None:
            changes["unit_length"] = losses.needs_of(self.loss).unit_length
        return recipe.changed(changes)

    def name_as_before(self, recipe: Recipe, before: Recipe) -> Recipe:
        """The recipe with the names that these objects had in an earlier one: their module may be another now."""
        settings = [setting for part, setting in SETTINGS.items() if getattr(self, part) is not None]
        return recipe.changed({setting: getattr(before, setting) for setting in settings})

    def require(self, recipe: Recipe, *parts: str) -> None:
        """Raise an error unless these parts (default: all) are objects where they were in training."""
        for part in parts or [field.name for field in fields(self)]:
            named, given = getattr(recipe, SETTINGS[part]), getattr(self, part)
            if is_class_name(named) and given is None:
                option = " in Python" if part == "network" else f", or --{SETTINGS[part]} MODULE:NAME"
                raise ValueError(f"this run needs {part}={named}, which is not stored in it: pass {part}=...{option}")
            if given is not None and not is_class_name(named):
                raise ValueError(f"this run was trained with {SETTINGS[part]} {named}: leave out {part}=")


def class_name(value: object) -> str:
    """module:name of an object's class, or of a class or function."""
    if isinstance(value, nn.Module) or not (inspect.isclass(value) or inspect.isroutine(value)):
        value = type(value)
    return f"{value.__module__}:{value.__qualname__}"


def make_loss(
    loss: nn.Module | Callable[..., nn.Module], num_classes: int, embedding_dim: int, settings: dict[str, Any]
) -> nn.Module:
    """A loss that is passed as a module, or made by a class or function from what its signature names."""
    made: object = loss
    if not isinstance(loss, nn.Module):
        sizes = {"num_classes": num_classes, "embedding_dim": embedding_dim, "embedding_size": embedding_dim}
        signature = inspect.signature(loss)
        options = {name: size for name, size in sizes.items() if name in signature.parameters} | settings
        try:
            signature.bind(**options)
        except TypeError as error:
            expected = "num_classes and embedding_dim, other parameters in loss_settings"
            raise ValueError(f"expected {class_name(loss)} to make a loss from {expected}: {error}") from error
        made = loss(**options)
    if not isinstance(made, nn.Module):
        raise ValueError(f"expected {class_name(loss)} to make a torch.nn.Module, got {type(made).__name__}")
    known = getattr(made, "num_classes", None)
    if isinstance(known, int) and known < num_classes:
        raise ValueError(f"expected a loss for {num_classes} training classes, got one for {known}: pass its class")
    return made
