"""Collectives: rows and sums of all processes, with gradients; means of gradients; a check that settings are equal.

The gradient of `gather_rows` is multiplied by the number of processes, because DistributedDataParallel then averages
over processes where the sum is needed.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None, *, shared: bool) -> Tensor:
    """The rows (b, ...) of all processes, in the order of their ranks: (B, ...); b may differ.

    Set `shared` if each process computes a part of the loss: gradients are then summed over processes. Otherwise each
    process computes the whole loss and has the whole gradient already.
    """
    return _GatherRows.apply(rows, group, shared)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None, shared: bool) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        sizes = [torch.empty((), dtype=torch.int64, device=rows.device) for _ in range(size)]
        dist.all_gather(sizes, torch.tensor(len(rows), device=rows.device), group)
        counts = [int(count) for count in sizes]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])  # all processes must send the same size
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(gathered, padded, group)
        ctx.group, ctx.size, ctx.shared = group, size, shared
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        return torch.cat([each[:count] for each, count in zip(gathered, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.shared:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient, group=ctx.group)
        return ctx.size * gradient[ctx.own], None, None


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum over all processes of values of the same shape."""
    return _SumOverProcesses.apply(values)


class _SumOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return _all_reduce(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _all_reduce(gradient)  # every process uses the sum


def _all_reduce(values: Tensor) -> Tensor:
    device = "cuda" if dist.get_backend() == "nccl" else values.device  # nccl needs GPU tensors
    total = values.to(device, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total.to(values.device)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over all processes, so that equal copies of a parameter stay equal."""
    size = dist.get_world_size()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.coalesce()
            indices = gather_rows(gradient.indices().T, shared=False).T
            values = gather_rows(gradient.values() / size, shared=False)
            parameter.grad = torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False).coalesce()
        elif gradient is not None:
            parameter.grad = _all_reduce(gradient) / size


def require_equal_settings(settings: dict[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise a ValueError in every process if their settings differ."""
    everyone: list[dict[str, object]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, settings, group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            names = sorted(name for name in {*theirs, *everyone[0]} if theirs.get(name) != everyone[0].get(name))
            values = ", ".join(f"{name} {everyone[0].get(name)} and {theirs.get(name)}" for name in names)
            raise ValueError(f"expected the same settings on all processes, got on ranks 0 and {rank}: {values}")
