"""Batch normalization over the images of all processes, also without a GPU (SyncBatchNorm needs one)."""

import torch
from torch import Tensor, nn

from proxygml.distributed.collectives import sum_over_processes


class JointBatchNorm(nn.BatchNorm2d):
    """In training mode, uses mean and variance over all processes; a process may have no images."""

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return super().forward(images)
        shape = (1, -1, 1, 1)
        count = sum_over_processes(images.new_tensor(images.numel() / images.shape[1]))
        mean = _sum(images) / count  # (channels,)
        centered = images - mean.view(shape)
        variance = _sum(centered.square()) / count  # (channels,)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            momentum = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach(), momentum)
            self.running_var.lerp_(variance.detach() * count / (count - 1), momentum)
        scale = self.weight / (variance + self.eps).sqrt()
        return centered * scale.view(shape) + self.bias.view(shape)


def _sum(maps: Tensor) -> Tensor:
    """Sum over all processes, in float64: (B, channels, H, W) -> (channels,)."""
    return sum_over_processes(maps.sum((0, 2, 3), dtype=torch.float64)).to(maps.dtype)


def join_batch_norms(network: nn.Module) -> None:
    """Turn every BatchNorm2d of a network into a JointBatchNorm, in place."""
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = JointBatchNorm  # same parameters and statistics
