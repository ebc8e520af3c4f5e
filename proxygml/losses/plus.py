"""ProxyGML with ingredients beyond the paper, each an option that is off by default, in plain autograd.

Without options it is `proxygml_loss`. Two more ingredients are settings of a run: `start_ratio` and `proxy_start`.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.losses.interface import full_precision, normalized, require_not_negative, require_positive
from proxygml.losses.proxygml.module import ProxyGMLLoss

Aggregate = Literal["sum", "mean", "softmax"]


def affinities(similarity: Tensor, *, decay: float, radius: float) -> Tensor:
    """What a link is worth: the cosine S or, with a `decay`, a potential (radius / distance)^decay, 1 within `radius`.

    After the decaying potential of PFML, CVPR 2025.
    """
    if decay == 0:
        return similarity
    distance = (2 - 2 * similarity).clamp_min(radius**2).sqrt()
    return (radius / distance) ** decay


def class_scores(affinity: Tensor, linked: Tensor, *, aggregate: str, temperature: float) -> Tensor:
    """Z (B, C) from the affinities (B, C, N) of linked proxies (B, C, N): their sum, mean, or softmax-weighted mean."""
    if aggregate == "sum":
        return (affinity * linked).sum(dim=2)
    if aggregate == "mean":
        return (affinity * linked).sum(dim=2) / linked.sum(dim=2).clamp_min(1)
    weights = (affinity / temperature).masked_fill(linked == 0, -1e4).softmax(dim=2) * linked  # (B, C, N)
    return (affinity * weights).sum(dim=2)


def anchor_loss(affinity: Tensor, linked: Tensor, own: Tensor, *, scale: float, margin: float) -> Tensor:
    """Proxy-Anchor's loss on the links alone: affinities and links (B, C, N), own classes (B, C).

    Every proxy pulls its linked samples and pushes those of other classes, the hardest most (Kim et al., CVPR 2020).
    """
    positive, negative = linked * own[:, :, None], linked * ~own[:, :, None]  # (B, C, N)
    pull = scale * (margin - affinity)
    push = scale * (margin + affinity)
    pulls = _log_sum(pull, positive)  # (C, N)
    present = positive.sum(dim=0) > 0
    return pulls.sum() / present.sum().clamp_min(1) + _log_sum(push, negative).mean()


def _log_sum(exponents: Tensor, chosen: Tensor) -> Tensor:
    """log(1 + the sum over samples of exp) (C, N) of the chosen exponents (B, C, N)."""
    masked = exponents.masked_fill(chosen == 0, -math.inf)
    zero = torch.zeros_like(masked[:1])
    return torch.cat([zero, masked]).logsumexp(dim=0)


class ProxyGMLPlusLoss(ProxyGMLLoss):
    """`loss(embeddings, labels)` as `ProxyGMLLoss`, with ingredients that are not in the paper.

    `aggregate` is how the links of a class make its score: their sum, their mean, or their mean weighted by a softmax
    with `temperature`. `margin` is subtracted from the score of the sample's own class before `scale` multiplies it.
    `decay` and `radius` replace cosines by a potential. In training, Gaussian noise of length `noise` is added to unit
    proxies. `anchor` takes Proxy-Anchor's loss on the links in place of the mask softmax.
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
        scale: float = 1.0,
        aggregate: Aggregate = "sum",
        temperature: float = 0.1,
        margin: float = 0.0,
        decay: float = 0.0,
        radius: float = 0.2,
        noise: float = 0.0,
        anchor: bool = False,
    ) -> None:
        super().__init__(
            num_classes,
            embedding_dim,
            proxies_per_class=proxies_per_class,
            ratio=ratio,
            links=links,
            proxy_weight=proxy_weight,
            scale=scale,
        )
        if aggregate not in ("sum", "mean", "softmax"):
            raise ValueError(f"expected aggregate as sum, mean or softmax, got {aggregate!r}")
        require_positive(temperature=temperature, radius=radius)
        require_not_negative(margin=margin, decay=decay, noise=noise)
        self.embedding_dim = embedding_dim
        self.aggregate, self.temperature, self.margin = aggregate, temperature, margin
        self.decay, self.radius, self.noise, self.anchor = decay, radius, noise, anchor

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]  # no library calls it
        """The loss of a batch: embeddings (B, D), labels (B,) -> scalar."""
        with full_precision(self, embeddings, labels) as (embeddings, labels):
            samples, proxies = normalized(embeddings), F.normalize(self.proxies.to(embeddings), dim=2)
            if self.noise and self.training:
                noise = torch.randn_like(proxies) * self.noise / math.sqrt(self.embedding_dim)
                proxies = F.normalize(proxies + noise, dim=2)
            similarity = torch.einsum("bd,cnd->bcn", samples, proxies)  # (B, C, N)
            own = F.one_hot(labels, self.num_classes).bool()  # (B, C)
            ranking = (similarity.detach() + self.settings.positive_bonus * own[:, :, None]).flatten(1)
            linked = torch.zeros_like(ranking).scatter(1, ranking.topk(self.links).indices, 1).view_as(similarity)
            affinity = affinities(similarity, decay=self.decay, radius=self.radius)
            if self.anchor:
                sample_loss = anchor_loss(affinity, linked, own, scale=self.settings.scale, margin=self.margin)
            else:
                scores = class_scores(affinity, linked, aggregate=self.aggregate, temperature=self.temperature)
                scores = self.settings.scale * (scores - self.margin * own)
                sample_loss = F.cross_entropy(scores.masked_fill(linked.sum(dim=2) == 0, -math.inf), labels)
            return sample_loss + self.settings.proxy_weight * proxy_loss(proxies)


def proxy_loss(proxies: Tensor) -> Tensor:
    """L^p, Eq. 8 to 11, of unit proxies (C, N, D)."""
    classes, per_class, _ = proxies.shape
    scores = torch.einsum("cnd,kd->cnk", proxies, proxies.sum(dim=1))  # (C, N, C)
    return F.cross_entropy(
        scores.flatten(0, 1), torch.arange(classes, device=proxies.device).repeat_interleave(per_class)
    )
