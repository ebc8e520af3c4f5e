"""Deep metric learning with fewer proxies."""

import importlib
from typing import TYPE_CHECKING

from proxygml.version import __version__

if TYPE_CHECKING:
    from proxygml.features.estimator import ProxyGMLEmbedding
    from proxygml.losses.proxygml.definition import proxygml_loss
    from proxygml.losses.proxygml.module import ProxyGMLLoss
    from proxygml.losses.proxygml.settings import ProxyGMLSettings
    from proxygml.losses.proxygml.sharded import ShardedProxyGMLLoss
    from proxygml.optim import RowAdam

__all__ = [
    "ProxyGMLEmbedding",
    "ProxyGMLLoss",
    "ProxyGMLSettings",
    "RowAdam",
    "ShardedProxyGMLLoss",
    "__version__",
    "proxygml_loss",
]
_HOMES = {
    "ProxyGMLEmbedding": "features.estimator",
    "ProxyGMLLoss": "losses.proxygml.module",
    "ProxyGMLSettings": "losses.proxygml.settings",
    "RowAdam": "optim",
    "ShardedProxyGMLLoss": "losses.proxygml.sharded",
    "proxygml_loss": "losses.proxygml.definition",
}


def __getattr__(name: str) -> object:
    """Public names on their first use: `proxygml --help` need not wait for torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"proxygml.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'proxygml' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
