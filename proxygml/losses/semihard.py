"""Semi-hard triplets as in TensorFlow's contrib package, which pytorch-metric-learning does not have.

FaceNet's loss (Schroff et al., CVPR 2015). That published "SemiHard" rows come from this variant is from memory.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn


class NearestSemihardLoss(nn.Module):
    """[d²(a, p) - d²(a, n) + margin]_+, mean over all ordered positive pairs (a, p), also where it is 0.

    n is the nearest negative that is farther from a than p is. If there is none, it is the farthest negative.
    """

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        samples = F.normalize(embeddings, dim=1)  # (B, D)
        distance = 2 - 2 * samples @ samples.T  # (B, B): squared
        negative = labels[:, None] != labels  # (B, B)
        farther = distance[:, None, :] > distance[:, :, None]  # (B, B, B): anchor, positive, negative
        candidates = distance[:, None, :].masked_fill(~(negative[:, None, :] & farther), math.inf)  # (B, B, B)
        nearest = candidates.amin(dim=2)  # (B, B): infinite if no negative is farther
        farthest = distance.masked_fill(~negative, -math.inf).amax(dim=1, keepdim=True)  # (B, 1)
        violation = distance - nearest.where(nearest.isfinite(), farthest) + self.margin  # (B, B)
        pairs = ~negative & negative.any(dim=1, keepdim=True)  # (B, B)
        hinges = violation[pairs.fill_diagonal_(False)].relu()  # (ordered positive pairs,)
        return hinges.sum() / max(len(hinges), 1)
