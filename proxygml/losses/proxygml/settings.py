"""The options of the ProxyGML loss, shared by its implementations and by the Recipe of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral

ABOVE_ANY_COSINE = 4.0  # cosines differ by at most 2, so with this bonus every positive proxy ranks first


@dataclass(frozen=True)
class ProxyGMLSettings:
    """Options with the paper's defaults."""

    proxies_per_class: int = 12
    """N."""
    ratio: float = 0.05
    """r: link each sample to this fraction of all proxies."""
    links: int | None = None
    """k, instead of a ratio."""
    proxy_weight: float = 0.3
    """Lambda, the weight of the proxy regularizer."""
    positive_mask: bool = True
    """S^pos: link all proxies of the sample's own class first."""
    literal_mask: bool = False
    """Rank with the +1 of Eq. 3, which does not always put positives first."""
    mask_softmax: bool = True
    """M: exclude classes without a link from the softmax."""
    scale: float = 1.0
    """Factor of the scores in the softmax over samples; 1 in the paper."""
    sparse_gradient: bool = False
    """Update linked proxies only, faster with very many classes; for adam and a proxy_weight of 0."""
    proxy_rows: int | None = None
    """Number of random proxies to classify in the regularizer; None: all."""

    def __post_init__(self) -> None:
        for name in ("proxies_per_class", "links", "proxy_rows"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or value < 1):
                raise ValueError(f"expected {name} as a whole number of at least 1, got {value}")
        for name, paper in (("ratio", 0.05), ("scale", 1)):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"expected a {name} above 0 (the paper's is {paper}), got {getattr(self, name)}")
        if not 0 <= self.proxy_weight < math.inf:
            raise ValueError(f"expected a proxy_weight of at least 0 (the paper's is 0.3), got {self.proxy_weight}")
        if self.sparse_gradient and self.proxy_weight > 0:
            raise ValueError("sparse_gradient needs proxy_weight=0: the regularizer has a gradient in every proxy")

    @property
    def positive_bonus(self) -> float:
        """S^pos, added to the cosines of positive proxies for ranking."""
        return 0.0 if not self.positive_mask else 1.0 if self.literal_mask else ABOVE_ANY_COSINE

    @property
    def extends_definition(self) -> bool:
        """Whether an option is set that `proxygml_loss` does not have."""
        return self.sparse_gradient or self.proxy_rows is not None

    def links_for(self, num_classes: int) -> int:
        """k = links or ceil(r C N), at most C N."""
        if self.links is None:
            return choose_links(num_classes, self.proxies_per_class, self.ratio)
        return min(self.links, num_classes * self.proxies_per_class)


def choose_links(num_classes: int, proxies_per_class: int, ratio: float) -> int:
    """k = ceil(r C N), at least 1 and at most C N."""
    proxies = num_classes * proxies_per_class
    # 0.07 * 100 * 12 is 84.00000000000001 in floating point; without the epsilon its ceiling would be 85.
    return min(proxies, max(1, math.ceil(ratio * proxies - 1e-9)))


def nested_widths(prefixes: Sequence[int], embedding_dim: int) -> tuple[int, ...]:
    """Widths of nested embeddings: of their prefixes, and of the whole; an error unless they ascend."""
    widths = (*prefixes, embedding_dim)
    if not prefixes or prefixes[0] < 1 or any(left >= right for left, right in pairwise(widths)):
        expected = f"ascending dimensions from 1 to below embedding_dim {embedding_dim}"
        raise ValueError(f"expected nested as {expected}, got {' '.join(map(str, prefixes)) or 'none'}")
    return widths
