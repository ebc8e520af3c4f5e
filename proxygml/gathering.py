"""What processes tell each other about a batch: rows of all of them, with gradients that come back to their owners."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The rows (b, ...) of all processes, in the order of their ranks: (B, ...); b may differ.

    The gradient of a process's own rows is the sum of what all processes say of them, times the number of processes:
    DistributedDataParallel, through which it then goes, takes the mean over processes where the sum is meant.
    """
    return _GatherRows.apply(rows, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        counts = [torch.empty((), dtype=torch.int64, device=rows.device) for _ in range(size)]
        dist.all_gather(counts, torch.tensor(len(rows), device=rows.device), group)
        counts = [int(count) for count in counts]
        longest = rows.new_zeros(max(counts), *rows.shape[1:])  # all have to send as many
        longest[: len(rows)] = rows
        gathered = [torch.empty_like(longest) for _ in range(size)]
        dist.all_gather(gathered, longest, group)
        ctx.group, ctx.size = group, size
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        return torch.cat([each[:count] for each, count in zip(gathered, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return ctx.size * gradient[ctx.own], None
