"""Deep metric learning with fewer proxies."""

import importlib
from typing import TYPE_CHECKING

from proxygml.version import __version__

if TYPE_CHECKING:
    from proxygml.estimator import ProxyGMLEmbedding
    from proxygml.losses.proxygml import ProxyGMLLoss
    from proxygml.losses.sharded import ShardedProxyGMLLoss
    from proxygml.optimizers import RowAdam

__all__ = ["ProxyGMLEmbedding", "ProxyGMLLoss", "RowAdam", "ShardedProxyGMLLoss", "__version__"]
_HOMES = {
    "ProxyGMLEmbedding": "estimator",
    "ProxyGMLLoss": "losses.proxygml",
    "RowAdam": "optimizers",
    "ShardedProxyGMLLoss": "losses.sharded",
}


def __getattr__(name: str) -> object:
    """Public names on their first use: `proxygml --help` need not wait for torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"proxygml.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'proxygml' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
