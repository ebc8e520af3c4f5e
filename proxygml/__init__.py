"""Deep metric learning with fewer proxies."""

from proxygml.losses.proxygml import ProxyGMLLoss
from proxygml.version import __version__

__all__ = ["ProxyGMLLoss", "__version__"]
