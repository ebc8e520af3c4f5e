"""The ProxyGML loss, equation by equation.

From "Fewer is More: A Deep Graph Metric Learning Perspective Using Fewer Proxies" (Zhu et al., NeurIPS 2020),
section 3, whose symbols are called here:

    x^s       samples      (B, D)     unit embeddings of the batch (the paper's M is our B)
    x^p       proxies      (C, N, D)  N of each class, so that y^p is the first axis; of any length
    S         -                       cosine of every sample and every proxy, of which the k largest of a row are kept
    I         linked       (B, k)     which proxies, counted 0..CN-1, each sample is linked to: its subgraph
    W         similarity   (B, k)     S of these links; all other entries of W are 0
    Y^p       classes      (B, k)     classes of the linked proxies, whose one-hot rows Y^p has
    Z         scores       (B, k)     labels propagated to the sample: one sum of links for each class they reach
    M         reached      (B, k)     the class that each column of the scores is of, if of any
    k, r      links, ratio            k = ceil(r C N)
    lambda    proxy_weight

Few proxies go through them in at_once.py, with matrices as in the paper: Z is (B, C) there, and -inf where M is 0.
`solve_in_parts` is for any number, and for classes on several processes: what takes time, Eq. 2 to 4 and 8 to 11, is in
subgraphs.py and nearest.py. Gradients are written out: they are short, and take less time and memory than those of
autograd. docs/paper.md lists where this differs from the paper or from its authors' code, and why.
"""

import math
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from proxygml.losses.at_once import NO_POSITIVE_LINK, Gradients, Terms, fit_at_once, solve_at_once
from proxygml.losses.interface import (
    check_values,
    checked_shapes,
    highest_precision,
    require_whole,
    tamed,
    without_autocast,
)
from proxygml.losses.nearest import ABOVE_ANY_COSINE, invert_lengths
from proxygml.losses.rooms import Room
from proxygml.losses.subgraphs import classify_proxies, link, link_gradients, straighten

NO_CLASS = -(2**62)  # below whatever labels of other processes are here


