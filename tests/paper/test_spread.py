"""The measures of how samples and links develop."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from proxygml.losses.proxygml.module import ProxyGMLLoss
from proxygml.paper.spread import mean_cosine, spread


def test_mean_cosine_is_that_of_all_pairs() -> None:
    vectors = F.normalize(torch.randn(2, 5, 3, dtype=torch.float64), dim=2)
    for group, mean in zip(vectors, mean_cosine(vectors), strict=True):
        pairs = [group[i] @ group[j] for i in range(5) for j in range(5) if i != j]
        assert mean.item() == pytest.approx(np.mean(pairs), abs=1e-12)


def test_links_are_counted_by_class() -> None:
    loss = ProxyGMLLoss(3, 2, proxies_per_class=2, links=4, proxy_weight=0)
    loss.proxies.data = torch.tensor([[[1.0, 0], [1, 0.1]], [[0, 1], [0.1, 1]], [[-1, 0], [-1, 0.1]]])
    vectors = F.normalize(torch.tensor([[1.0, 0.05], [0.0, 1.0], [1.0, 1.0]]), dim=1)
    labels = torch.tensor([0, 2, 1])
    found = spread(vectors, labels, loss)
    # Each is linked to both proxies of its class; the other two links go to the nearest, of classes 1, 1 and 0.
    assert found["classes"] == 2
    own = [F.normalize(pair, dim=1).prod(dim=0).sum().item() for pair in loss.proxies.data]
    assert found["proxies"] == pytest.approx(np.mean(own), abs=1e-6)
    pairs = [(vectors[i] @ vectors[j]).item() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert found["samples"] == pytest.approx(np.mean(pairs), abs=1e-6)
