"""The clustering loss with facility location and an NMI margin (Oh Song et al., CVPR 2017).

The batch is clustered in the way that is cheap but wrong, and the loss asks the true classes to be cheaper by a margin.
The paper's symbols are called here:

    X, Y       embeddings (M, D), labels (M,)    the batch, with |Y| classes (M is our B)
    S          medoids (|Y|,)                    indices of the images that the others gather around
    D          distances (M, M)                  Euclidean, not squared
    F(S)       -                                 facility energy, -sum_i min_{j in S} D_ij
    F~         -                                 energy of the true classes, each around its best medoid
    g(S)       clusters (M,)                     position in S of the medoid nearest to each image
    Delta      disagreement                      1 - NMI(g(S), Y), with the geometric mean of the entropies
    A(S)       -                                 F(S) + gamma Delta(g(S), Y), which the search makes large

NMI is computed image by image: with n(j) the number of images that share the class, the cluster or both with image j,
the entropy H is mean_j log(M / n(j)) and the mutual information mean_j log(M n_both(j) / (n_class(j) n_cluster(j))).
Contingency tables of all candidates for a medoid thus are products of (candidates, M) and (M, M) matrices.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from proxygml.losses.interface import (
    check_lengths,
    checked_labels,
    require_not_negative,
    require_whole,
    without_autocast,
)


class Terms(NamedTuple):
    """What the last loss was made of, without gradient, for logs: max(0, energy_gap + gamma disagreement)."""

    energy_gap: Tensor  # F(S) - F~
    disagreement: Tensor  # Delta of the clustering that was found


class ClusteringLoss(nn.Module):
    """`loss(embeddings, labels)`: embeddings (B, D), integer labels (B,) in 0..C-1 -> scalar, a sum over the batch.

    Embeddings are taken as they come, of unit length in the paper, from plain shuffled batches of about 128. The search
    for the medoids is discrete (greedy, then `sweeps` of PAM) and runs on the CPU; the gradient goes through distances
    to medoids only, since Delta is a constant. A batch of one class, or with every class once, gives 0.

    The weight of Delta is `gamma` times `gamma_decay` to the power of the epoch, which `begin_epoch` sets. The paper's
    own values were not at hand: the decay is from memory, and 10 is the start of another implementation's search.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        gamma: float = 10.0,
        gamma_decay: float = 0.94,
        sweeps: int = 5,
    ) -> None:
        super().__init__()
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim)
        require_not_negative(gamma=gamma, gamma_decay=gamma_decay, sweeps=sweeps)
        if sweeps != int(sweeps):
            raise ValueError(f"expected sweeps as a whole number of at least 0, got {sweeps}")
        self.num_classes, self.embedding_dim = num_classes, embedding_dim
        self.first_gamma, self.gamma_decay, self.sweeps = gamma, gamma_decay, sweeps
        self.gamma = gamma  # of the present epoch
        self.last_terms: Terms | None = None

    def begin_epoch(self, epoch: int, embed: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Set gamma for an epoch, counted from 0."""
        self.gamma = self.first_gamma * self.gamma_decay**epoch

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        labels = checked_labels(embeddings, labels, self.num_classes, self.embedding_dim).cpu()  # where the search runs
        check_lengths(embeddings)
        with without_autocast(embeddings.device.type):
            samples = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))  # (M, D)
            fixed = samples.detach()
            distances = torch.cdist(fixed, fixed, compute_mode="donot_use_mm_for_euclid_dist").double().cpu()  # (M, M)
            same_class = labels[:, None] == labels  # (M, M)

            medoids = greedy_medoids(distances, same_class, len(labels.unique()), self.gamma)
            medoids = refined_medoids(distances, same_class, medoids, self.gamma, self.sweeps)
            clusters = assign(distances, medoids)
            delta = disagreement_of(same_class, clusters)

            energy = -distance(samples, samples[medoids[clusters]]).sum()  # F(S)
            true_energy = -distance(samples, samples[class_medoids(distances, same_class)]).sum()  # F~
            loss = (energy + self.gamma * delta.item() - true_energy).relu()
        self.last_terms = Terms((energy - true_energy).detach(), delta)
        return loss

    def extra_repr(self) -> str:
        return f"gamma={self.first_gamma}, gamma_decay={self.gamma_decay}, sweeps={self.sweeps}"


def distance(points: Tensor, others: Tensor) -> Tensor:
    """Euclidean distance row by row: (M, D), (M, D) -> (M,); the small number keeps its gradient finite at 0."""
    return ((points - others).square().sum(dim=1) + 1e-12).sqrt()


def class_medoids(distances: Tensor, same_class: Tensor) -> Tensor:
    """For each image the best medoid of its class: distances (M, M), same_class (M, M) -> indices (M,)."""
    cost = distances.where(same_class, 0).sum(dim=0)  # (M,): sum_{i in c} D_ij of a medoid j of class c
    return cost.where(same_class, torch.inf).argmin(dim=1)


def greedy_medoids(distances: Tensor, same_class: Tensor, count: int, gamma: float) -> Tensor:
    """That many medoids, each the one that makes A(S) largest when it is added -> indices (count,)."""
    # One cluster disagrees with the classes equally whichever image is its medoid, so that F alone chooses the first.
    medoids = distances.sum(dim=0).argmin()[None]
    everyone = torch.arange(len(distances))
    for _ in range(count - 1):
        nearest = distances[:, medoids].amin(dim=1)  # (M,)
        energy = -distances.minimum(nearest[:, None]).sum(dim=0)  # (M,): F(S + {i}) of every candidate i
        score = energy + gamma * disagreement_with(distances, same_class, medoids, everyone)
        score[medoids] = -torch.inf
        medoids = torch.cat([medoids, score.argmax()[None]])
    return medoids


def refined_medoids(distances: Tensor, same_class: Tensor, medoids: Tensor, gamma: float, sweeps: int) -> Tensor:
    """PAM: sweeps over the clusters, each of which in turn takes the medoid among its members that makes A largest."""
    for _ in range(sweeps if len(medoids) > 1 else 0):
        before = medoids
        clusters = assign(distances, medoids)  # kept during the sweep
        for position in (clusters.bincount() > 1).nonzero()[:, 0].tolist():  # one alone stays its own medoid
            members = (clusters == position).nonzero()[:, 0]
            energy = -distances[members[:, None], members].sum(dim=0)
            others = torch.cat([medoids[:position], medoids[position + 1 :]])
            score = energy + gamma * disagreement_with(distances, same_class, others, members)
            medoids = medoids.index_fill(0, torch.tensor(position), members[score.argmax()])
        if medoids.equal(before):  # as would be all further sweeps
            break
    return medoids


def assign(distances: Tensor, medoids: Tensor) -> Tensor:
    """g(S): position in medoids (K,) of the nearest to each image -> (M,). A medoid is its own nearest."""
    clusters = distances[:, medoids].argmin(dim=1)
    clusters[medoids] = torch.arange(len(medoids))  # where another medoid is at the same place
    return clusters


def disagreement_of(same_class: Tensor, clusters: Tensor) -> Tensor:
    """Delta of classes and clusters: same_class (M, M), clusters (M,) -> scalar."""
    same_cluster = clusters[:, None] == clusters  # (M, M)
    return disagreement(same_class.sum(dim=1), same_cluster.sum(dim=1), (same_class & same_cluster).sum(dim=1))


def disagreement_with(distances: Tensor, same_class: Tensor, medoids: Tensor, candidates: Tensor) -> Tensor:
    """Delta(g(S + {i}), Y) of medoids S (K,) with each of the candidates i (N,), one at a time -> (N,)."""
    clusters = assign(distances, medoids)  # (M,), before the candidate comes
    nearest = distances[:, medoids].amin(dim=1)  # (M,)
    moved = distances[candidates] < nearest  # (N, M): images that go to the candidate; no medoid does, being at 0
    moved[torch.arange(len(candidates)), candidates] = True

    precision = torch.float32  # exact for counts, and products are faster
    stayed, moves = (~moved).to(precision), moved.to(precision)
    same_cluster = clusters[:, None] == clusters  # (M, M)
    in_cluster = (stayed @ same_cluster.to(precision)).where(~moved, moves.sum(dim=1, keepdim=True))  # (N, M)
    in_both = (stayed @ (same_cluster & same_class).to(precision)).where(~moved, moves @ same_class.to(precision))
    return disagreement(same_class.sum(dim=1), in_cluster, in_both)


def disagreement(in_class: Tensor, in_cluster: Tensor, in_both: Tensor) -> Tensor:
    """Delta = 1 - NMI from how many images share the class (M,), the cluster, and both (..., M) with each -> (...).

    A single cluster tells nothing, NMI = 0, unless there also is but a single class, NMI = 1.
    """
    in_class, in_cluster, in_both = in_class.double(), in_cluster.double(), in_both.double()
    images = len(in_class)
    information = (images * in_both / (in_class * in_cluster)).log().mean(dim=-1)
    class_entropy, cluster_entropy = (images / in_class).log().mean(dim=-1), (images / in_cluster).log().mean(dim=-1)
    scale = (class_entropy * cluster_entropy).sqrt()
    agreement = (information / scale).where(scale > 0, (class_entropy == cluster_entropy).double())
    return (1 - agreement).clamp(0, 1)
