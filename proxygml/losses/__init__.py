"""The losses by name."""

from proxygml.losses.proxygml import ProxyGMLLoss

LOSSES = {"proxygml": ProxyGMLLoss}
