"""The ProxyGML loss with its classes spread over processes: each holds the proxies of some of them.

Every process gathers the embeddings of all, and compares them with its own proxies. Three collectives follow, with
messages whose size depends on the batch alone: a distributed top-k over all proxies, the softmax over all active
classes, and the regularizer, for which the sums of classes are broadcast in turn.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.gathering import gather_rows, same_everywhere
from proxygml.losses.interface import BatchCheck, checked_shapes, highest_precision, require_whole, without_autocast
from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.chunked import chunked
from proxygml.losses.proxygml.gradients import Terms, project_to_tangent
from proxygml.losses.proxygml.module import ProxyGMLFunction, warn_without_negatives
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.topk import chunk_elements, chunks

CLASSES_PER_SEED = 1024  # so that proxies start the same however many processes there are


class ShardedProxyGMLLoss(nn.Module):
    """`loss(embeddings, labels)` on every process: embeddings (b, D) and labels (b,) of its part of the batch.

    Value and gradients are those of `ProxyGMLLoss` with the batches of all processes as one. `num_classes` and labels
    are of all classes; the parameter `proxies` (classes here, N, D) has the contiguous range from `first_class` on.
    Embeddings must come from a network in DistributedDataParallel, which takes the mean over processes; the proxies
    must not, since each process has its own. `seed` starts the proxies. A process may have no embeddings in a batch,
    but has to take part in it.
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
        same_everywhere(shared | asdict(settings), group)
        warn_without_negatives(num_classes, settings)
        self.num_classes, self.settings, self.group = num_classes, settings, group
        self.links = settings.links_for(num_classes)
        self.first_class, last = class_range(num_classes, dist.get_rank(group), dist.get_world_size(group))
        shape = torch.Size([num_classes, settings.proxies_per_class, embedding_dim])
        self.proxies = nn.Parameter(initial_proxies(shape, self.first_class, last, seed))
        self.last_terms: Terms | None = None
        self.gradient_pool, self.check = BufferPool(), BatchCheck()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of the batches of all processes, the same on each."""
        labels = checked_shapes(embeddings, labels, self.proxies.shape[2])
        precision = highest_precision(embeddings, self.proxies)
        with without_autocast(embeddings.device.type):
            embeddings = gather_rows(embeddings.to(precision), self.group, shared=True)  # (B, D)
            labels = gather_rows(labels, self.group, shared=True)  # (B,)
            embeddings, labels = self.check(embeddings, labels, self.num_classes)  # alike on all: none is left waiting
            labels = labels - self.first_class  # 0 for the first class here
            collectives = ProcessCollectives(self.links, self.num_classes, self.group)
            proxies = self.proxies if torch.is_grad_enabled() else self.proxies.detach()
            compute = partial(
                chunked,
                settings=self.settings,
                links=self.links,
                pool=self.gradient_pool,
                collectives=collectives,
                all_classes=self.num_classes,
            )
            loss, self.last_terms = ProxyGMLFunction.call(compute, embeddings, proxies.to(precision), labels)
            return loss

    def extra_repr(self) -> str:
        return f"classes {self.first_class} to {self.first_class + len(self.proxies) - 1} of {self.num_classes}"


def class_range(num_classes: int, rank: int, size: int) -> tuple[int, int]:
    """The first class of a process and the first that it no longer has, as torch splits tensors over processes."""
    most = -(-num_classes // size)
    if (size - 1) * most >= num_classes:
        raise ValueError(f"{num_classes} classes are too few for {size} processes to have some each: use fewer")
    return rank * most, min((rank + 1) * most, num_classes)


def initial_proxies(shape: torch.Size, first: int, last: int, seed: int) -> Tensor:
    """The first proxies of classes first to last - 1 of all (C, N, D), the same on any number of processes."""
    classes, per_class, dimension = shape
    bound = 1 / math.sqrt(classes * per_class)
    proxies = torch.empty(last - first, per_class, dimension)
    for start in range(first - first % CLASSES_PER_SEED, last, CLASSES_PER_SEED):
        generator = torch.Generator().manual_seed(seed * 2**32 + start)
        together = torch.empty(min(CLASSES_PER_SEED, classes - start), per_class, dimension)
        together.uniform_(-bound, bound, generator=generator)
        wanted = slice(max(first, start), min(last, start + len(together)))
        proxies[wanted.start - first : wanted.stop - first] = together[wanted.start - start : wanted.stop - start]
    return proxies


def distributed_topk(ranks: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
    """Which of the ranks (B, candidates) are among the `count` largest of their row on all processes: (B, candidates).

    The smallest of these is found byte by byte, from the counts of each value of a byte on all processes: as many
    messages however many candidates there are. Of equal ranks the first count, by process and then by column.
    """
    keys, bits = _ordered(ranks)  # (B, candidates)
    left = torch.full((len(ranks), 1), count, device=ranks.device)  # (B, 1): how many are still to be found
    found = torch.zeros_like(left)  # (B, 1): the leading bytes of the smallest
    for shift in range(bits - 8, -8, -8):
        first_byte = shift == bits - 8
        byte = (keys >> shift) + 128 if first_byte else (keys >> shift) & 255  # the first has the sign
        possible = torch.ones_like(keys) if first_byte else (keys >> (shift + 8)) == found
        counts = torch.zeros(len(ranks), 256, dtype=torch.int32, device=ranks.device)
        counts.scatter_add_(1, byte, possible.to(torch.int32))
        dist.all_reduce(counts, group=group)
        at_least = F.pad(counts.flip(1).cumsum(1).flip(1), (0, 1))  # (B, 257): how many have this byte or a larger one
        this = (at_least >= left).sum(1, keepdim=True) - 1  # (B, 1)
        left = left - at_least.gather(1, this + 1)
        found = this - 128 if first_byte else (found << 8) | this
    equal = keys == found
    equals = [torch.empty_like(left) for _ in range(dist.get_world_size(group))]
    dist.all_gather(equals, equal.sum(1, keepdim=True), group)
    left = left - sum(equals[: dist.get_rank(group)], torch.zeros_like(left))
    return (keys > found) | (equal & (equal.cumsum(1) <= left))


def _ordered(values: Tensor) -> tuple[Tensor, int]:
    """Integers (int64) in the order of the numbers, and how many of their bits count."""
    whole = torch.int32 if values.dtype == torch.float32 else torch.int64
    bits = torch.iinfo(whole).bits
    keys = (values + 0.0).view(whole)  # -0 becomes 0
    return (keys ^ ((keys >> (bits - 1)) & torch.iinfo(whole).max)).long(), bits  # of negative numbers all but the sign


class ProcessCollectives(NamedTuple):
    """The collectives of a process group."""

    links: int
    num_classes: int
    group: dist.ProcessGroup | None

    def topk_mask(self, ranks: Tensor) -> Tensor:
        return distributed_topk(ranks, self.links, self.group)

    def max(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, self.group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def regularizer(
        self, proxies: Tensor, inverse_norms: Tensor, sampled: int | None, weight: float, gradient: Tensor | None
    ) -> Tensor:
        """`chunked.regularizer` of the proxies here; the sums of classes (C, D) are broadcast by their owners in turn.

        Once for the softmax of each proxy over all classes, once more for the gradients, reduced to their owners.
        """
        classes, per_class, _ = proxies.shape
        rank, everyone = dist.get_rank(self.group), self.num_classes * per_class
        vectors = proxies.flatten(0, 1)  # (proxies here, D)
        sums = torch.bmm(inverse_norms.view(classes, 1, per_class), proxies)[:, 0]  # (classes here, D)
        drawn = torch.arange(len(vectors), device=vectors.device)
        if sampled is not None and sampled < everyone:  # of each process its part
            few = max(1, round(sampled * len(vectors) / everyone))
            drawn = torch.randperm(len(vectors), device=vectors.device)[:few]
        factor = weight * len(vectors) / (everyone * len(drawn))
        unit = vectors[drawn] * inverse_norms[drawn, None]  # (drawn, D)
        own = drawn // per_class  # (drawn,)

        highest = unit.new_full((len(drawn),), -math.inf)
        total, own_score = torch.zeros_like(highest), torch.zeros_like(highest)  # (drawn,)
        rows = chunks(len(drawn), max(1, chunk_elements(unit) // classes))
        for owner, theirs in self._in_turn(sums):
            for chunk in rows:
                scores = unit[chunk] @ theirs.T  # (rows, classes there)
                above = torch.maximum(highest[chunk], scores.amax(1))
                total[chunk] *= (highest[chunk] - above).exp()
                total[chunk] += (scores - above[:, None]).exp().sum(1)
                highest[chunk] = above
                if owner == rank:
                    own_score[chunk] = scores.gather(1, own[chunk, None])[:, 0]
        log_total = highest + total.log()  # (drawn,)
        loss = self.sum(factor * (log_total - own_score).sum())
        if gradient is None:
            return loss

        rows_gradient, sum_gradient = gradient.flatten(0, 1), torch.zeros_like(sums)
        for owner, theirs in self._in_turn(sums):
            back = torch.zeros_like(theirs)  # (classes there, D)
            for chunk in rows:
                error = (unit[chunk] @ theirs.T - log_total[chunk, None]).exp_()  # (rows, classes there): P^p - Y^p
                if owner == rank:
                    error.scatter_add_(1, own[chunk, None], error.new_full((len(error), 1), -1))
                error *= factor
                rows_gradient.index_add_(0, drawn[chunk], error @ theirs * inverse_norms[drawn[chunk], None])
                back += error.T @ unit[chunk]
            dist.reduce(back, group=self.group, group_dst=owner)
            if owner == rank:
                sum_gradient = back
        gradient.addcmul_(sum_gradient[:, None], inverse_norms.view(classes, per_class, 1))
        project_to_tangent(rows_gradient, vectors, inverse_norms)
        return loss

    def _in_turn(self, sums: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Of each process, by rank, the sums of its classes (classes there, D)."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        for owner in range(size):
            first, last = class_range(self.num_classes, owner, size)
            theirs = sums.clone() if owner == rank else sums.new_empty(last - first, sums.shape[1])
            dist.broadcast(theirs, group=self.group, group_src=owner)
            yield owner, theirs
