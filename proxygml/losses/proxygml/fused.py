"""Few proxies: whole matrices and hand-written gradients, in few operations.

Products use the proxies V as they are and are scaled by 1 / norm afterward, so no normalized copy of V exists.
No shape depends on the data, so nothing waits for an accelerator. docs/performance.md has the times.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.losses.proxygml import chunked
from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.gradients import (
    Gradients,
    Terms,
    mask_softmax_loss,
    project_to_tangent,
    proxy_regularizer,
)
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.topk import chunk_elements, invert_norms

MAX_PROXIES = 2**11  # on a CPU; for more proxies, chunks that stay in the cache are faster


def fits_fused(batch: int, proxies: Tensor, settings: ProxyGMLSettings) -> bool:
    """Whether `fused` can and should run: few proxies (C, N, D), and similarities (B, CN) that fit in memory."""
    total = proxies.shape[0] * proxies.shape[1]
    few = total < MAX_PROXIES or proxies.device.type != "cpu"
    return few and not settings.extends_definition and batch * total <= chunk_elements(proxies)


def fused(
    embeddings: Tensor,
    proxies: Tensor,
    labels: Tensor,
    settings: ProxyGMLSettings,
    links: int,
    pool: BufferPool,
    *,
    differentiate: bool,
) -> tuple[Terms, Gradients]:
    """L^s and L^p, and the gradients of L: embeddings (B, D) and proxies (C, N, D) of any norm, labels (B,)."""
    (classes, per_class, _), batch = proxies.shape, len(embeddings)
    vectors = proxies.flatten(0, 1)  # (CN, D)
    inverse_norms, sample_inverse_norms = invert_norms(vectors), invert_norms(embeddings)  # (CN,), (B,)
    samples = embeddings * sample_inverse_norms[:, None]  # (B, D)
    cosines = (samples @ vectors.T).mul_(inverse_norms)  # (B, CN), Eq. 2: S
    own = cosines.new_zeros(batch, classes).scatter_(1, labels[:, None], 1)  # (B, C): Y^s
    ranks = torch.add(cosines.view(batch, classes, per_class), own[:, :, None], alpha=settings.positive_bonus)  # Eq. 3
    linked = ranks.view(batch, -1).topk(links, sorted=False).indices  # (B, k), Eq. 4: I
    link_class = linked // per_class  # (B, k)
    scores = torch.zeros_like(own).scatter_add_(1, link_class, cosines.gather(1, linked))  # (B, C), Eq. 5: Z = W Y^p
    active_classes = torch.zeros_like(own, dtype=torch.bool).scatter_(1, link_class, True)  # (B, C): M
    num_classes = None if settings.mask_softmax else classes
    sample_loss, grad_scores, unlinked = mask_softmax_loss(  # Eq. 6, 7
        scores.mul_(settings.scale), active_classes, own, num_classes
    )
    gradients: Gradients = None, None
    if differentiate:
        weights = grad_scores.gather(1, link_class).mul_(settings.scale * inverse_norms.take(linked))  # (B, k)
        matrix = cosines.zero_().scatter_(1, linked, weights)  # (B, CN): the gradient of X V^T
        if links > chunked.SPARSE_LINKS * len(vectors):
            sample_gradient = matrix @ vectors  # (B, D)
        else:
            sample_gradient = F.embedding_bag(linked, vectors, per_sample_weights=weights, mode="sum")  # (B, D)
        project_to_tangent(sample_gradient, embeddings, sample_inverse_norms)
        sample_gradient.mul_(sample_inverse_norms[:, None])
        gradient = torch.mm(matrix.T, samples, out=pool.empty(len(vectors), vectors))  # (CN, D)
        if settings.proxy_weight == 0:  # otherwise the regularizer projects the gradients of both terms
            project_to_tangent(gradient, vectors, inverse_norms)
        gradients = sample_gradient, gradient.view_as(proxies)
    proxy_loss = None
    if settings.proxy_weight > 0:
        weight = settings.proxy_weight
        proxy_loss = proxy_regularizer(proxies, inverse_norms, weight=weight, gradient=gradients[1]) / weight
    return Terms(sample_loss, proxy_loss, unlinked), gradients
