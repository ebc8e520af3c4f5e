"""ProxyGMLLoss: the loss as a module, with options, validation and the choice of an implementation."""

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from proxygml.files import warn
from proxygml.losses.interface import BatchCheck, checked_shapes, highest_precision, require_whole, without_autocast
from proxygml.losses.proxygml import chunked, fused
from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.definition import proxygml_loss
from proxygml.losses.proxygml.fused import fits_fused
from proxygml.losses.proxygml.gradients import Terms, loss_and_gradients
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.precision import full_float32

Implementation = Literal["auto", "definition", "fused", "chunked"]


class ProxyGMLLoss(nn.Module):
    """`loss(embeddings, labels)`: embeddings (B, D) of any norm, integer labels (B,) in 0..C-1 -> scalar.

    The parameter `proxies` (C, N, D) is trained with the network: pass `loss.parameters()` to the optimizer. The paper
    uses a learning rate of 3e-2 for proxies and 1e-4 for the backbone. Each sample is linked to `links` proxies, or to
    a `ratio` of all. `literal_mask` ranks with the +1 of Eq. 3, which does not always keep all positives. `scale`
    multiplies the scores of samples before the softmax; the paper has none, and then no probability can come near 1
    with one proxy per class. `last_terms` contains L^s and L^p of the last batch.

    For very many classes, `sparse_gradient` returns the gradient of linked proxies only (a sparse tensor for `RowAdam`;
    needs a proxy_weight of 0), and `proxy_rows` estimates L^p, which costs C^2 N, from that many random proxies.

    `implementation="auto"` uses the fastest one with the values and gradients of `proxygml_loss`, and the definition
    itself (without `last_terms`) under `torch.func`, `torch.compile` and fake tensors.
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
        if implementation in ("definition", "fused") and self.settings.extends_definition:
            raise ValueError(f"{implementation} does not support sparse_gradient and proxy_rows: use chunked or auto")
        warn_without_negatives(num_classes, self.settings)
        self.num_classes = num_classes
        self.links = self.settings.links_for(num_classes)
        self.implementation = implementation
        self.last_terms: Terms | None = None
        self.gradient_pool, self.check = BufferPool(), BatchCheck()
        # As in the authors' code. The norm matters although proxies are normalized: gradients scale with its inverse.
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
        """The loss of a batch; the last three arguments are for pytorch-metric-learning and ignored."""
        loss, terms = self._loss(embeddings, labels, self.proxies)
        if terms is not None:
            object.__setattr__(self, "last_terms", terms)  # faster than nn.Module.__setattr__
        return loss

    def _loss(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> tuple[Tensor, Terms | None]:
        """The loss of embeddings (B, D) and proxies (C, N, D), and its terms, unless it is the definition's."""
        labels = checked_shapes(embeddings, labels, proxies.shape[2])
        precision = highest_precision(embeddings, proxies)
        with without_autocast(embeddings.device.type), full_float32():  # float16 overflows in exp of N cosines
            proxies = proxies if torch.is_grad_enabled() else proxies.detach()
            embeddings, proxies = embeddings.to(precision), proxies.to(precision)
            if is_traced(embeddings):
                return self._definition(embeddings, proxies, labels), None
            embeddings, labels = self.check(embeddings, labels, self.num_classes)
            if self.implementation == "definition":
                return self._definition(embeddings, proxies, labels), None
            implementation = self.implementation
            if implementation == "auto":
                implementation = "fused" if fits_fused(len(embeddings), proxies, self.settings) else "chunked"
            compute = partial(
                loss_and_gradients,
                sample_loss={"fused": fused, "chunked": chunked}[implementation].sample_loss,
                settings=self.settings,
                links=self.links,
                pool=self.gradient_pool,
            )
            return ProxyGMLFunction.call(compute, embeddings, proxies, labels)

    def _definition(self, embeddings: Tensor, proxies: Tensor, labels: Tensor) -> Tensor:
        if self.settings.extends_definition:
            raise ValueError("torch.func and torch.compile cannot trace sparse_gradient and proxy_rows")
        return definition(embeddings, proxies, labels, self.settings, self.links)

    def extra_repr(self) -> str:
        classes, _, dimension = self.proxies.shape
        return f"num_classes={classes}, embedding_dim={dimension}, links={self.links}, {self.settings}"


def definition(embeddings: Tensor, proxies: Tensor, labels: Tensor, settings: ProxyGMLSettings, links: int) -> Tensor:
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
    """Whether torch.compile, torch.func or fake tensors are recording operations instead of running them."""
    if torch.compiler.is_compiling() or type(embeddings) not in (Tensor, nn.Parameter):
        return True
    return torch._C._are_functorch_transforms_active()  # torch has no public function for this


class ProxyGMLFunction(torch.autograd.Function):
    """A fast implementation under autograd, which computes its gradients in the forward pass.

    Second derivatives, for `create_graph=True`, are those of the definition.
    """

    @classmethod
    def call(cls, compute: partial, embeddings: Tensor, proxies: Tensor, labels: Tensor) -> tuple[Tensor, Terms]:
        """The loss and its terms."""
        terms: list[Terms] = []
        return cls.apply(embeddings, proxies, labels, compute, terms), terms[0]

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, proxies: Tensor, labels: Tensor, compute: partial, output: list[Terms]
    ) -> Tensor:
        """Embeddings (B, D) and proxies (C, N, D) of any norm, labels (B,); appends the terms to `output`."""
        terms, gradients = compute(embeddings, proxies, labels, differentiate=any(ctx.needs_input_grad))
        output.append(terms)
        ctx.compute = compute
        ctx.save_for_backward(embeddings, proxies, labels, *gradients)
        if terms.proxy_loss is None:
            return terms.sample_loss.clone()
        return terms.sample_loss.add(terms.proxy_loss, alpha=compute.keywords["settings"].proxy_weight)  # Eq. 12: L

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, proxies, labels, *gradients = ctx.saved_tensors
        if torch.is_grad_enabled():  # by create_graph=True
            settings, links = ctx.compute.keywords["settings"], ctx.compute.keywords["links"]
            if ctx.compute.keywords.get("collectives") or settings.extends_definition:
                raise RuntimeError("sharded classes, sparse_gradient and proxy_rows have no second derivatives")
            loss = definition(embeddings, proxies, labels, settings, links)
            needed = ctx.needs_input_grad[:2]
            inputs = [tensor for tensor, need in zip((embeddings, proxies), needed, strict=True) if need]
            grads = iter(torch.autograd.grad(loss, inputs, grad_output, create_graph=True))
            return *(next(grads) if need else None for need in needed), None, None, None
        if grad_output.device.type != "cpu" or grad_output.item() != 1:  # 1 after loss.backward(): saves a copy
            gradients = [None if gradient is None else gradient * grad_output for gradient in gradients]
        return *gradients, None, None, None


def warn_without_negatives(num_classes: int, settings: ProxyGMLSettings) -> None:
    """Warn if all links of a sample go to proxies of its own class."""
    links, per_class = settings.links_for(num_classes), settings.proxies_per_class
    if not settings.positive_mask or links > per_class:
        return
    if num_classes == 1:
        advice = "with one class there is nothing to separate"
    else:
        ratio = (per_class + 0.5) / (num_classes * per_class)  # rounds up to N + 1 links
        advice = f"use a ratio of at least {ratio:.4g} or links of at least {per_class + 1}"
    warn(
        f"every link of a sample goes to its own class (links: {links}, proxies per class: {per_class}): "
        f"no negative is linked and classes are not separated; {advice}",
    )
