"""DAMLRRM, deep asymmetric metric learning via rich relationship mining (Xu et al., CVPR 2019): a reconstruction.

We had only the abstract of the paper and one quoted sentence, and no code. They say: batches come from two data
streams, with different structure and length; in each class, a spanning tree of minimum visual distance replaces all
positive pairs; another loss takes the pairs. Everything else is reconstructed, and results are not the authors':
squared distances of unit vectors as the visual distance, negatives across the streams, multi-similarity as the default
loss, and 24 of 32 images in the structured stream.
"""

import torch
from pytorch_metric_learning import distances, losses
from scipy.sparse import coo_array
from scipy.sparse.csgraph import minimum_spanning_tree
from torch import Tensor, nn

from proxygml.losses.interface import full_precision, normalized, require_not_negative, require_whole

BASES = ("liftedstruct", "contrastive", "ms")


class DAMLRRMLoss(nn.Module):
    """`loss(embeddings, labels)`: embeddings (B, D) of any norm, integer labels (B,) in 0..C-1 -> scalar.

    A reconstruction of the method: see the top of this file. The first round(`structured_fraction` * B) rows of a batch
    are its structured stream (several images of each class), the rest its unstructured stream (shuffled). `base` is the
    loss of the pairs: liftedstruct (Euclidean distances), contrastive (squared) or ms (cosines, no miner); `margin` is
    for the first two. A batch without positives or without negatives costs 0.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        base: str = "ms",
        structured_fraction: float = 0.75,
        margin: float = 1.0,
    ) -> None:
        super().__init__()
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim)
        require_not_negative(margin=margin)
        if not 0 < structured_fraction <= 1:
            raise ValueError(f"expected a structured_fraction above 0 and up to 1, got {structured_fraction}")
        self.num_classes, self.embedding_dim = num_classes, embedding_dim
        self.structured_fraction = structured_fraction
        self.base = base_loss(base, margin)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        with full_precision(self, embeddings, labels) as (embeddings, labels):
            samples = normalized(embeddings)  # (B, D)
            fixed = samples.detach()
            squared = torch.cdist(fixed, fixed, compute_mode="donot_use_mm_for_euclid_dist").square()  # (B, B)
            start, end = spanning_trees(squared, labels)  # (E,), (E,)
            anchors, negatives = negative_pairs(labels, round(self.structured_fraction * len(labels)))
            if len(start) == 0 or len(anchors) == 0:  # some bases would only push all images apart, or together
                return 0 * samples.sum()
            pairs = (torch.cat([start, end]), torch.cat([end, start]), anchors, negatives)  # positives in both orders
            return self.base(samples, labels, pairs)

    def extra_repr(self) -> str:
        return f"structured_fraction={self.structured_fraction}"


def base_loss(name: str, margin: float) -> nn.Module:
    """A loss of pytorch-metric-learning on pairs of unit vectors, `loss(embeddings, labels, pairs)`."""
    if name == "liftedstruct":
        return losses.LiftedStructureLoss(neg_margin=margin, pos_margin=0)
    if name == "contrastive":
        return losses.ContrastiveLoss(neg_margin=margin, pos_margin=0, distance=distances.LpDistance(power=2))
    if name == "ms":
        return losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)
    raise ValueError(f"expected a base among {', '.join(BASES)}, got {name!r}")


def spanning_trees(distances: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Edges of the minimum spanning tree of every class: distances (B, B), labels (B,) -> ends (E,), (E,).

    A class of n images has n - 1 edges, each once.
    """
    start, end = (labels[:, None] == labels).triu(diagonal=1).nonzero(as_tuple=True)  # pairs within a class
    # scipy ignores edges of weight 0 (equal embeddings). Adding 1 to every weight changes no tree, since all spanning
    # trees of a class have the same number of edges.
    weights = distances[start, end].double() + 1
    graph = coo_array((weights.cpu().numpy(), (start.cpu().numpy(), end.cpu().numpy())), shape=distances.shape)
    forest = minimum_spanning_tree(graph.tocsr()).tocoo()
    return torch.from_numpy(forest.row).to(labels), torch.from_numpy(forest.col).to(labels)


def negative_pairs(labels: Tensor, structured: int) -> tuple[Tensor, Tensor]:
    """Pairs of different classes across the streams, in both orders: labels (B,) -> anchors, negatives, both (pairs,).

    The first `structured` rows are one stream, the rest the other. An anchor without such a pair is paired with all
    images of other classes.
    """
    streams = torch.arange(len(labels), device=labels.device) < structured  # (B,)
    different = labels[:, None] != labels  # (B, B)
    across = different & (streams[:, None] != streams)
    anchors, negatives = across.where(across.any(dim=1, keepdim=True), different).nonzero(as_tuple=True)
    return anchors, negatives
