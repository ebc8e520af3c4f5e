"""Losses that pytorch-metric-learning ships, with the constants of their papers."""

from pytorch_metric_learning import losses
from torch import nn


def proxy_anchor(num_classes: int, embedding_dim: int) -> nn.Module:
    """Proxy-Anchor (Kim et al., CVPR 2020): alpha 32, margin 0.1."""
    return losses.ProxyAnchorLoss(num_classes, embedding_dim, margin=0.1, alpha=32)
