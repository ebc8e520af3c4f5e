"""The ProxyGML loss as the paper defines it, Eq. 2 to 12, in plain PyTorch; all else is a faster form of this."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.losses.interface import normalized

NO_POSITIVE_LINK = -math.log(1e-20)  # the authors' -log(P + 1e-20) of a sample that no proxy of its class is linked to


def proxygml_loss(
    embeddings: Tensor,
    labels: Tensor,
    proxies: Tensor,
    *,
    links: int,
    proxy_weight: float = 0.3,
    positive_mask: bool = True,
    mask_softmax: bool = True,
    literal_mask: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """The loss of a batch: embeddings (B, D), labels (B,) in 0..C-1, proxies (C, N, D) -> scalar.

    `links` is k, the proxies in the subgraph of each sample; `proxy_weight` is lambda. The masks are the paper's S^pos
    and M. `literal_mask` adds 1 to positives as Eq. 3 does, which does not always put them first; otherwise we add 4,
    more than any two cosines differ by. `scale` multiplies Z before the softmax; the paper has none.
    """
    classes, per_class, _ = proxies.shape
    samples, proxies = normalized(embeddings), F.normalize(proxies, dim=2)  # (B, D), (C, N, D)
    similarity = torch.einsum("bd,cnd->bcn", samples, proxies)  # (B, C, N), Eq. 2: S
    own = labels[:, None] == torch.arange(classes, device=labels.device)  # (B, C)
    bonus = 0 if not positive_mask else 1 if literal_mask else 4
    ranking = (similarity.detach() + bonus * own[:, :, None]).flatten(1)  # (B, CN), Eq. 3: S + S^pos
    linked = torch.zeros_like(ranking).scatter(1, ranking.topk(links).indices, 1).view_as(similarity)  # the set I

    scores = scale * (similarity * linked).sum(dim=2)  # (B, C), Eq. 4 and 5: Z = W Y^p
    active = linked.sum(dim=2) > 0  # (B, C), Eq. 6: M
    if mask_softmax:
        scores = scores.masked_fill(~active, -math.inf)
    log_probability = scores.log_softmax(dim=1).gather(1, labels[:, None])  # (B, 1), Eq. 6
    if mask_softmax:
        log_probability = log_probability.where(active.gather(1, labels[:, None]), -NO_POSITIVE_LINK)
    sample_loss = -log_probability.mean()  # Eq. 7: L^s
    if proxy_weight == 0:
        return sample_loss

    proxy_scores = torch.einsum("cnd,kd->cnk", proxies, proxies.sum(dim=1))  # (C, N, C), Eq. 8 and 9: Z^p = S^p Y^p
    proxy_labels = torch.arange(classes, device=labels.device).repeat_interleave(per_class)  # (CN,)
    proxy_loss = F.cross_entropy(proxy_scores.flatten(0, 1), proxy_labels)  # Eq. 10 and 11: L^p
    return sample_loss + proxy_weight * proxy_loss  # Eq. 12: L