class ProxyGMLLoss(nn.Module):
    """`loss(embeddings, labels)`: embeddings (B, D) of any length, integer labels (B,) in 0..C-1 -> scalar.

    Its parameter `proxies` (C, N, D) is trained with the network: hand `loss.parameters()` to the optimizer, the
    paper with a learning rate of 3e-2 beside 1e-4 for the backbone. `links` is k, the proxies each sample is linked
    to: given, or `ratio` of all. `literal_mask` ranks with the +1 that Eq. 3 writes, which does not always keep all
    positives. `scale` multiplies the scores of samples in their softmax: 1 in the paper, where with one proxy per class
    no probability can come near 1. `last_terms` holds the parts of the last loss.

    For very many classes: `sparse_gradient` gives `proxies` a gradient of the linked rows alone (a sparse tensor, for
    `RowAdam`), which needs a proxy_weight of 0; `proxy_rows` classifies so many proxies, drawn at random, instead of
    all: an unbiased estimate of L^p, whose cost otherwise grows with C^2 N.
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
    ) -> None:
        super().__init__()
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim, proxies_per_class=proxies_per_class)
        if links is not None:
            require_whole(links=links)
        if not 0 < ratio < math.inf:
            raise ValueError(f"expected a ratio above 0 (the paper's is 0.05), got {ratio}")
        if not 0 <= proxy_weight < math.inf:
            raise ValueError(f"expected a proxy_weight of at least 0 (the paper's is 0.3), got {proxy_weight}")
        if not 0 < scale < math.inf:
            raise ValueError(f"expected a scale above 0 (the paper's is 1), got {scale}")
        if proxy_rows is not None:
            require_whole(proxy_rows=proxy_rows)
        if sparse_gradient and proxy_weight > 0:
            raise ValueError("sparse_gradient needs proxy_weight=0: the regulariser has a gradient in every proxy")
        self.num_classes = num_classes
        self.links = choose_links(num_classes, proxies_per_class, ratio) if links is None else links
        self.links = min(self.links, num_classes * proxies_per_class)
        self.proxy_weight = proxy_weight
        self.positive_bonus = 0.0 if not positive_mask else 1.0 if literal_mask else ABOVE_ANY_COSINE
        self.mask_softmax = mask_softmax
        self.scale = scale
        self.sparse_gradient = sparse_gradient
        self.proxy_rows = proxy_rows
        self.last_terms: Terms | None = None
        self.gradient_room, self.product_room = Room(), Room()
        # As in the authors' code; the length matters although proxies are normalised, since gradients scale with
        # its inverse.
        bound = 1 / math.sqrt(num_classes * proxies_per_class)
        self.proxies = nn.Parameter(torch.empty(num_classes, proxies_per_class, embedding_dim).uniform_(-bound, bound))
        if positive_mask and self.links <= proxies_per_class:
            _warn_of_no_negatives(num_classes, proxies_per_class, self.links)

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
        length = check_values(embeddings, labels, self.num_classes)
        precision = highest_precision(embeddings, self.proxies)
        with without_autocast(embeddings.device.type):  # exp of a sum of N cosines overflows float16
            proxies = self.proxies if torch.is_grad_enabled() else self.proxies.detach()  # which needs no gradient
            embeddings = embeddings.to(precision)
            embeddings = tamed(embeddings) if math.isinf(length) else embeddings  # lengths are sums of squares
            return Equations.apply(embeddings, proxies.to(precision), labels, self, None)

    def extra_repr(self) -> str:
        classes, per_class, dimension = self.proxies.shape
        return (
            f"num_classes={classes}, embedding_dim={dimension}, proxies_per_class={per_class}, links={self.links}, "
            f"proxy_weight={self.proxy_weight}, positive_bonus={self.positive_bonus}, "
            f"mask_softmax={self.mask_softmax}, scale={self.scale}, "
            f"sparse_gradient={self.sparse_gradient}, proxy_rows={self.proxy_rows}"
        )


def choose_links(num_classes: int, proxies_per_class: int, ratio: float) -> int:
    """k = ceil(r C N), at least 1 and at most C N."""
    proxies = num_classes * proxies_per_class
    # 0.07 * 100 * 12 is 84.00000000000001 in floating point: without the small number its ceiling would be 85.
    return min(proxies, max(1, math.ceil(ratio * proxies - 1e-9)))


class Together(Protocol):
    """What a loss whose classes are spread over processes finds with the others, where one process finds it alone."""

    def among_all(self, ranks: Tensor) -> Tensor: ...

    def highest(self, values: Tensor) -> Tensor: ...

    def total(self, values: Tensor) -> Tensor: ...

    def classify_proxies(
        self, proxies: Tensor, inverse_lengths: Tensor, sampled: int | None, weight: float, gradient: Tensor | None
    ) -> Tensor: ...


class Equations(torch.autograd.Function):
    """The loss. Its gradients are known as soon as its value is, and are made with it."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        proxies: Tensor,
        labels: Tensor,
        settings: "ProxyGMLLoss",
        together: Together | None,
    ) -> Tensor:
        """Embeddings (B, D) and proxies (C, N, D) of any length, labels (B,)."""
        given, differentiate = (embeddings, proxies, labels, settings), any(ctx.needs_input_grad)
        if together is None and fit_at_once(len(embeddings), proxies, settings):
            terms, gradients = solve_at_once(*given, differentiate=differentiate)
        else:
            terms, gradients = solve_in_parts(*given, together, differentiate=differentiate)
        object.__setattr__(settings, "last_terms", terms)  # nn.Module looks for parameters first, which takes longer
        ctx.save_for_backward(*gradients)
        if terms.proxy_loss is None:
            return terms.sample_loss.clone()
        return terms.sample_loss.add(terms.proxy_loss, alpha=settings.proxy_weight)  # Eq. 12: L

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # by create_graph=True; these gradients have none themselves
            raise RuntimeError("this loss has no second derivatives: call backward or grad without create_graph")
        as_they_are = gradient.device.type == "cpu" and gradient.item() == 1  # as after loss.backward(): a copy is dear
        gradients = ctx.saved_tensors if as_they_are else (each * gradient for each in ctx.saved_tensors)
        return *gradients, None, None, None


