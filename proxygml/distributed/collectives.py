"""What processes tell each other: rows of all of them and sums over all of them, with gradients; their settings.

Gradients of a process's own numbers come out multiplied by the number of processes: DistributedDataParallel, through
which they then go, takes the mean over processes where their sum is meant.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None, *, shared: bool) -> Tensor:
    """The rows (b, ...) of all processes, in the order of their ranks: (B, ...); b may differ.

    Where each process makes a part of the loss of all rows, their gradients are `shared` and have to be added up; where
    each makes all of it, they are whole already.
    """
    return _GatherRows.apply(rows, group, shared)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None, shared: bool) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        told = [torch.empty((), dtype=torch.int64, device=rows.device) for _ in range(size)]
        dist.all_gather(told, torch.tensor(len(rows), device=rows.device), group)
        counts = [int(count) for count in told]
        longest = rows.new_zeros(max(counts), *rows.shape[1:])  # all have to send as many
        longest[: len(rows)] = rows
        gathered = [torch.empty_like(longest) for _ in range(size)]
        dist.all_gather(gathered, longest, group)
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
        return _summed(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _summed(gradient)  # every process has used the sum


def _summed(values: Tensor) -> Tensor:
    device = "cuda" if dist.get_backend() == "nccl" else values.device  # nccl knows the memory of GPUs alone
    total = values.to(device, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total.to(values.device)


def same_everywhere(settings: dict[str, object], group: dist.ProcessGroup | None = None) -> None:
    """An error on every process where they were given different settings."""
    everyone: list[dict[str, object]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, settings, group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            names = sorted(name for name in {*theirs, *everyone[0]} if theirs.get(name) != everyone[0].get(name))
            values = ", ".join(f"{name} {everyone[0].get(name)} and {theirs.get(name)}" for name in names)
            raise ValueError(f"expected the same settings on all processes, got on ranks 0 and {rank}: {values}")
