"""The ProxyGML loss with its classes sharded over processes: each has the proxies of some of them.

Every process gathers all embeddings and compares them with its own proxies. Three collective operations follow: a
distributed top-k over all proxies and the softmax over all active classes, with messages whose size depends only on the
batch, and the regularizer, for which the processes broadcast their class sums in turn.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.distributed.collectives import gather_rows, require_equal_settings
from proxygml.losses.interface import BatchCheck, checked_shapes, highest_precision, require_whole, without_autocast
from proxygml.losses.proxygml import chunked
from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.gradients import Terms, loss_and_gradients
from proxygml.losses.proxygml.module import ProxyGMLFunction, warn_without_negatives
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.precision import full_float32

CLASSES_PER_SEED = 1024  # makes initial proxies independent of the number of processes


class ShardedProxyGMLLoss(nn.Module):
    """`loss(embeddings, labels)` on every process: embeddings (b, D) and labels (b,) of its part of the batch.

    Value and gradients equal those of `ProxyGMLLoss` on the batches of all processes together. `num_classes` and labels
    count the classes of all processes; the parameter `proxies` (classes here, N, D) starts at class `first_class`. Wrap
    the network in DistributedDataParallel, which takes the mean over processes, but not the loss: each process has its
    own proxies, initialized from `seed`. A process without embeddings in a batch must still call the loss.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        settings: ProxyGMLSettings = ProxyGMLSettings(),  # noqa: B008  # it is frozen
        *,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise ValueError("expected several processes: start them with torchrun, or use ProxyGMLLoss in one")
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim)
        shared = {"num_classes": num_classes, "embedding_dim": embedding_dim, "seed": seed}
        require_equal_settings(shared | asdict(settings), group)
        warn_without_negatives(num_classes, settings)
        self.num_classes, self.settings, self.group = num_classes, settings, group
        self.links = settings.links_for(num_classes)
        self.first_class, stop = class_range(num_classes, dist.get_rank(group), dist.get_world_size(group))
        shape = torch.Size([num_classes, settings.proxies_per_class, embedding_dim])
        self.proxies = nn.Parameter(initial_proxies(shape, self.first_class, stop, seed))
        self.last_terms: Terms | None = None
        self.gradient_pool, self.check = BufferPool(), BatchCheck()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of the batches of all processes, the same on each."""
        labels = checked_shapes(embeddings, labels, self.proxies.shape[2])
        precision = highest_precision(embeddings, self.proxies)
        with without_autocast(embeddings.device.type), full_float32():
            embeddings = gather_rows(embeddings.to(precision), self.group, shared=True)  # (B, D)
            labels = gather_rows(labels, self.group, shared=True)  # (B,)
            embeddings, labels = self.check(embeddings, labels, self.num_classes)  # fails on all processes or none
            proxies = self.proxies if torch.is_grad_enabled() else self.proxies.detach()
            compute = partial(
                loss_and_gradients,
                sample_loss=chunked.sample_loss,
                settings=self.settings,
                links=self.links,
                pool=self.gradient_pool,
                collectives=ProcessCollectives(self.links, self.num_classes, self.group),
            )
            labels = labels - self.first_class  # 0 for the first class here
            loss, self.last_terms = ProxyGMLFunction.call(compute, embeddings, proxies.to(precision), labels)
            return loss

    def extra_repr(self) -> str:
        return f"classes {self.first_class} to {self.first_class + len(self.proxies) - 1} of {self.num_classes}"


def class_range(num_classes: int, rank: int, size: int) -> tuple[int, int]:
    """First class of a process and the class after its last, as torch splits tensors over processes."""
    count = -(-num_classes // size)
    if (size - 1) * count >= num_classes:
        raise ValueError(f"expected a class for each of {size} processes, got {num_classes}: use fewer processes")
    return rank * count, min((rank + 1) * count, num_classes)


def initial_proxies(shape: torch.Size, first: int, stop: int, seed: int) -> Tensor:
    """Initial proxies of classes first to stop - 1 of all (C, N, D), the same for any number of processes."""
    classes, per_class, dimension = shape
    bound = 1 / math.sqrt(classes * per_class)
    proxies = torch.empty(stop - first, per_class, dimension)
    for start in range(first - first % CLASSES_PER_SEED, stop, CLASSES_PER_SEED):
        generator = torch.Generator().manual_seed(seed * 2**32 + start)
        block = torch.empty(min(CLASSES_PER_SEED, classes - start), per_class, dimension)
        block.uniform_(-bound, bound, generator=generator)
        begin, end = max(first, start), min(stop, start + len(block))
        proxies[begin - first : end - first] = block[begin - start : end - start]
    return proxies


def distributed_topk(ranks: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
    """Which ranks (B, candidates here) are among the `count` largest of their row on all processes: boolean (B, ...).

    Radix select: one all-reduce for each byte of the threshold, of the counts of its 256 values, so the messages do not
    depend on the number of candidates. Ties go to the lower process, then to the lower column.
    """
    keys, bits = _sortable_integers(ranks)  # (B, candidates)
    remaining = torch.full((len(ranks), 1), count, device=ranks.device)  # (B, 1)
    threshold = torch.zeros_like(remaining)  # (B, 1): leading bytes of the smallest selected key
    for shift in range(bits - 8, -8, -8):
        first_byte = shift == bits - 8
        byte = (keys >> shift) + 128 if first_byte else (keys >> shift) & 255  # the first byte is signed
        candidate = torch.ones_like(keys) if first_byte else (keys >> (shift + 8)) == threshold
        counts = torch.zeros(len(ranks), 256, dtype=torch.int32, device=ranks.device)
        counts.scatter_add_(1, byte, candidate.to(torch.int32))
        dist.all_reduce(counts, group=group)
        at_least = F.pad(counts.flip(1).cumsum(1).flip(1), (0, 1))  # (B, 257): keys with this byte or a larger one
        selected = (at_least >= remaining).sum(1, keepdim=True) - 1  # (B, 1)
        remaining = remaining - at_least.gather(1, selected + 1)
        threshold = selected - 128 if first_byte else (threshold << 8) | selected
    tied = keys == threshold
    tied_counts = [torch.empty_like(remaining) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tied_counts, tied.sum(1, keepdim=True), group)
    remaining = remaining - sum(tied_counts[: dist.get_rank(group)], torch.zeros_like(remaining))
    return (keys > threshold) | (tied & (tied.cumsum(1) <= remaining))


def _sortable_integers(values: Tensor) -> tuple[Tensor, int]:
    """Integers (int64) in the order of the floats, and their number of significant bits."""
    dtype = torch.int32 if values.dtype == torch.float32 else torch.int64
    bits = torch.iinfo(dtype).bits
    keys = (values + 0.0).view(dtype)  # -0 becomes 0
    return (keys ^ ((keys >> (bits - 1)) & torch.iinfo(dtype).max)).long(), bits  # flips all but the sign of negatives


class ProcessCollectives:
    """The collectives of a process group."""

    def __init__(self, links: int, num_classes: int, group: dist.ProcessGroup | None) -> None:
        self.links, self.num_classes, self.group = links, num_classes, group
        self.rank = dist.get_rank(group)

    def topk_mask(self, ranks: Tensor) -> Tensor:
        return distributed_topk(ranks, self.links, self.group)

    def max(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, self.group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def shards(self, sums: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each process in turn broadcasts its class sums: (rank, (classes there, D))."""
        size = dist.get_world_size(self.group)
        for owner in range(size):
            first, last = class_range(self.num_classes, owner, size)
            shard = sums.clone() if owner == self.rank else sums.new_empty(last - first, sums.shape[1])
            dist.broadcast(shard, group=self.group, group_src=owner)
            yield owner, shard

    def reduce(self, values: Tensor, owner: int) -> None:
        """Add up values in place on their owner."""
        dist.reduce(values, group=self.group, group_dst=owner)
