"""ProxyGML with more ingredients: without them the paper's loss, with each of them what loops compute."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from proxygml import proxygml_loss
from proxygml.losses.plus import ProxyGMLPlusLoss

LABELS = torch.tensor([0, 3, 3, 5])
COMMON = {"proxies_per_class": 3, "links": 7}


def make(**settings) -> tuple[ProxyGMLPlusLoss, Tensor]:
    """The loss of six classes, and embeddings (4, 8)."""
    torch.manual_seed(0)
    loss = ProxyGMLPlusLoss(6, 8, **COMMON | settings).double()
    return loss, torch.randn(4, 8, dtype=torch.float64, requires_grad=True)


def linked_cosines(loss: ProxyGMLPlusLoss, embeddings: Tensor) -> list[dict[int, list[float]]]:
    """The cosines of each sample's links by class, by sorting."""
    proxies, samples = F.normalize(loss.proxies.detach(), dim=2), F.normalize(embeddings.detach(), dim=1)
    found = []
    for sample, label in zip(samples, LABELS.tolist(), strict=True):
        cosines = [(c, (sample @ proxy).item()) for c, own in enumerate(proxies) for proxy in own]
        cosines.sort(key=lambda pair: (pair[0] != label, -pair[1]))
        by_class: dict[int, list[float]] = {}
        for c, cosine in cosines[: loss.links]:
            by_class.setdefault(c, []).append(cosine)
        found.append(by_class)
    return found


@pytest.mark.parametrize("settings", [{}, {"proxy_weight": 0.0}, {"scale": 3.0, "links": 18}])
def test_without_ingredients_it_is_the_paper(settings: dict) -> None:
    loss, embeddings = make(**settings)
    known = {"links": loss.links, "proxy_weight": loss.settings.proxy_weight, "scale": loss.settings.scale}
    value, expected = loss(embeddings, LABELS), proxygml_loss(embeddings, LABELS, loss.proxies, **known)
    torch.testing.assert_close(value, expected)
    inputs = embeddings, loss.proxies
    torch.testing.assert_close(torch.autograd.grad(value, inputs), torch.autograd.grad(expected, inputs))


def weighted(cosines: list[float], temperature: float) -> float:
    weights = [math.exp(cosine / temperature) for cosine in cosines]
    return sum(weight * cosine for weight, cosine in zip(weights, cosines, strict=True)) / sum(weights)


AGGREGATES = {"sum": sum, "mean": lambda cosines: sum(cosines) / len(cosines), "softmax": lambda c: weighted(c, 0.3)}


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("decay", [0.0, 1.5])
def test_scores_are_those_of_loops(aggregate: str, decay: float) -> None:
    loss, embeddings = make(
        aggregate=aggregate, temperature=0.3, margin=0.1, scale=5.0, decay=decay, radius=0.9, proxy_weight=0.0
    )

    def worth(cosine: float) -> float:
        return (0.9 / max(0.9, math.sqrt(2 - 2 * cosine))) ** decay if decay else cosine

    total = 0.0
    for label, by_class in zip(LABELS.tolist(), linked_cosines(loss, embeddings), strict=True):
        scores = {c: AGGREGATES[aggregate]([worth(cosine) for cosine in own]) for c, own in by_class.items()}
        scores[label] -= 0.1
        total += math.log(sum(math.exp(5 * score) for score in scores.values())) - 5 * scores[label]
    assert loss(embeddings, LABELS).item() == pytest.approx(total / 4)


def test_anchors_see_only_their_links() -> None:
    loss, embeddings = make(anchor=True, scale=8.0, margin=0.1, proxy_weight=0.0)
    proxies, samples = F.normalize(loss.proxies.detach(), dim=2), F.normalize(embeddings.detach(), dim=1)
    cosines = linked_cosines(loss, embeddings)
    pulls, pushes = [], []
    for c in range(6):
        for proxy in proxies[c]:
            pull = push = 0.0
            for sample, label, links in zip(samples, LABELS.tolist(), cosines, strict=True):
                cosine = (sample @ proxy).item()
                if any(abs(cosine - each) < 1e-12 for each in links.get(c, ())):
                    pull += math.exp(8 * (0.1 - cosine)) * (label == c)
                    push += math.exp(8 * (0.1 + cosine)) * (label != c)
            pulls += [math.log(1 + pull)] * (c in LABELS)
            pushes.append(math.log(1 + push))
    expected = sum(pulls) / len(pulls) + sum(pushes) / len(pushes)
    assert loss(embeddings, LABELS).item() == pytest.approx(expected)


def test_noise_is_for_training() -> None:
    loss, embeddings = make(noise=0.5)
    noisy = {loss(embeddings, LABELS).item() for _ in range(3)}
    assert len(noisy) == 3
    loss.eval()
    expected = proxygml_loss(embeddings, LABELS, loss.proxies, links=loss.links)
    torch.testing.assert_close(loss(embeddings, LABELS), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregate": "max"}, "expected aggregate as sum, mean or softmax, got 'max'"),
        ({"temperature": 0.0}, "expected temperature above 0"),
        ({"noise": -1.0}, "expected noise of at least 0"),
    ],
)
def test_wrong_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)