def solve_in_parts(
    embeddings: Tensor,
    proxies: Tensor,
    labels: Tensor,
    settings: "ProxyGMLLoss",
    together: Together | None,
    *,
    differentiate: bool,
) -> tuple[Terms, Gradients]:
    """Embeddings (B, D) and proxies (C, N, D) of any length, labels (B,) -> L^s and L^p, and the gradients of L."""
    classes, per_class, _ = proxies.shape
    inverse_lengths = invert_lengths(embeddings)  # (B,)
    samples = embeddings * inverse_lengths[:, None]  # (B, D)
    # Eq. 2 to 4: I, and of W the entries that are not 0
    links = link(
        *(samples, proxies, labels, min(settings.links, classes * per_class), settings.positive_bonus),
        None if together is None else together.among_all,
    )
    scores, reached, column = propagate(links.cosines, links.linked // per_class, classes)  # Eq. 5: Z = W Y^p, M
    unmasked = None if settings.mask_softmax else settings.num_classes
    sample_loss, slope, unlinked = masked_cross_entropy(  # Eq. 6, 7: L^s, and its gradient dL^s/dZ
        settings.scale * scores, reached, labels, unmasked, together
    )
    gradients: Gradients = None, None
    if differentiate:  # dL^s/dW: a link moves the score of its class
        slopes = settings.scale * slope.gather(1, column)
        straight = settings.proxy_weight == 0  # otherwise L^p straightens the gradients of both
        gradients = link_gradients(
            samples,
            proxies,
            links,
            slopes,
            settings.gradient_room,
            sparse=settings.sparse_gradient,
            straight=straight,
        )
        straighten(gradients[0], embeddings, inverse_lengths)
        gradients[0].mul_(inverse_lengths[:, None])
    proxy_loss = None
    if settings.proxy_weight > 0:  # Eq. 8 to 11: lambda L^p
        given = proxies, links.inverse_lengths, settings.proxy_rows, settings.proxy_weight, gradients[1]
        if together is None:
            weighted = classify_proxies(*given, settings.product_room)
        else:
            weighted = together.classify_proxies(*given)
        proxy_loss = weighted / settings.proxy_weight
    return Terms(sample_loss, proxy_loss, unlinked), gradients


def propagate(similarity: Tensor, classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse label propagation, Eq. 5: what the links of a sample to the proxies of a class add up to.

    Similarity (B, k) and classes (B, k) of the links, ascending, -> scores (B, k) of the classes that are reached,
    which these are (B, k), and in which column (B, k) the class of each link is. A sample reaches as many classes as
    it does: the columns that it does not need are NO_CLASS, as is what is no class below `num_classes`.
    """
    new = classes.diff(dim=1, prepend=classes.new_full((len(classes), 1), -1)) != 0  # (B, k)
    column = new.cumsum(dim=1) - 1  # (B, k)
    scores = torch.zeros_like(similarity).scatter_add_(1, column, similarity)
    reached = torch.full_like(classes, NO_CLASS).scatter_(1, column, classes)
    return scores, reached.masked_fill_(reached == num_classes, NO_CLASS), column


def masked_cross_entropy(
    scores: Tensor, reached: Tensor, labels: Tensor, unmasked: int | None = None, together: Together | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 6, 7, mean of -log P(own class): scores (B, k), classes (B, k), both of `propagate`, labels (B,) -> scalar.

    And its gradient (B, k), which is (P - Y^s) / B; and the share of samples whose own class no link reaches. Classes
    that no link reaches have no part in the softmax, and a sample whose own class is such a one has P = 0: it counts as
    NO_POSITIVE_LINK and gives no gradient. Without the mask they take part with a score of 0; `unmasked` is then the
    number of all classes.
    """
    there = reached >= 0  # (B, k): M, from the links, since Z == 0 may be
    own = (reached == labels[:, None]).to(scores.dtype)  # (B, k): Y^s
    masked = scores.where(there, -math.inf)
    highest = masked.amax(dim=1)  # (B,)
    if together is not None:
        highest = together.highest(highest)
    if unmasked is not None:
        classes = there.sum(dim=1)  # (B,)
        unreached = unmasked - (classes if together is None else together.total(classes))
        highest = highest.where(unreached == 0, highest.clamp_min(0))
    exponentials = (masked - highest[:, None]).exp_()  # (B, k)
    sums = [exponentials.sum(dim=1), (scores * own).sum(dim=1), own.sum(dim=1)]  # (B,) each
    if together is not None:
        sums = list(together.total(torch.stack(sums)))
    total, own_score, counted = sums
    unlinked = 1 - counted.mean()
    if unmasked is not None:
        total, counted = total + unreached * (-highest.clamp_min(0)).exp(), torch.ones_like(counted)
    costs = (total.log() + highest - own_score).where(counted > 0, NO_POSITIVE_LINK)  # (B,)
    slope = (exponentials / total[:, None] - own) * (counted / len(scores))[:, None]  # (B, k)
    return costs.mean(), slope, unlinked


def _warn_of_no_negatives(num_classes: int, proxies_per_class: int, links: int) -> None:
    if num_classes == 1:
        advice = "one class leaves nothing to tell apart"
    else:
        ratio = (proxies_per_class + 0.5) / (num_classes * proxies_per_class)  # rounded up, one link more than N
        advice = f"use a ratio of at least {ratio:.4g} or links of at least {proxies_per_class + 1}"
    warnings.warn(
        f"{links} links for each sample are all taken by the {proxies_per_class} proxies of its own class: "
        f"no negative is linked and nothing tells classes apart; {advice}",
        stacklevel=3,
    )
