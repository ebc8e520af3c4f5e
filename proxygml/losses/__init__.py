"""The losses by name: `find("proxygml")(num_classes, embedding_dim)` is a module, `loss(embeddings, labels)`."""

import importlib
from collections.abc import Callable

from torch import nn

LOSSES = {  # name: module, what makes it
    "proxygml": ("proxygml", "ProxyGMLLoss"),
    "proxy-anchor": ("baselines", "proxy_anchor"),
}


def find(name: str) -> Callable[..., nn.Module]:
    """What makes a loss from (num_classes, embedding_dim) and keywords of its own."""
    if name not in LOSSES:
        raise ValueError(f"expected a loss among {', '.join(LOSSES)}, got {name!r}")
    module, maker = LOSSES[name]
    return getattr(importlib.import_module(f"proxygml.losses.{module}"), maker)
