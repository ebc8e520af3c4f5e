"""The clustering loss with facility location and an NMI margin (Oh Song et al., CVPR 2017).

The loss searches for a wrong clustering with a high score and makes the true classes beat it by a margin.
The paper's symbols and our names:

    X, Y       embeddings (M, D), labels (M,)    the batch, with |Y| classes (M is our B)
    S          medoids (|Y|,)                    indices of the cluster centers among the images
    D          distances (M, M)                  Euclidean, not squared
    F(S)       -                                 facility energy, -sum_i min_{j in S} D_ij
    F~         -                                 energy of the true classes, each around its best medoid
    g(S)       clusters (M,)                     position in S of the nearest medoid of each image
    Delta      disagreement                      1 - NMI(g(S), Y), with the geometric mean of the entropies
    A(S)       -                                 F(S) + gamma Delta(g(S), Y), maximized by the search

NMI is a mean over images: with n(j) the number of images that share the class, the cluster or both with image j, the
entropy H is mean_j log(M / n(j)) and the mutual information mean_j log(M n_both(j) / (n_class(j) n_cluster(j))). The
contingency tables of all candidates for a medoid are products of (candidates, M) and (M, M) matrices.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from proxygml.losses.interface import check_magnitude, full_precision, require_not_negative, require_whole


class Terms(NamedTuple):
    """Terms of the last loss, max(0, energy_gap + gamma disagreement), without gradient, for logs."""

    energy_gap: Tensor  # F(S) - F~
    disagreement: Tensor  # Delta


class ClusteringLoss(nn.Module):
    """`loss(embeddings, labels)`: embeddings (B, D), integer labels (B,) in 0..C-1 -> scalar, a sum over the batch.

    Embeddings are not normalized here; in the paper they are unit vectors, in shuffled batches of about 128. The search
    for medoids is discrete (greedy, then `sweeps` of PAM) and runs on the CPU. Only distances to medoids have a
    gradient, since Delta is a constant. A batch of one class, or with every class once, costs 0.

    The weight of Delta is `gamma` times `gamma_decay` to the power of the epoch, set by `begin_epoch`. We do not have
    the paper's values: the decay is from memory, and 10 is another implementation's initial value.
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
        self.gamma = gamma  # in the current epoch
        self.last_terms: Terms | None = None

    def begin_epoch(self, epoch: int, embed: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Set gamma for an epoch, counted from 0."""
        self.gamma = self.first_gamma * self.gamma_decay**epoch

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        with full_precision(self, embeddings, labels) as (samples, labels):  # (M, D), (M,)
            check_magnitude(samples)
            labels, fixed = labels.cpu(), samples.detach()
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
    """Euclidean distance of each row: (M, D), (M, D) -> (M,); the epsilon keeps its gradient finite at 0."""
    return ((points - others).square().sum(dim=1) + 1e-12).sqrt()


def class_medoids(distances: Tensor, same_class: Tensor) -> Tensor:
    """The best medoid of each image's own class: distances (M, M), same_class (M, M) -> indices (M,)."""
    cost = distances.where(same_class, 0).sum(dim=0)  # (M,): sum_{i in c} D_ij for a medoid j of class c
    return cost.where(same_class, torch.inf).argmin(dim=1)


def greedy_medoids(distances: Tensor, same_class: Tensor, count: int, gamma: float) -> Tensor:
    """Medoids added one by one, each with the largest A(S) -> indices (count,)."""
    # Delta of a single cluster is the same for every medoid, so F alone chooses the first.
    medoids = distances.sum(dim=0).argmin()[None]
    candidates = torch.arange(len(distances))
    for _ in range(count - 1):
        nearest = distances[:, medoids].amin(dim=1)  # (M,)
        energy = -distances.minimum(nearest[:, None]).sum(dim=0)  # (M,): F(S + {i}) of every candidate i
        score = energy + gamma * disagreement_with(distances, same_class, medoids, candidates)
        score[medoids] = -torch.inf
        medoids = torch.cat([medoids, score.argmax()[None]])
    return medoids


def refined_medoids(distances: Tensor, same_class: Tensor, medoids: Tensor, gamma: float, sweeps: int) -> Tensor:
    """PAM: in each sweep, every cluster in turn takes the member with the largest A as its medoid."""
    for _ in range(sweeps if len(medoids) > 1 else 0):
        before = medoids
        clusters = assign(distances, medoids)  # fixed during the sweep
        for position in (clusters.bincount() > 1).nonzero()[:, 0].tolist():  # a single image stays its own medoid
            members = (clusters == position).nonzero()[:, 0]
            energy = -distances[members[:, None], members].sum(dim=0)
            others = torch.cat([medoids[:position], medoids[position + 1 :]])
            score = energy + gamma * disagreement_with(distances, same_class, others, members)
            medoids = medoids.index_fill(0, torch.tensor(position), members[score.argmax()])
        if medoids.equal(before):
            break
    return medoids


def assign(distances: Tensor, medoids: Tensor) -> Tensor:
    """g(S): position in medoids (K,) of the nearest one of each image -> (M,). A medoid is its own nearest."""
    clusters = distances[:, medoids].argmin(dim=1)
    clusters[medoids] = torch.arange(len(medoids))  # also if another medoid has distance 0
    return clusters


def disagreement_of(same_class: Tensor, clusters: Tensor) -> Tensor:
    """Delta of classes and clusters: same_class (M, M), clusters (M,) -> scalar."""
    same_cluster = clusters[:, None] == clusters  # (M, M)
    return disagreement(same_class.sum(dim=1), same_cluster.sum(dim=1), (same_class & same_cluster).sum(dim=1))


def disagreement_with(distances: Tensor, same_class: Tensor, medoids: Tensor, candidates: Tensor) -> Tensor:
    """Delta(g(S + {i}), Y) of medoids S (K,) with each of the candidates i (N,), one at a time -> (N,)."""
    clusters = assign(distances, medoids)  # (M,), without a candidate
    nearest = distances[:, medoids].amin(dim=1)  # (M,)
    moved = distances[candidates] < nearest  # (N, M): images nearer to the candidate; medoids have distance 0
    moved[torch.arange(len(candidates)), candidates] = True

    precision = torch.float32  # exact for counts, and faster
    stayed, moves = (~moved).to(precision), moved.to(precision)
    same_cluster = clusters[:, None] == clusters  # (M, M)
    in_cluster = (stayed @ same_cluster.to(precision)).where(~moved, moves.sum(dim=1, keepdim=True))  # (N, M)
    in_both = (stayed @ (same_cluster & same_class).to(precision)).where(~moved, moves @ same_class.to(precision))
    return disagreement(same_class.sum(dim=1), in_cluster, in_both)


def disagreement(in_class: Tensor, in_cluster: Tensor, in_both: Tensor) -> Tensor:
    """Delta = 1 - NMI from the numbers of images that share the class (M,), the cluster and both (..., M) with each.

    The NMI of a single cluster is 0, or 1 if there is also a single class.
    """
    in_class, in_cluster, in_both = in_class.double(), in_cluster.double(), in_both.double()
    images = len(in_class)
    information = (images * in_both / (in_class * in_cluster)).log().mean(dim=-1)
    class_entropy, cluster_entropy = (images / in_class).log().mean(dim=-1), (images / in_cluster).log().mean(dim=-1)
    scale = (class_entropy * cluster_entropy).sqrt()
    agreement = (information / scale).where(scale > 0, (class_entropy == cluster_entropy).double())
    return (1 - agreement).clamp(0, 1)
