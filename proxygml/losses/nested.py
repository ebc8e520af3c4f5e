"""ProxyGML on nested embeddings, whose first dimensions are an embedding of their own.

After Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022; not in the ProxyGML paper.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from proxygml.losses.interface import checked_shapes
from proxygml.losses.proxygml.gradients import Terms
from proxygml.losses.proxygml.module import ProxyGMLLoss
from proxygml.losses.proxygml.settings import ProxyGMLSettings, nested_widths


class NestedProxyGMLLoss(ProxyGMLLoss):
    """`loss(embeddings, labels)`: the mean of `ProxyGMLLoss` over prefixes of embeddings (B, D) and proxies (C, N, D).

    `prefixes` are the ascending dimensions of the shorter embeddings; the whole, of `embedding_dim`, counts too. Each
    is normalized and linked to proxies on its own. `last_terms` contains means too.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        prefixes: Sequence[int],
        settings: ProxyGMLSettings = ProxyGMLSettings(),  # noqa: B008  # it is frozen
    ) -> None:
        self.widths = nested_widths(prefixes, embedding_dim)
        if settings.sparse_gradient:
            raise ValueError("nested embeddings have no sparse_gradient: set it to False")
        super().__init__(num_classes, embedding_dim, **asdict(settings))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]  # no library calls it
        """The mean loss of a batch over all widths."""
        labels = checked_shapes(embeddings, labels, self.widths[-1])
        parts = [self._loss(embeddings[:, :width], labels, self.proxies[:, :, :width]) for width in self.widths]
        terms = [terms for _, terms in parts if terms is not None]
        if terms:
            self.last_terms = Terms(*map(_mean, zip(*terms, strict=True)))
        return _mean([loss for loss, _ in parts])

    def extra_repr(self) -> str:
        return f"widths={self.widths}, {super().extra_repr()}"


def _mean(values: Sequence[Any]) -> Any:
    """The mean of scalar tensors; None if they are None, as L^p without its weight."""
    return None if values[0] is None else torch.stack(tuple(values)).mean()
