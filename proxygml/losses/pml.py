"""Losses that pytorch-metric-learning ships, with the constants of their papers for CUB-200-2011 and Cars196.

Every function returns a module `loss(embeddings, labels)`: embeddings (B, D), integer labels (B,) in 0..C-1 -> scalar.
The losses normalize embeddings, except for liftedstruct, n_pair and l_softmax. Proxies and class weights are
initialized from a standard normal distribution, the library's choice, unless a docstring says otherwise. Their norm
matters although only directions count, since gradients scale with its inverse.
"""

import math
import warnings
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from pytorch_metric_learning import distances, losses, miners, regularizers
from torch import Tensor, nn

from proxygml.losses.interface import LibraryLoss, require_choice, require_not_negative, require_positive, require_whole
from proxygml.losses.semihard import NearestSemihardLoss

# Pairs and triplets of the batch


def semihard(
    num_classes: int, embedding_dim: int, *, variant: Literal["all", "nearest"] = "all", margin: float = 0.2
) -> nn.Module:
    """Triplets with a negative that is farther than the positive by at most the margin (Schroff et al., CVPR 2015).

    `all` is their mean; `nearest` is TensorFlow's variant: for each positive pair, the nearest farther negative.
    """
    require_choice("variant", variant, "all", "nearest")
    require_not_negative(margin=margin)
    if variant == "nearest":
        return LibraryLoss(num_classes, embedding_dim, NearestSemihardLoss(margin))
    squared = distances.LpDistance(power=2)
    miner = miners.TripletMarginMiner(margin=margin, type_of_triplets="semihard", distance=squared)
    return LibraryLoss(num_classes, embedding_dim, losses.TripletMarginLoss(margin=margin, distance=squared), miner)


def triplet(
    num_classes: int, embedding_dim: int, *, variant: Literal["all", "hard"] = "all", margin: float = 0.2
) -> nn.Module:
    """Triplets on squared distances (Weinberger and Saul, JMLR 2009), mean over triplets that violate the margin.

    `hard` takes one triplet per anchor: the farthest positive and the nearest negative (Hermans et al., 2017).
    """
    require_choice("variant", variant, "all", "hard")
    require_not_negative(margin=margin)
    squared = distances.LpDistance(power=2)
    miner = miners.BatchHardMiner(distance=squared) if variant == "hard" else None
    return LibraryLoss(num_classes, embedding_dim, losses.TripletMarginLoss(margin=margin, distance=squared), miner)


def contrastive(
    num_classes: int,
    embedding_dim: int,
    *,
    variant: Literal["squared", "cosine"] = "squared",
    margin: float | None = None,
) -> nn.Module:
    """d² of positives and [margin - d²]_+ of negatives, margin 1 (Hadsell et al., CVPR 2006; in Oh Song's form).

    `cosine`: 1 - s and [s - margin]_+, margin 0.5. Both are means over pairs with a loss above 0.
    """
    require_choice("variant", variant, "squared", "cosine")
    if variant == "squared":
        distance, positive, negative = distances.LpDistance(power=2), 0.0, 1.0
    else:
        distance, positive, negative = distances.CosineSimilarity(), 1.0, 0.5
    negative = negative if margin is None else margin
    return LibraryLoss(num_classes, embedding_dim, losses.ContrastiveLoss(positive, negative, distance=distance))


def liftedstruct(num_classes: int, embedding_dim: int, *, margin: float = 1.0) -> nn.Module:
    """Lifted structure (Oh Song et al., CVPR 2016)."""
    require_not_negative(margin=margin)
    loss = losses.LiftedStructureLoss(margin, 0, distance=distances.LpDistance(normalize_embeddings=False))
    return LibraryLoss(num_classes, embedding_dim, loss, directions=False)


def n_pair(num_classes: int, embedding_dim: int, *, regularization_weight: float = 0.003) -> nn.Module:
    """N-pair (Sohn, NeurIPS 2016); the weight is 0.003 for Cars196, 0.015 for CUB.

    The first two images of each class are anchor and positive: use batches with two images per class. The regularizer
    is the mean squared norm of all embeddings, also in a batch without a pair.
    """
    require_not_negative(regularization_weight=regularization_weight)
    loss = losses.NPairsLoss(
        distance=distances.DotProductSimilarity(normalize_embeddings=False),
        embedding_regularizer=regularizers.LpRegularizer(p=2, power=2),
        embedding_reg_weight=0.5 * regularization_weight,
    )
    return LibraryLoss(num_classes, embedding_dim, loss, directions=False)


