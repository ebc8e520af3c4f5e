"""Few proxies: whole matrices and hand-written gradients, in few operations.

Samples and class sums are the rows of one matrix R (B + C, D). One product R V^T with the proxies V holds the
similarities of the samples and, transposed, the scores of the proxies: for small matrices, the number of operations
counts. `proxy_regularizer` is the form of L^p for many proxies. V is not normalized: products are scaled by 1 / norm.
No shape depends on the data, so nothing waits for an accelerator. docs/performance.md has the times.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml.losses.proxygml import chunked
from proxygml.losses.proxygml.buffers import BufferPool
from proxygml.losses.proxygml.gradients import Gradients, Terms, mask_softmax_loss, project_to_tangent
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.topk import chunk_elements, invert_norms

MAX_PROXIES = 2**11  # on a CPU; for more proxies, chunks that stay in the cache are faster


def fits_fused(batch: int, proxies: Tensor, settings: ProxyGMLSettings) -> bool:
    """Whether `fused` can and should run: few proxies (C, N, D), and a product R V^T that fits in memory."""
    classes, per_class, _ = proxies.shape
    total, rows = classes * per_class, batch + (classes if settings.proxy_weight > 0 else 0)
    few = total < MAX_PROXIES or proxies.device.type != "cpu"
    return few and not settings.extends_definition and rows * total <= chunk_elements(proxies)


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
    (classes, per_class, dimension), batch = proxies.shape, len(embeddings)
    vectors = proxies.flatten(0, 1)  # (CN, D)
    inverse_norms, sample_inverse_norms = invert_norms(vectors), invert_norms(embeddings)  # (CN,), (B,)
    regularize = settings.proxy_weight > 0
    rows = embeddings.new_empty(batch + classes * regularize, dimension)  # R
    torch.mul(embeddings, sample_inverse_norms[:, None], out=rows[:batch])  # (B, D)
    if regularize:
        torch.bmm(inverse_norms.view(classes, 1, per_class), proxies, out=rows[batch:, None])  # (C, 1, D): P^T Y^p
    products = (rows @ vectors.T).mul_(inverse_norms)  # (B + C, CN)
    cosines, proxy_scores = products[:batch], products[batch:]  # (B, CN), Eq. 2: S; (C, CN), Eq. 8, 9: transposed Z^p

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
    proxy_loss = None
    if regularize:
        log_probability = proxy_scores.log_softmax(dim=0)  # (C, CN), Eq. 10
        proxy_loss = -log_probability.view(classes, classes, per_class).diagonal().mean()  # Eq. 11
    terms = Terms(sample_loss, proxy_loss, unlinked)
    if not differentiate:
        return terms, (None, None)

    # `products` becomes the gradient of R V^T.
    weights = grad_scores.gather(1, link_class).mul_(settings.scale * inverse_norms.take(linked))  # (B, k)
    cosines.zero_().scatter_(1, linked, weights)
    if regularize:
        factor = settings.proxy_weight / len(vectors) * inverse_norms  # (CN,)
        torch.mul(log_probability.exp_(), factor, out=proxy_scores)
        proxy_scores.view(classes, classes, per_class).diagonal().sub_(factor.view(classes, per_class).T)  # P^p - Y^p
    if links > chunked.SPARSE_LINKS * len(vectors):
        sample_gradient, sum_gradient = (products @ vectors).split([batch, len(rows) - batch])  # (B, D), (C, D)
    else:
        sample_gradient = F.embedding_bag(linked, vectors, per_sample_weights=weights, mode="sum")  # (B, D)
        sum_gradient = proxy_scores @ vectors  # (C, D)
    project_to_tangent(sample_gradient, embeddings, sample_inverse_norms)
    sample_gradient.mul_(sample_inverse_norms[:, None])
    gradient = torch.mm(products.T, rows, out=pool.empty(len(vectors), vectors)).view_as(proxies)  # (C, N, D)
    if regularize:
        gradient.addcmul_(sum_gradient[:, None], inverse_norms.view(classes, per_class, 1))
    project_to_tangent(gradient.flatten(0, 1), vectors, inverse_norms)
    return terms, (sample_gradient, gradient)
