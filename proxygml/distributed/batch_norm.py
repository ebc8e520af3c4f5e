"""Batch normalization over the images of all processes: nn.SyncBatchNorm on GPUs, JointBatchNorm elsewhere."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from proxygml.distributed.collectives import sum_over_processes


class JointBatchNorm(_BatchNorm):
    """In training mode, uses mean and variance over all processes; a process may have no images."""

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return super().forward(images)
        shape, axes = [1, -1, *[1] * (images.ndim - 2)], [0, *range(2, images.ndim)]
        maps = images.to(torch.promote_types(images.dtype, torch.float32))
        count = maps.numel() // maps.shape[1]
        origin = maps.detach().sum(axes) / max(count, 1)  # (channels,): near the mean, so that squares do not cancel
        centered = maps - origin.view(shape)
        sums, squares, origin = centered.sum(axes).double(), centered.square().sum(axes).double(), origin.double()
        parts = origin.new_tensor([count]), sums + count * origin, squares + (2 * sums + count * origin) * origin
        total, *moments = sum_over_processes(torch.cat(parts)).split([1, len(origin), len(origin)])
        mean, square = (moment / total for moment in moments)  # (channels,) each
        variance = square - mean.square()
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            momentum = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), momentum)
            unbiased = variance.detach() * total / (total - 1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        scale = self.weight / (variance + self.eps).sqrt()  # (channels,)
        offset = self.bias + (origin - mean) * scale
        normalized = centered * scale.to(maps.dtype).view(shape) + offset.to(maps.dtype).view(shape)
        return normalized.to(images.dtype)

    def _check_input_dim(self, images: Tensor) -> None:
        """Any number of dimensions."""


def join_batch_norms(network: nn.Module, device: torch.device) -> None:
    """Make every batch normalization of a network one over all processes, in place."""
    for module in network.modules():
        if type(module) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            continue
        if device.type == "cuda":
            module.__class__ = nn.SyncBatchNorm  # same parameters and statistics
            module.process_group = None  # type: ignore[assignment]  # all processes
            module.register_forward_pre_hook(_in_float32_if_empty)
        else:
            module.__class__ = JointBatchNorm


def _in_float32_if_empty(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """SyncBatchNorm sends float32 statistics of images in any precision, but those of no images in their precision."""
    (images,) = inputs
    return (images if len(images) else images.float(),)
