"""The hierarchical triplet loss: triplets with margins from a tree of classes (Ge et al., ECCV 2018).

The paper's symbols and our names:

    r         samples          (B, D)     unit embeddings
    d(p, q)   class_distances  (C, C)     mean squared distance of an image of class p and one of class q
    s_c       spreads          (C,)       mean squared distance of two images of class c
    d_l       thresholds       (L + 1,)   from d_0, the mean spread, to 4, the largest squared distance
    H(p, q)   merge_levels     (B, B)     lowest level of the tree at which two classes share a node
    alpha_z   margins          (B, B)     beta + d_H(p, q) - s_p

We had no code of the authors; the equations agree in two sets of notes on the paper. Single linkage, and a spread of 0
for a class of one image (not counted in d_0), are reconstructions. A margin of 0.2 in the first epoch and a new tree
before every later epoch are from memory.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor, nn

from proxygml.losses.interface import full_precision, normalized, require_not_negative, require_whole


class Tree(NamedTuple):
    """A hierarchy of classes, from level 0, which joins only the nearest, to level L."""

    nodes: Tensor  # (L + 1, C): the node of each class at each level
    thresholds: Tensor  # (L + 1,)
    spreads: Tensor  # (C,)


class Terms(NamedTuple):
    """Terms of the last loss, without gradient, for logs."""

    active_fraction: Tensor  # fraction of triplets that violate their margin
    margin: Tensor  # mean over pairs of images of different classes


class HTLLoss(nn.Module):
    """`loss(embeddings, labels)`: embeddings (B, D) of any norm, integer labels (B,) in 0..C-1 -> scalar.

    The mean of half the hinge over all triplets of the batch. `begin_epoch` builds the tree; before that, and in epoch
    0, every margin is `first_margin`. `class_distances` (C, C), zero on the diagonal, is for batches of neighboring
    classes; None without a tree. The state_dict has none of this: `begin_epoch` computes it from the network. `levels`
    is the paper's L.
    """

    def __init__(
        self, num_classes: int, embedding_dim: int, *, levels: int = 16, beta: float = 0.1, first_margin: float = 0.2
    ) -> None:
        super().__init__()
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim, levels=levels)
        require_not_negative(beta=beta, first_margin=first_margin)
        self.num_classes, self.embedding_dim = num_classes, embedding_dim
        self.levels, self.beta, self.first_margin = levels, beta, first_margin
        self.tree: Tree | None = None
        self.class_distances: Tensor | None = None
        self.last_terms: Terms | None = None

    @torch.no_grad()
    def begin_epoch(self, epoch: int, embed: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Build the tree from the embeddings (M, D) and labels (M,) of all training images; no tree in epoch 0."""
        self.tree = self.class_distances = None  # frees memory for the new ones
        if epoch == 0:
            return
        with full_precision(self, *embed()) as (embeddings, labels):
            self.class_distances, spreads, counts = class_statistics(embeddings, labels, self.num_classes)
            lowest = spreads[counts > 1].mean() if (counts > 1).any() else spreads.new_zeros(())  # d_0
            level = torch.arange(self.levels + 1, dtype=spreads.dtype, device=spreads.device)  # (L + 1,): l
            thresholds = level * (4 - lowest) / self.levels + lowest
            self.tree = Tree(join_classes(self.class_distances, thresholds), thresholds, spreads)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        with full_precision(self, embeddings, labels) as (embeddings, labels):
            samples = normalized(embeddings)  # (B, D)
            distances = 2 - 2 * samples @ samples.T  # (B, B), squared
            same = labels[:, None] == labels  # (B, B)
            margins = self.margins(labels, samples.dtype)  # (B, B): anchors, negatives
            negative_margins = margins.masked_fill(same, -math.inf)
            anchors, positives = same.clone().fill_diagonal_(False).nonzero(as_tuple=True)  # (P,) each
            triplets = (~same).sum(dim=1)[anchors].sum().clamp_min(1)  # Z

            excess = F.relu(
                distances[anchors, positives, None] - distances[anchors] + negative_margins[anchors]
            )  # (P, B)
            loss = excess.sum() / (2 * triplets)
        mean_margin = margins.masked_fill(same, 0).sum() / (~same).sum().clamp_min(1)
        self.last_terms = Terms((excess.detach() > 0).sum() / triplets, mean_margin)
        return loss

    def margins(self, labels: Tensor, precision: torch.dtype) -> Tensor:
        """alpha of every anchor (rows) with every negative (columns): labels (B,) -> (B, B)."""
        if self.tree is None:
            return torch.full((len(labels), len(labels)), self.first_margin, dtype=precision, device=labels.device)
        nodes, thresholds, spreads = (part.to(labels.device) for part in self.tree)
        levels = merge_levels(nodes[:, labels])
        return self.beta + (thresholds[levels] - spreads[labels][:, None]).to(precision)

    def extra_repr(self) -> str:
        return f"levels={self.levels}, beta={self.beta}, first_margin={self.first_margin}"


def class_statistics(embeddings: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distances d (C, C), with a diagonal of zeros, spreads s (C,) and numbers of images (C,) of the classes.

    For unit vectors both means follow from the mean vector of every class. Only one (C, C) matrix is in memory: 512 MB
    for the 11,318 classes of SOP.
    """
    counts = labels.bincount(minlength=num_classes)  # (C,)
    if (counts == 0).any():
        missing = (counts == 0).nonzero().flatten().tolist()
        raise ValueError(
            f"expected images of all {num_classes} classes, got none of {len(missing)} of them, first class "
            f"{missing[0]}: set num_classes to the number of classes with training images"
        )
    samples = normalized(embeddings)  # (M, D)
    means = samples.new_zeros(num_classes, samples.shape[1]).index_add_(0, labels, samples) / counts[:, None]  # (C, D)
    distances = (means @ means.T).mul_(-2).add_(2).clamp_(0, 4).fill_diagonal_(0)  # d = 2 - 2 mu_p mu_q
    within = (1 - means.square().sum(dim=1)).clamp_min(0)  # (C,)
    spreads = 2 * within * counts / (counts - 1).clamp_min(1)  # s = 2 n (1 - |mu|^2) / (n - 1)
    return distances, spreads.masked_fill(counts == 1, 0), counts


def join_classes(distances: Tensor, thresholds: Tensor) -> Tensor:
    """The node of every class at every level; level l joins distances below d_l: (C, C), (L + 1,) -> (L + 1, C)."""
    if len(distances) == 1:  # scipy refuses a tree of a single class
        return torch.zeros(len(thresholds), 1, dtype=torch.int32, device=distances.device)
    tree = linkage(squareform(distances.double().cpu().numpy(), checks=False), "single")
    below = torch.nextafter(thresholds, thresholds.new_tensor(-math.inf)).tolist()  # fcluster joins equal ones too
    nodes = np.stack([fcluster(tree, threshold, "distance") - 1 for threshold in below])
    return torch.from_numpy(nodes).to(distances.device)


def merge_levels(nodes: Tensor) -> Tensor:
    """H, the first level at which two classes share a node, at most L: (L + 1, B) -> (B, B)."""
    separate = nodes[:, :, None] != nodes[:, None, :]  # (L + 1, B, B); joined classes stay joined at higher levels
    return separate.sum(dim=0).clamp_max(len(nodes) - 1)
