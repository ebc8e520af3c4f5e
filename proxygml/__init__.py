"""Deep metric learning with fewer proxies."""

from typing import TYPE_CHECKING

from proxygml.version import __version__

if TYPE_CHECKING:
    from proxygml.losses.proxygml import ProxyGMLLoss

__all__ = ["ProxyGMLLoss", "__version__"]


def __getattr__(name: str) -> object:
    """Public names on their first use: `proxygml --help` need not wait for torch."""
    if name == "ProxyGMLLoss":
        from proxygml.losses.proxygml import ProxyGMLLoss

        return ProxyGMLLoss
    raise AttributeError(f"module 'proxygml' has no attribute {name!r}")
