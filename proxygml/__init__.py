"""Deep metric learning with fewer proxies: the public API."""

import importlib
from typing import TYPE_CHECKING

from proxygml.version import __version__

if TYPE_CHECKING:
    from proxygml.embeddings import Embeddings, embed
    from proxygml.evaluation import Scores, evaluate
    from proxygml.features.estimator import ProxyGMLEmbedding
    from proxygml.losses.proxygml.definition import proxygml_loss
    from proxygml.losses.proxygml.module import ProxyGMLLoss
    from proxygml.losses.proxygml.settings import ProxyGMLSettings
    from proxygml.losses.proxygml.sharded import ShardedProxyGMLLoss
    from proxygml.model import Model, load
    from proxygml.optim import RowAdam
    from proxygml.retrieval import Index
    from proxygml.training.recipe import Recipe
    from proxygml.training.run import Run
    from proxygml.training.start import resume, train

__all__ = [
    "Embeddings",
    "Index",
    "Model",
    "ProxyGMLEmbedding",
    "ProxyGMLLoss",
    "ProxyGMLSettings",
    "Recipe",
    "RowAdam",
    "Run",
    "Scores",
    "ShardedProxyGMLLoss",
    "__version__",
    "embed",
    "evaluate",
    "load",
    "proxygml_loss",
    "resume",
    "train",
]
_MODULES = {
    "Embeddings": "embeddings",
    "Index": "retrieval",
    "Model": "model",
    "ProxyGMLEmbedding": "features.estimator",
    "ProxyGMLLoss": "losses.proxygml.module",
    "ProxyGMLSettings": "losses.proxygml.settings",
    "Recipe": "training.recipe",
    "RowAdam": "optim",
    "Run": "training.run",
    "Scores": "evaluation",
    "ShardedProxyGMLLoss": "losses.proxygml.sharded",
    "embed": "embeddings",
    "evaluate": "evaluation",
    "load": "model",
    "proxygml_loss": "losses.proxygml.definition",
    "resume": "training.start",
    "train": "training.start",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: `proxygml --help` does not wait for torch."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"proxygml.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'proxygml' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
