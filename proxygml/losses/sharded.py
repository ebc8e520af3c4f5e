"""The ProxyGML loss with its classes spread over processes, each of which holds the proxies of some of them.

Every process gathers the embeddings of all, and compares them with its own proxies. Three things are then found
together, with messages whose size depends on the batch alone: which links rank among the first k of all proxies, the
softmax over all classes that links reach, and the regulariser, for which the sums of classes go round.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.gathering import gather_rows, same_everywhere
from proxygml.losses.interface import check_values, checked_shapes, highest_precision, tamed, without_autocast
from proxygml.losses.nearest import at_a_time, parts
from proxygml.losses.proxygml import Equations, ProxyGMLLoss, Terms
from proxygml.losses.rooms import Room
from proxygml.losses.subgraphs import straighten

CLASSES_TOGETHER = 1024  # are started from one seed, so that they are the same however many processes there are


class ShardedProxyGMLLoss(nn.Module):
    """`loss(embeddings, labels)` on every process: embeddings (b, D) and labels (b,) of its part of the batch.

    Value and gradients are those of `ProxyGMLLoss` with the batches of all processes as one. `num_classes` and labels
    are of all classes; the parameter `proxies` (classes here, N, D) has the contiguous range from `first_class` on.
    Embeddings must come from a network in DistributedDataParallel, which takes the mean over processes; the proxies
    must not, since each process has its own. `seed` starts the proxies; all else is as in `ProxyGMLLoss`. A process may
    have no embeddings in a batch, but has to take part in it.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        proxies_per_class: int = 12,
        ratio: float = 0.05,
        links: int | None = None,
        proxy_weight: float = 0.3,
        positive_mask: bool = True,
        mask_softmax: bool = True,
        literal_mask: bool = False,
        scale: float = 1.0,
        sparse_gradient: bool = False,
        proxy_rows: int | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise ValueError("expected several processes: start them with torchrun, or use ProxyGMLLoss in one")
        settings: dict[str, Any] = {
            "num_classes": num_classes,
            "embedding_dim": embedding_dim,
            "proxies_per_class": proxies_per_class,
            "ratio": ratio,
            "links": links,
            "proxy_weight": proxy_weight,
            "positive_mask": positive_mask,
            "mask_softmax": mask_softmax,
            "literal_mask": literal_mask,
            "scale": scale,
            "sparse_gradient": sparse_gradient,
            "proxy_rows": proxy_rows,
        }
        same_everywhere(settings | {"seed": seed}, group)
        with torch.device("meta"):  # its checks and what it makes of its settings, without its memory
            plain = ProxyGMLLoss(**settings)
        self.num_classes, self.links, self.positive_bonus = num_classes, plain.links, plain.positive_bonus
        self.mask_softmax, self.scale, self.proxy_weight = mask_softmax, scale, proxy_weight
        self.sparse_gradient, self.proxy_rows = sparse_gradient, proxy_rows
        self.group = group
        self.first_class, last = class_range(num_classes, dist.get_rank(group), dist.get_world_size(group))
        self.proxies = nn.Parameter(first_proxies(plain.proxies.shape, self.first_class, last, seed))
        self.last_terms: Terms | None = None
        self.gradient_room = Room()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of the batches of all processes, the same on each."""
        labels = checked_shapes(embeddings, labels, self.proxies.shape[2])
        precision = highest_precision(embeddings, self.proxies)
        with without_autocast(embeddings.device.type):
            embeddings = gather_rows(embeddings.to(precision), self.group, shared=True)  # (B, D)
            labels = gather_rows(labels, self.group, shared=True)  # (B,)
            length = check_values(embeddings, labels, self.num_classes)  # on all alike, so that none waits for another
            embeddings = tamed(embeddings) if math.isinf(length) else embeddings
            labels = labels - self.first_class  # 0 for the first class here
            together = _Processes(self.links, self.num_classes, self.group)
            proxies = self.proxies if torch.is_grad_enabled() else self.proxies.detach()
            return Equations.apply(embeddings, proxies.to(precision), labels, self, together)

    def extra_repr(self) -> str:
        return f"classes {self.first_class} to {self.first_class + len(self.proxies) - 1} of {self.num_classes}"


def class_range(num_classes: int, rank: int, size: int) -> tuple[int, int]:
    """The first class of a process and the first that it no longer has, as torch splits tensors over processes."""
    most = -(-num_classes // size)
    if (size - 1) * most >= num_classes:
        raise ValueError(f"{num_classes} classes are too few for {size} processes to have some each: use fewer")
    return rank * most, min((rank + 1) * most, num_classes)


def first_proxies(shape: torch.Size, first: int, last: int, seed: int) -> Tensor:
    """The proxies that classes first to last - 1 of all (C, N, D) start with, whoever holds them."""
    classes, per_class, dimension = shape
    bound = 1 / math.sqrt(classes * per_class)
    proxies = torch.empty(last - first, per_class, dimension)
    for start in range(first - first % CLASSES_TOGETHER, last, CLASSES_TOGETHER):
        generator = torch.Generator().manual_seed(seed * 2**32 + start)
        together = torch.empty(min(CLASSES_TOGETHER, classes - start), per_class, dimension)
        together.uniform_(-bound, bound, generator=generator)
        wanted = slice(max(first, start), min(last, start + len(together)))
        proxies[wanted.start - first : wanted.stop - first] = together[wanted.start - start : wanted.stop - start]
    return proxies


def first_of_all(ranks: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
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


class _Processes(NamedTuple):
    """`Together` of the processes of a group."""

    links: int
    num_classes: int
    group: dist.ProcessGroup | None

    def among_all(self, ranks: Tensor) -> Tensor:
        return first_of_all(ranks, self.links, self.group)

    def highest(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, self.group)
        return values

    def total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def classify_proxies(
        self, proxies: Tensor, inverse_lengths: Tensor, sampled: int | None, weight: float, gradient: Tensor | None
    ) -> Tensor:
        """`classify_proxies` of the proxies here; the sums of classes (C, D) come from their owners, one after another.

        Once for the softmax of each proxy over all classes, once more for the gradients, which go back to the owners.
        """
        classes, per_class, _ = proxies.shape
        rank, everyone = dist.get_rank(self.group), self.num_classes * per_class
        vectors = proxies.flatten(0, 1)  # (proxies here, D)
        sums = torch.bmm(inverse_lengths.view(classes, 1, per_class), proxies)[:, 0]  # (classes here, D)
        drawn = torch.arange(len(vectors), device=vectors.device)
        if sampled is not None and sampled < everyone:  # of each process its share
            few = max(1, round(sampled * len(vectors) / everyone))
            drawn = torch.randperm(len(vectors), device=vectors.device)[:few]
        share = weight * len(vectors) / (everyone * len(drawn))
        unit = vectors[drawn] * inverse_lengths[drawn, None]  # (drawn, D)
        own = drawn // per_class  # (drawn,)

        highest = unit.new_full((len(drawn),), -math.inf)
        total, own_score = torch.zeros_like(highest), torch.zeros_like(highest)  # (drawn,)
        rows = parts(len(drawn), max(1, at_a_time(unit) // classes))
        for owner, theirs in self._in_turn(sums):
            for part in rows:
                scores = unit[part] @ theirs.T  # (rows, classes there)
                above = torch.maximum(highest[part], scores.amax(1))
                total[part] *= (highest[part] - above).exp()
                total[part] += (scores - above[:, None]).exp().sum(1)
                highest[part] = above
                if owner == rank:
                    own_score[part] = scores.gather(1, own[part, None])[:, 0]
        log_total = highest + total.log()  # (drawn,)
        loss = self.total(share * (log_total - own_score).sum())
        if gradient is None:
            return loss

        rows_gradient, sum_gradient = gradient.flatten(0, 1), torch.zeros_like(sums)
        for owner, theirs in self._in_turn(sums):
            back = torch.zeros_like(theirs)  # (classes there, D)
            for part in rows:
                error = (unit[part] @ theirs.T - log_total[part, None]).exp_()  # (rows, classes there): P^p - Y^p
                if owner == rank:
                    error.scatter_add_(1, own[part, None], error.new_full((len(error), 1), -1))
                error *= share
                rows_gradient.index_add_(0, drawn[part], error @ theirs * inverse_lengths[drawn[part], None])
                back += error.T @ unit[part]
            dist.reduce(back, group=self.group, group_dst=owner)
            if owner == rank:
                sum_gradient = back
        gradient.addcmul_(sum_gradient[:, None], inverse_lengths.view(classes, per_class, 1))
        straighten(rows_gradient, vectors, inverse_lengths)
        return loss

    def _in_turn(self, sums: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Of each process, by rank, the sums of its classes (classes there, D)."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        for owner in range(size):
            first, last = class_range(self.num_classes, owner, size)
            theirs = sums.clone() if owner == rank else sums.new_empty(last - first, sums.shape[1])
            dist.broadcast(theirs, group=self.group, group_src=owner)
            yield owner, theirs
