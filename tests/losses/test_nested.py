"""Nested embeddings: the mean of the loss over prefixes, and what is refused."""

import pytest
import torch

from proxygml import ProxyGMLLoss, ProxyGMLSettings, proxygml_loss
from proxygml.losses.nested import NestedProxyGMLLoss

LABELS = torch.tensor([0, 3, 3, 5])
SETTINGS = ProxyGMLSettings(proxies_per_class=2, links=5, scale=2.0)


def make(dim: int = 8, prefixes: tuple[int, ...] = (2, 5), settings: ProxyGMLSettings = SETTINGS):
    """The loss of six classes, and embeddings (4, dim)."""
    torch.manual_seed(0)
    loss = NestedProxyGMLLoss(6, dim, prefixes, settings).double()
    return loss, torch.randn(4, dim, dtype=torch.float64, requires_grad=True)


def test_is_the_mean_of_the_definition_on_prefixes() -> None:
    loss, embeddings = make()
    inputs = embeddings, loss.proxies
    expected = sum(
        proxygml_loss(embeddings[:, :width], LABELS, loss.proxies[:, :, :width], links=5, scale=2.0) / 3
        for width in (2, 5, 8)
    )
    value = loss(embeddings, LABELS)
    torch.testing.assert_close(value, expected)
    found = torch.autograd.grad(value, inputs)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs))
    torch.testing.assert_close(torch.func.grad(loss)(embeddings.detach(), LABELS), found[0])


@pytest.mark.parametrize("proxy_weight", [0.0, 0.3])
def test_terms_are_means_of_those_of_plain_losses(proxy_weight: float) -> None:
    loss, embeddings = make(settings=ProxyGMLSettings(proxies_per_class=2, links=5, proxy_weight=proxy_weight))
    loss(embeddings, LABELS)
    terms = []
    for width in loss.widths:
        plain = ProxyGMLLoss(6, width, proxies_per_class=2, links=5, proxy_weight=proxy_weight).double()
        plain.proxies.data = loss.proxies.data[:, :, :width]
        plain(embeddings[:, :width], LABELS)
        terms.append(plain.last_terms)
    for found, parts in zip(loss.last_terms, zip(*terms, strict=True), strict=True):
        assert found is None if parts[0] is None else found.item() == pytest.approx(sum(parts).item() / 3)


def test_links_may_change_as_with_a_start_ratio() -> None:
    loss, embeddings = make()
    before = loss(embeddings, LABELS).item()
    loss.links = 12
    assert loss(embeddings, LABELS).item() != before


@pytest.mark.parametrize("prefixes", [(), (0, 4), (4, 4), (4, 2), (8,), (4, 9)])
def test_prefixes_must_ascend_below_the_whole(prefixes: tuple[int, ...]) -> None:
    got = " ".join(map(str, prefixes)) or "none"
    with pytest.raises(ValueError, match=f"ascending dimensions from 1 to below embedding_dim 8, got {got}$"):
        NestedProxyGMLLoss(6, 8, prefixes)


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="no sparse_gradient"):
        NestedProxyGMLLoss(6, 8, (4,), ProxyGMLSettings(sparse_gradient=True, proxy_weight=0.0))


def test_wider_embeddings_are_refused() -> None:
    loss, _ = make()
    with pytest.raises(ValueError, match=r"expected embeddings of shape \(batch, 8\), got \(4, 9\)"):
        loss(torch.randn(4, 9), LABELS)
