"""ProxyGMLLoss: the loss as a module, with its options, its checks and the choice of an implementation."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from proxygml.losses.interface import BatchCheck, checked_shapes, highest_precision, require_whole, without_autocast
from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.chunked import chunked
from proxygml.losses.proxygml.definition import proxygml_loss
from proxygml.losses.proxygml.fused import MAX_PER_CLASS, fits_fused, fused
from proxygml.losses.proxygml.gradients import Gradients, Terms
from proxygml.losses.proxygml.settings import ProxyGMLSettings

Implementation = Literal["auto", "definition", "fused", "chunked"]
Compute = Callable[..., tuple[Terms, Gradients]]  # of (embeddings, proxies, labels, differentiate=...)


class ProxyGMLLoss(nn.Module):
    """`loss(embeddings, labels)`: embeddings (B, D) of any norm, integer labels (B,) in 0..C-1 -> scalar.

    Its parameter `proxies` (C, N, D) is trained with the network: pass `loss.parameters()` to the optimizer; the paper
    uses a learning rate of 3e-2 for them and 1e-4 for the backbone. Each sample is linked to `links` proxies, or to a
    `ratio` of all. `literal_mask` ranks with the +1 of Eq. 3, which does not always keep all positives. `scale`
    multiplies the scores of samples in their softmax; the paper has none, and with one proxy per class no probability
    can come near 1 then. `last_terms` holds L^s and L^p of the last batch.

    For very many classes: `sparse_gradient` gives `proxies` a gradient of the linked rows only (a sparse tensor, for
    `RowAdam`), which needs a proxy_weight of 0; `proxy_rows` classifies so many proxies, drawn at random, instead of
    all: an unbiased estimate of L^p, which otherwise costs C^2 N.

    `implementation` "auto" takes the fastest that gives the values and gradients of `proxygml_loss`, the definition,
    and the definition itself under `torch.func`, `torch.compile` and fake tensors (without `last_terms`).
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
        implementation: Implementation = "auto",
    ) -> None:
        super().__init__()
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim)
        self.settings = ProxyGMLSettings(
            proxies_per_class=proxies_per_class,
            ratio=ratio,
            links=links,
            proxy_weight=proxy_weight,
            positive_mask=positive_mask,
            mask_softmax=mask_softmax,
            literal_mask=literal_mask,
            scale=scale,
            sparse_gradient=sparse_gradient,
            proxy_rows=proxy_rows,
        )
        if implementation not in ("auto", "definition", "fused", "chunked"):
            raise ValueError(f"expected implementation as auto, definition, fused or chunked, got {implementation!r}")
        if implementation in ("definition", "fused") and (sparse_gradient or proxy_rows is not None):
            raise ValueError(f"{implementation} has no sparse_gradient and no proxy_rows: use chunked or auto")
        if implementation == "fused" and proxy_weight > 0 and proxies_per_class > MAX_PER_CLASS:
            raise ValueError(
                f"fused regularizes up to {MAX_PER_CLASS} proxies per class, got {proxies_per_class}: use auto"
            )
        warn_without_negatives(num_classes, self.settings)
        self.num_classes = num_classes
        self.links = self.settings.links_for(num_classes)
        self.implementation = implementation
        self.last_terms: Terms | None = None
        self.gradient_pool, self.check = BufferPool(), BatchCheck()
        # As in the authors' code; the norm matters although proxies are normalized: gradients scale with its inverse.
        bound = 1 / math.sqrt(num_classes * proxies_per_class)
        self.proxies = nn.Parameter(torch.empty(num_classes, proxies_per_class, embedding_dim).uniform_(-bound, bound))

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: object = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch. The last three are what pytorch-metric-learning passes; proxies need none of them."""
        labels = checked_shapes(embeddings, labels, self.proxies.shape[2])
        precision = highest_precision(embeddings, self.proxies)
        with without_autocast(embeddings.device.type):  # exp of a sum of N cosines overflows float16
            proxies = self.proxies if torch.is_grad_enabled() else self.proxies.detach()  # which needs no gradient
            embeddings, proxies = embeddings.to(precision), proxies.to(precision)
            if is_traced(embeddings):
                return self._definition(embeddings, proxies, labels)
            embeddings, labels = self.check(embeddings, labels, self.num_classes)
            if self.implementation == "definition":
                return self._definition(embeddings, proxies, labels)
            implementation = self.implementation
            if implementation == "auto":
                implementation = "fused" if fits_fused(len(embeddings), proxies, self.settings) else "chunked"
            chosen: Compute = {"fused": fused, "chunked": chunked}[implementation]
            compute = partial(chosen, settings=self.settings, links=self.links, pool=self.gradient_pool)
            loss, terms = ProxyGMLFunction.call(compute, embeddings, proxies, labels)
            object.__setattr__(self, "last_terms", terms)  # nn.Module would look for parameters first, which takes time
            return loss

    def _definition(self, embeddings: Tensor, proxies: Tensor, labels: Tensor) -> Tensor:
        if self.settings.sparse_gradient or self.settings.proxy_rows is not None:
            raise ValueError("sparse_gradient and proxy_rows have no form that torch.func or torch.compile can trace")
        return as_defined(embeddings, proxies, labels, self.settings, self.links)

    def extra_repr(self) -> str:
        classes, _, dimension = self.proxies.shape
        return f"num_classes={classes}, embedding_dim={dimension}, links={self.links}, {self.settings}"


def as_defined(embeddings: Tensor, proxies: Tensor, labels: Tensor, settings: ProxyGMLSettings, links: int) -> Tensor:
    """`proxygml_loss` with these settings."""
    return proxygml_loss(
        embeddings,
        labels,
        proxies,
        links=links,
        proxy_weight=settings.proxy_weight,
        positive_mask=settings.positive_mask,
        mask_softmax=settings.mask_softmax,
        literal_mask=settings.literal_mask,
        scale=settings.scale,
    )


def is_traced(embeddings: Tensor) -> bool:
    """Whether operations are being recorded rather than run: by torch.compile, torch.func or fake tensors."""
    if torch.compiler.is_compiling() or type(embeddings) not in (Tensor, nn.Parameter):
        return True
    return torch._C._are_functorch_transforms_active()  # torch has no public form of this question


class ProxyGMLFunction(torch.autograd.Function):
    """A fast implementation under autograd: its gradients are computed together with its value.

    Their own gradients, for `create_graph=True`, are those of the definition.
    """

    @classmethod
    def call(cls, compute: partial, embeddings: Tensor, proxies: Tensor, labels: Tensor) -> tuple[Tensor, Terms]:
        """The loss, and what it is made of."""
        terms: list[Terms] = []
        return cls.apply(embeddings, proxies, labels, compute, terms), terms[0]

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, proxies: Tensor, labels: Tensor, compute: partial, kept: list[Terms]
    ) -> Tensor:
        """Embeddings (B, D) and proxies (C, N, D) of any norm, labels (B,); the terms are put into `kept`."""
        terms, gradients = compute(embeddings, proxies, labels, differentiate=any(ctx.needs_input_grad))
        kept.append(terms)
        ctx.compute = compute
        ctx.save_for_backward(embeddings, proxies, labels, *gradients)
        if terms.proxy_loss is None:
            return terms.sample_loss.clone()
        return terms.sample_loss.add(terms.proxy_loss, alpha=compute.keywords["settings"].proxy_weight)  # Eq. 12: L

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, proxies, labels, *gradients = ctx.saved_tensors
        if torch.is_grad_enabled():  # by create_graph=True
            settings, links = ctx.compute.keywords["settings"], ctx.compute.keywords["links"]
            if ctx.compute.keywords.get("collectives") or settings.sparse_gradient or settings.proxy_rows is not None:
                raise RuntimeError("no second derivatives of sharded classes, sparse_gradient or proxy_rows")
            loss = as_defined(embeddings, proxies, labels, settings, links)
            wanted = [each for each, needed in zip((embeddings, proxies), ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(loss, wanted, gradient, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None, None, None
        unchanged = gradient.device.type == "cpu" and gradient.item() == 1  # as after loss.backward(): saves a copy
        scaled = gradients if unchanged else (None if each is None else each * gradient for each in gradients)
        return *scaled, None, None, None


def warn_without_negatives(num_classes: int, settings: ProxyGMLSettings) -> None:
    """A warning where all links of a sample go to proxies of its own class."""
    links, per_class = settings.links_for(num_classes), settings.proxies_per_class
    if not settings.positive_mask or links > per_class:
        return
    if num_classes == 1:
        advice = "with one class there is nothing to separate"
    else:
        ratio = (per_class + 0.5) / (num_classes * per_class)  # rounded up, one link more than N
        advice = f"use a ratio of at least {ratio:.4g} or links of at least {per_class + 1}"
    warnings.warn(
        f"{links} links for each sample are all taken by the {per_class} proxies of its own class: "
        f"no negative is linked and classes are not separated; {advice}",
        stacklevel=3,
    )
