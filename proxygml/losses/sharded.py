"""The ProxyGML loss with its classes spread over processes, each of which holds the proxies of some of them.

Every process gathers the embeddings of all, and compares them with its own proxies. Three things are then found
together, with messages whose size depends on the batch alone: which links rank among the first k of all proxies, the
softmax over all classes that links reach, and the regulariser, for which the sums of classes go round.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from proxygml.gathering import gather_rows, same_everywhere
from proxygml.losses.interface import checked_labels, highest_precision
from proxygml.losses.proxygml import NO_POSITIVE_LINK, ProxyGMLLoss, Terms, propagate
from proxygml.losses.subgraphs import SHORTEST, at_a_time, link, parts

CLASSES_TOGETHER = 1024  # are started from one seed, so that they are the same however many processes there are


class ShardedProxyGMLLoss(nn.Module):
    """`loss(embeddings, labels)` on every process: embeddings (b, D) and labels (b,) of its part of the batch.

    Value and gradients are those of `ProxyGMLLoss` with the batches of all processes as one. `num_classes` and labels
    are of all classes; the parameter `proxies` (classes here, N, D) has the contiguous range from `first_class` on.
    Embeddings must come from a network in DistributedDataParallel, which takes the mean over processes; the proxies
    must not, since each process has its own. `options` are those of `ProxyGMLLoss`; `seed` starts the proxies.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        **options: float | bool | None,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise ValueError("expected several processes: start them with torchrun, or use ProxyGMLLoss in one")
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        same_everywhere({"num_classes": num_classes, "embedding_dim": embedding_dim, "seed": seed, **options}, group)
        if num_classes < self.size:
            raise ValueError(f"expected a class for each of {self.size} processes, got {num_classes} classes")
        with torch.device("meta"):  # its settings and checks, without its memory
            plain = ProxyGMLLoss(num_classes, embedding_dim, **options)
        self.num_classes, self.per_class, _ = plain.proxies.shape
        self.links, self.positive_bonus, self.mask_softmax = plain.links, plain.positive_bonus, plain.mask_softmax
        self.scale, self.proxy_weight = plain.scale, plain.proxy_weight
        self.sparse_gradient, self.proxy_rows = plain.sparse_gradient, plain.proxy_rows
        self.first_class, last = (place * num_classes // self.size for place in (self.rank, self.rank + 1))
        self.proxies = nn.Parameter(first_proxies(plain.proxies.shape, self.first_class, last, seed))
        self.last_terms: Terms | None = None

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of the batches of all processes, the same on each."""
        labels = checked_labels(embeddings, labels, self.num_classes, self.proxies.shape[2])
        precision = highest_precision(embeddings, self.proxies)
        with torch.autocast(embeddings.device.type, enabled=False):
            samples = gather_rows(F.normalize(embeddings.to(precision), dim=-1), self.group, shared=True)  # (B, D)
            labels = gather_rows(labels, self.group, shared=True) - self.first_class  # (B,), 0 for the first class here
            proxies = self.proxies.to(precision)  # (classes here, N, D)

            here = proxies.shape[0] * self.per_class
            linked, similarity = link(
                samples,
                proxies,
                labels,
                min(self.links, here),
                self.positive_bonus,
                self.sparse_gradient,
                among_all=lambda ranks: first_of_all(ranks, self.links, self.group),
            )
            scores, reached = propagate(similarity, linked // self.per_class)
            reached = reached.where(reached < proxies.shape[0], -1)
            unmasked = None if self.mask_softmax else self.num_classes
            sample_loss, unlinked = joint_cross_entropy(self.scale * scores, reached, labels, unmasked, self.group)
            loss, proxy_loss = sample_loss, None
            if self.proxy_weight > 0:
                weighted = _ClassifyJointly.apply(
                    proxies, self.first_class, self.num_classes, self.proxy_rows, self.proxy_weight, self.group
                )
                loss, proxy_loss = sample_loss + weighted, weighted.detach() / self.proxy_weight
        self.last_terms = Terms(sample_loss.detach(), proxy_loss, unlinked)
        return loss

    def extra_repr(self) -> str:
        return f"classes {self.first_class} to {self.first_class + len(self.proxies) - 1} of {self.num_classes}"


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


def joint_cross_entropy(
    scores: Tensor, reached: Tensor, labels: Tensor, unmasked: int | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """`masked_cross_entropy` with the scores and classes of all processes; and the share of samples without a link.

    Scores (B, k) and classes (B, k) are those here. Their gradient is known as soon as the value is, P - Y for each
    sample, so that nothing has to be told on the way back.
    """
    with torch.no_grad():
        there = reached >= 0
        own = there & (reached == labels[:, None])  # (B, k)
        highest = scores.masked_fill(~there, -math.inf).amax(1)  # (B,)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        if unmasked is not None:
            highest = highest.clamp_min(0)
        exponents = (scores - highest[:, None]).exp() * there  # (B, k)
        together = torch.stack([exponents.sum(1), (scores * own).sum(1), own.any(1), there.sum(1)])  # (4, B)
        dist.all_reduce(together, group=group)
        total, own_score, counted, classes = together  # (B,) each
        if unmasked is not None:
            total, counted = total + (unmasked - classes) * (-highest).exp(), torch.ones_like(counted)
        log_total = highest + total.log()  # (B,)
        value = (log_total - own_score).where(counted > 0, NO_POSITIVE_LINK).mean()
        slope = (exponents / total[:, None] - own.to(scores.dtype)) * counted[:, None] / len(scores)  # (B, k)
    unlinked = 1 - together[2].mean()
    return value + ((scores - scores.detach()) * slope).sum(), unlinked


class _ClassifyJointly(torch.autograd.Function):
    """`classify_proxies`, of the proxies here; the sums of classes (C, D) come from their owners, one after another.

    Once for the softmax of each proxy over all classes, once more for the gradients, which go back to the owners.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        proxies: Tensor,
        first: int,
        num_classes: int,
        sampled: int | None,
        weight: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        classes, per_class, _ = proxies.shape
        rank = dist.get_rank(group)
        vectors = proxies.flatten(0, 1)  # (proxies here, D)
        inverse_lengths = torch.linalg.vector_norm(vectors, dim=1).clamp_min_(SHORTEST).reciprocal_()
        sums = torch.bmm(inverse_lengths.view(classes, 1, per_class), proxies)[:, 0]  # (classes here, D)
        drawn = torch.arange(len(vectors), device=vectors.device)
        if sampled is not None and sampled < num_classes * per_class:  # of each process its share
            few = max(1, round(sampled * len(vectors) / (num_classes * per_class)))
            drawn = torch.randperm(len(vectors), device=vectors.device)[:few]
        share = weight * len(vectors) / (num_classes * per_class * len(drawn))
        unit = vectors[drawn] * inverse_lengths[drawn, None]  # (drawn, D)
        own = drawn // per_class  # (drawn,)

        highest = unit.new_full((len(drawn),), -math.inf)
        total, own_score = torch.zeros_like(highest), torch.zeros_like(highest)  # (drawn,)
        rows = parts(len(drawn), max(1, at_a_time(unit) // classes))
        for owner, theirs in _in_turn(sums, num_classes, group):
            for part in rows:
                scores = unit[part] @ theirs.T  # (rows, classes there)
                above = torch.maximum(highest[part], scores.amax(1))
                total[part] *= (highest[part] - above).exp()
                total[part] += (scores - above[:, None]).exp().sum(1)
                highest[part] = above
                if owner == rank:
                    own_score[part] = scores.gather(1, own[part, None])[:, 0]
        log_total = highest + total.log()  # (drawn,)
        loss = share * (log_total - own_score).sum()
        dist.all_reduce(loss, group=group)
        if not ctx.needs_input_grad[0]:
            return loss

        gradient, sum_gradient = torch.zeros_like(unit), torch.zeros_like(sums)
        for owner, theirs in _in_turn(sums, num_classes, group):
            back = torch.zeros_like(theirs)  # (classes there, D)
            for part in rows:
                error = (unit[part] @ theirs.T - log_total[part, None]).exp_()  # (rows, classes there): P^p - Y^p
                if owner == rank:
                    error.scatter_add_(1, own[part, None], error.new_full((len(error), 1), -1))
                error *= share
                gradient[part] += error @ theirs
                back += error.T @ unit[part]
            dist.reduce(back, dist.get_global_rank(group, owner) if group else owner, group=group)
            if owner == rank:
                sum_gradient = back
        of_unit = sum_gradient.repeat_interleave(per_class, 0).index_add_(0, drawn, gradient)  # (proxies here, D)
        of_unit *= inverse_lengths[:, None]
        along = torch.linalg.vecdot(of_unit, vectors) * inverse_lengths.square()
        ctx.save_for_backward(of_unit.addcmul_(vectors, along[:, None], value=-1).view_as(proxies))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (of_loss,) = ctx.saved_tensors
        return of_loss * gradient, None, None, None, None, None


def _in_turn(sums: Tensor, num_classes: int, group: dist.ProcessGroup | None) -> Iterator[tuple[int, Tensor]]:
    """Of each process, by rank, the sums of its classes (classes there, D)."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for owner in range(size):
        count = (owner + 1) * num_classes // size - owner * num_classes // size
        theirs = sums.clone() if owner == rank else sums.new_empty(count, sums.shape[1])
        dist.broadcast(theirs, dist.get_global_rank(group, owner) if group else owner, group=group)
        yield owner, theirs