def ms(
    num_classes: int,
    embedding_dim: int,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float = 0.1,
) -> nn.Module:
    """Multi-similarity with its mining (Wang et al., CVPR 2019).

    The authors' code has beta 40 and base 0.5; the paper, from memory, beta 50 and base 1.
    """
    require_positive(alpha=alpha, beta=beta)
    require_not_negative(epsilon=epsilon)
    miner = partial(_mine_twice, miners.MultiSimilarityMiner(epsilon=epsilon))
    return LibraryLoss(num_classes, embedding_dim, losses.MultiSimilarityLoss(alpha, beta, base), miner)


def _mine_twice(miner: nn.Module, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Each pair twice, since the library ignores a single pair; only for losses that turn pairs into a mask."""
    return tuple(indices.repeat(2) for indices in miner(embeddings, labels))


def margin(
    num_classes: int,
    embedding_dim: int,
    *,
    margin: float = 0.2,
    beta: float = 1.2,
    nu: float = 0.0,
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float = 1.4,
) -> nn.Module:
    """Margin with distance-weighted sampling (Wu et al., ICCV 2017); a boundary beta is learned for each class.

    Triplets are sampled with torch's global generator: as many per anchor as its class has images in the batch.
    """
    require_positive(beta=beta)
    require_not_negative(margin=margin, nu=nu, cutoff=cutoff, nonzero_loss_cutoff=nonzero_loss_cutoff)
    loss = losses.MarginLoss(margin, nu, beta, learn_beta=True, num_classes=num_classes)
    miner = miners.DistanceWeightedMiner(cutoff=cutoff, nonzero_loss_cutoff=nonzero_loss_cutoff)
    return LibraryLoss(num_classes, embedding_dim, loss, miner)


# Proxies and class weights


def proxy_nca(
    num_classes: int, embedding_dim: int, *, softmax_scale: float = 9.0, exclude_positive: bool = False
) -> nn.Module:
    """Proxy-NCA (Movshovitz-Attias et al., ICCV 2017); a softmax_scale of 8 for Stanford Online Products.

    The paper excludes the positive proxy from the sum; common code does not. Proxies are initialized with a standard
    deviation of 1/8, as in that code.
    """
    require_positive(softmax_scale=softmax_scale)
    if exclude_positive and num_classes == 1:
        raise ValueError("expected at least 2 classes, since exclude_positive leaves the other proxies, got 1")
    init = partial(nn.init.normal_, std=1 / 8)
    loss = losses.ProxyNCALoss(num_classes, embedding_dim, softmax_scale=softmax_scale, weight_init_func=init)
    return LibraryLoss(num_classes, embedding_dim, PositiveExcluded(loss) if exclude_positive else loss)


class PositiveExcluded(nn.Module):
    """The paper's Proxy-NCA, d²(x, p_y) + log Σ_{z≠y} exp(-d²(x, p_z)) with scaled d²; it can be negative."""

    def __init__(self, loss: losses.ProxyNCALoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        logits = -self.loss.softmax_scale * self.loss.get_logits(embeddings)  # (B, C)
        own = F.one_hot(labels, logits.shape[1]).bool()  # (B, C)
        return (logits.masked_fill(own, -math.inf).logsumexp(dim=1) - logits[own]).mean()


def softtriple(
    num_classes: int,
    embedding_dim: int,
    *,
    centers_per_class: int = 10,
    la: float = 20.0,
    gamma: float = 0.1,
    margin: float = 0.01,
    regularization_weight: float = 0.2,
) -> nn.Module:
    """SoftTriple (Qian et al., ICCV 2019); for Stanford Online Products, from memory, 2 centers_per_class.

    Centers are initialized uniformly in ±1/sqrt(C centers_per_class), as in the authors' code.
    """
    require_whole(centers_per_class=centers_per_class)
    require_positive(la=la, gamma=gamma)
    require_not_negative(margin=margin, regularization_weight=regularization_weight)
    regularizer = partial(center_spread, num_classes=num_classes) if centers_per_class > 1 else None
    settings = {"weight_regularizer": regularizer, "weight_reg_weight": regularization_weight}
    loss = losses.SoftTripleLoss(num_classes, embedding_dim, centers_per_class, la, gamma, margin, **settings)
    return LibraryLoss(num_classes, embedding_dim, loss)


def center_spread(centers: Tensor, num_classes: int) -> Tensor:
    """Half the mean distance between centers of the same class, SoftTriple's regularizer: centers (C K, D) -> scalar.

    The library's regularizer needs (C K)² memory and has NaN gradients when two centers coincide, which is its goal.
    """
    unit = F.normalize(centers.unflatten(0, (num_classes, -1)), dim=-1)  # (C, K, D)
    first, second = torch.triu_indices(unit.shape[1], unit.shape[1], offset=1, device=unit.device)
    similarity = (unit @ unit.mT)[:, first, second]  # (C, K (K - 1) / 2)
    return (2 + 1e-5 - 2 * similarity).sqrt().mean() / 2


def proxy_anchor(num_classes: int, embedding_dim: int, *, margin: float = 0.1, alpha: float = 32) -> nn.Module:
    """Proxy-Anchor (Kim et al., CVPR 2020); initial proxies have a standard deviation of sqrt(2 / C)."""
    require_positive(alpha=alpha)
    require_not_negative(margin=margin)
    loss = losses.ProxyAnchorLoss(num_classes, embedding_dim, margin=margin, alpha=alpha)
    return LibraryLoss(num_classes, embedding_dim, loss)


def norm_softmax(num_classes: int, embedding_dim: int, *, scale: float = 20.0) -> nn.Module:
    """Softmax of scaled cosines (Wang et al., ACM MM 2017), at the library's temperature of 1/20."""
    require_positive(scale=scale)
    loss = losses.NormalizedSoftmaxLoss(num_classes, embedding_dim, temperature=1 / scale)
    return LibraryLoss(num_classes, embedding_dim, loss)


def cosface(num_classes: int, embedding_dim: int, *, margin: float = 0.35, scale: float = 64.0) -> nn.Module:
    """CosFace (Wang et al., CVPR 2018): a margin on the cosine with the own class."""
    require_positive(scale=scale)
    require_not_negative(margin=margin)
    loss = losses.CosFaceLoss(num_classes, embedding_dim, margin=margin, scale=scale)
    return LibraryLoss(num_classes, embedding_dim, loss)


def am_softmax(num_classes: int, embedding_dim: int, *, margin: float = 0.35, scale: float = 30.0) -> nn.Module:
    """AM-softmax (Wang et al., SPL 2018): CosFace at another scale."""
    return cosface(num_classes, embedding_dim, margin=margin, scale=scale)


def arcface(num_classes: int, embedding_dim: int, *, margin: float = 28.6, scale: float = 64.0) -> nn.Module:
    """ArcFace (Deng et al., CVPR 2019): a margin, in degrees, on the angle with the own class."""
    require_positive(scale=scale)
    require_not_negative(margin=margin)
    loss = losses.ArcFaceLoss(num_classes, embedding_dim, margin=margin, scale=scale, distance=InnerCosine())
    return LibraryLoss(num_classes, embedding_dim, loss)


def subcenter_arcface(
    num_classes: int, embedding_dim: int, *, sub_centers: int = 3, margin: float = 28.6, scale: float = 64.0
) -> nn.Module:
    """Sub-center ArcFace (Deng et al., ECCV 2020): the nearest of several centers of a class; margin in degrees."""
    require_whole(sub_centers=sub_centers)
    require_positive(scale=scale)
    require_not_negative(margin=margin)
    settings = {"margin": margin, "scale": scale, "sub_centers": sub_centers, "distance": InnerCosine()}
    loss = losses.SubCenterArcFaceLoss(num_classes=num_classes, embedding_size=embedding_dim, **settings)
    return LibraryLoss(num_classes, embedding_dim, loss)


class InnerCosine(distances.CosineSimilarity):
    """Cosines clamped one rounding step inside ±1, where the derivative of ArcFace's arc cosine is infinite."""

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        bound = 1 - torch.finfo(query_emb.dtype).eps
        return super().compute_mat(query_emb, ref_emb).clamp(-bound, bound)


def l_softmax(
    num_classes: int, embedding_dim: int, *, margin: int = 4, scale: float = 1.0, plain_weight: float = 5.0
) -> nn.Module:
    """Large-margin softmax (Liu et al., ICML 2016): a multiple of the angle with the own class.

    As in the authors' code, it is averaged with the plain cosine, which has `plain_weight`: without it, embeddings of a
    network with random initialization collapse. They decrease the weight during training; ours is their final value
    (from memory). Class weights are initialized as in a linear layer.
    """
    require_whole(margin=margin)
    require_positive(scale=scale)
    require_not_negative(plain_weight=plain_weight)
    init = partial(nn.init.uniform_, a=-(embedding_dim**-0.5), b=embedding_dim**-0.5)
    with warnings.catch_warnings():  # it passes tensors to scipy, which NumPy 2 deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        loss = SoftenedLargeMargin(
            num_classes, embedding_dim, margin=margin, scale=scale, plain_weight=plain_weight, weight_init_func=init
        )
    return LibraryLoss(num_classes, embedding_dim, loss, directions=False)


class SoftenedLargeMargin(losses.LargeMarginSoftmaxLoss):
    """(psi(theta) + w cos(theta)) / (1 + w) instead of psi(theta), with w = `plain_weight`."""

    def __init__(self, *arguments: object, plain_weight: float, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.plain_weight = plain_weight

    def modify_cosine_of_target_classes(self, cosine_of_target_classes: Tensor) -> Tensor:
        psi = super().modify_cosine_of_target_classes(cosine_of_target_classes)
        return (psi + self.plain_weight * cosine_of_target_classes) / (1 + self.plain_weight)
