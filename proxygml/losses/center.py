"""Center loss: softmax and the distance to the center of the own class (Wen et al., ECCV 2016).

c is `centers` (C, D), moved by each batch and not by a gradient; W and b are `classifier`; lambda is `center_weight`;
alpha is `center_rate`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.losses.interface import check_magnitude, full_precision, require_not_negative, require_whole


class CenterLoss(nn.Module):
    """`loss(embeddings, labels)`: unnormalized embeddings (B, D), integer labels (B,) in 0..C-1 -> scalar.

    Softmax and distances are both means over the batch; the paper sums both (from memory), which is B times as much.
    Centers start at 0 and move with every batch while the module is in training mode.
    """

    centers: Tensor

    def __init__(
        self, num_classes: int, embedding_dim: int, *, center_weight: float = 0.003, center_rate: float = 0.5
    ) -> None:
        super().__init__()
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim)
        require_not_negative(center_weight=center_weight, center_rate=center_rate)
        self.num_classes, self.embedding_dim = num_classes, embedding_dim
        self.center_weight, self.center_rate = center_weight, center_rate
        self.classifier = nn.Linear(embedding_dim, num_classes)
        self.register_buffer("centers", torch.zeros(num_classes, embedding_dim))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        with full_precision(self, embeddings, labels) as (embeddings, labels):
            check_magnitude(embeddings)
            logits = F.linear(embeddings, *(weights.to(embeddings.dtype) for weights in self.classifier.parameters()))
            distance = (embeddings - self.centers[labels].to(embeddings.dtype)).square().sum(dim=1)  # (B,)
            loss = F.cross_entropy(logits, labels) + self.center_weight * distance.mean() / 2
        if self.training:
            step = center_step(self.centers, embeddings.detach().to(self.centers.dtype), labels)
            self.centers -= self.center_rate * step
        return loss

    def extra_repr(self) -> str:
        return f"center_weight={self.center_weight}, center_rate={self.center_rate}"


def center_step(centers: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Σ (c_j - x_i) / (1 + n_j) over the n_j images of each class j: centers (C, D), (B, D), (B,) -> (C, D)."""
    counts = labels.bincount(minlength=len(centers))[:, None]  # (C, 1)
    sums = torch.zeros_like(centers).index_add_(0, labels, embeddings)  # (C, D)
    return (counts * centers - sums) / (1 + counts)
