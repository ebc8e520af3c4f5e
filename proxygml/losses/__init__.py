"""The losses by name."""

from proxygml.losses.proxygml import ProxyGMLLoss

__all__ = ["ProxyGMLLoss"]
