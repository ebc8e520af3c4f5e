"""Few proxies: the whole matrix of similarities and hand-written gradients, in few operations.

For small matrices, the number of operations counts. Proxies are not normalized: products are scaled by 1 / norm. No
shape depends on the data, so nothing waits for an accelerator. docs/performance.md has the times.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.losses.proxygml import chunked
from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.gradients import SamplePart, mask_softmax_loss, project_to_tangent
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.topk import chunk_elements, invert_norms

MAX_PROXIES = 2**11  # on a CPU; for more proxies, chunks that stay in the cache are faster


def fits_fused(batch: int, proxies: Tensor, settings: ProxyGMLSettings) -> bool:
    """Whether `fused` can and should run: few proxies (C, N, D), and similarities that fit in memory."""
    total = proxies.shape[0] * proxies.shape[1]
    few = total < MAX_PROXIES or proxies.device.type != "cpu"
    return few and not settings.extends_definition and batch * total <= chunk_elements(proxies)


def sample_loss(
    samples: Tensor,
    proxies: Tensor,
    labels: Tensor,
    settings: ProxyGMLSettings,
    links: int,
    pool: BufferPool,
    collectives: None = None,
    *,
    differentiate: bool,
) -> SamplePart:
    """L^s and its gradients: unit samples (B, D), proxies (C, N, D) of any norm, labels (B,)."""
    (classes, per_class, _), batch = proxies.shape, len(samples)
    vectors = proxies.flatten(0, 1)  # (CN, D)
    inverse_norms = invert_norms(vectors)  # (CN,)
    cosines = (samples @ vectors.T).mul_(inverse_norms)  # (B, CN), Eq. 2: S
    own = cosines.new_zeros(batch, classes).scatter_(1, labels[:, None], 1)  # (B, C): Y^s
    ranks = torch.add(cosines.view(batch, classes, per_class), own[:, :, None], alpha=settings.positive_bonus)  # Eq. 3
    linked = ranks.view(batch, -1).topk(links, sorted=False).indices  # (B, k), Eq. 4: I
    link_class = linked // per_class  # (B, k)
    scores = torch.zeros_like(own).scatter_add_(1, link_class, cosines.gather(1, linked))  # (B, C), Eq. 5: Z = W Y^p
    active_classes = torch.zeros_like(own, dtype=torch.bool).scatter_(1, link_class, True)  # (B, C): M
    num_classes = None if settings.mask_softmax else classes
    loss, grad_scores, unlinked = mask_softmax_loss(  # Eq. 6, 7
        scores.mul_(settings.scale), active_classes, own, num_classes
    )
    if not differentiate:
        return SamplePart(loss, unlinked, inverse_norms)

    weights = grad_scores.gather(1, link_class).mul_(settings.scale * inverse_norms.take(linked))  # (B, k)
    grad_products = cosines.zero_().scatter_(1, linked, weights)  # (B, CN)
    if links > chunked.SPARSE_LINKS * len(vectors):
        sample_gradient = grad_products @ vectors  # (B, D)
    else:
        sample_gradient = F.embedding_bag(linked, vectors, per_sample_weights=weights, mode="sum")
    gradient = torch.mm(grad_products.T, samples, out=pool.empty(len(vectors), vectors))  # (CN, D)
    if settings.proxy_weight == 0:
        project_to_tangent(gradient, vectors, inverse_norms)
    return SamplePart(loss, unlinked, inverse_norms, (sample_gradient, gradient.view_as(proxies)))
