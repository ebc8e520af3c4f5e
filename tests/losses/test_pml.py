"""The library's losses and center loss against cases done by hand, loops written from the formulas, and each other."""

import inspect
import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import miners
from torch import Tensor, nn

from proxygml import ProxyGMLLoss
from proxygml.losses import pml
from proxygml.losses.center import CenterLoss
from tests.losses.test_every_loss import CLASSES, DIMENSION, overlapping_classes, value_and_gradients

MADE = {  # name of a case: what makes it, its settings
    "semihard": (pml.semihard, {}),
    "semihard nearest": (pml.semihard, {"variant": "nearest"}),
    "triplet": (pml.triplet, {}),
    "triplet hard": (pml.triplet, {"variant": "hard"}),
    "contrastive": (pml.contrastive, {}),
    "contrastive cosine": (pml.contrastive, {"variant": "cosine"}),
    "liftedstruct": (pml.liftedstruct, {}),
    "n_pair": (pml.n_pair, {}),
    "ms": (pml.ms, {}),
    "margin": (pml.margin, {}),
    "proxy_nca": (pml.proxy_nca, {}),
    "proxy_nca excluding": (pml.proxy_nca, {"exclude_positive": True}),
    "softtriple": (pml.softtriple, {"centers_per_class": 3}),
    "proxy_anchor": (pml.proxy_anchor, {}),
    "norm_softmax": (pml.norm_softmax, {}),
    "cosface": (pml.cosface, {}),
    "am_softmax": (pml.am_softmax, {}),
    "arcface": (pml.arcface, {}),
    "subcenter_arcface": (pml.subcenter_arcface, {}),
    "l_softmax": (pml.l_softmax, {}),
    "center": (CenterLoss, {}),
}

every_loss = pytest.mark.parametrize("name", MADE)


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


def made(name: str, num_classes: int = CLASSES, embedding_dim: int = DIMENSION) -> nn.Module:
    maker, settings = MADE[name]
    return maker(num_classes, embedding_dim, **settings)


def without_chance(loss: nn.Module) -> nn.Module:
    """The loss over all triplets where it would draw some."""
    if isinstance(getattr(loss, "miner", None), miners.DistanceWeightedMiner):
        loss.miner = None
    return loss


def set_weights(loss: nn.Module, weights: Tensor) -> nn.Module:
    """The loss in double precision, its only parameter set: one row for each class or center."""
    loss = loss.double()
    (parameter,) = loss.parameters()
    with torch.no_grad():
        parameter.copy_(weights if weights.shape == parameter.shape else weights.T)
    return loss


def on_circle(*degrees: float) -> Tensor:
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return overlapping_classes()


EYE = torch.eye(2, dtype=torch.float64)
FIRST = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
ZERO = torch.tensor([0])


class TestTheCasesDoneByHand:
    @pytest.mark.parametrize(("variant", "expected"), [("all", 0.1062533), ("nearest", 0.0531266)])
    def test_semihard(self, variant: str, expected: float) -> None:
        value = pml.semihard(2, 2, variant=variant)(on_circle(0, 30, 65), torch.tensor([0, 0, 1]))
        assert value.item() == pytest.approx(expected, abs=1e-7)

    def test_nearest_semihard_falls_back_to_farthest(self) -> None:
        embeddings, labels = on_circle(0, 90, 20, 40), torch.tensor([0, 0, 1, 2])
        # Anchor 0: d² is 2 to the positive, negatives are nearer, the farther one at 40°. Anchor 1: at 70°.
        hinges = [2 - (2 - 2 * math.cos(math.radians(angle))) + 0.2 for angle in (40, 70)]
        value = pml.semihard(3, 2, variant="nearest")(embeddings, labels)
        assert value.item() == pytest.approx(sum(hinges) / 2, abs=1e-12)

    def test_liftedstruct(self) -> None:
        points, labels = torch.tensor([[0.0], [1.0], [3.0]]).double(), torch.tensor([0, 0, 1])
        loss = pml.liftedstruct(2, 1)
        assert loss(points, labels).item() == pytest.approx(0.0490664, abs=1e-7)
        assert loss(points, labels).item() == pytest.approx((math.log(math.exp(-2) + math.exp(-1)) + 1) ** 2 / 2)
        points[2] = 1e4
        assert loss(points, labels).item() == 0

    def test_n_pair(self) -> None:
        embeddings, labels = torch.cat([EYE, EYE]), torch.tensor([0, 1, 0, 1])
        value = pml.n_pair(2, 2, regularization_weight=0)(embeddings, labels)
        assert (
            value.item() == pytest.approx(math.log(1 + math.exp(-1)), abs=1e-12) == pytest.approx(0.3132617, abs=1e-7)
        )

    def test_n_pair_has_tensorflows_regularizer(self) -> None:
        anchors, positives = torch.randn(2, 5, 3, dtype=torch.float64)
        embeddings, labels = torch.cat([anchors, positives]), torch.arange(5).repeat(2)
        extra = pml.n_pair(5, 3, regularization_weight=0.02)(embeddings, labels)
        extra = extra - pml.n_pair(5, 3, regularization_weight=0)(embeddings, labels)
        lengths = anchors.square().sum(dim=1).mean() + positives.square().sum(dim=1).mean()
        torch.testing.assert_close(extra, 0.25 * 0.02 * lengths)

    @pytest.mark.parametrize(("exclude_positive", "expected"), [(True, -2), (False, math.log(1 + math.exp(-2)))])
    def test_proxy_nca(self, exclude_positive: bool, expected: float) -> None:
        loss = set_weights(pml.proxy_nca(2, 2, softmax_scale=1, exclude_positive=exclude_positive), EYE)
        assert loss(FIRST, ZERO).item() == pytest.approx(expected, abs=1e-12)

    def test_softtriple(self) -> None:
        loss = pml.softtriple(2, 2, centers_per_class=2, regularization_weight=0)
        loss = set_weights(loss, on_circle(0, 180, 90, 270))
        assert loss(on_circle(30), ZERO).item() == pytest.approx(8.07297e-4, abs=1e-9)

    def test_softtriples_regularizer(self) -> None:
        centers, sample = on_circle(0, 90, 180, 270), on_circle(10)
        with_it, without = (
            set_weights(pml.softtriple(2, 2, centers_per_class=2, regularization_weight=weight), centers)
            for weight in (0.2, 0)
        )
        extra = (with_it(sample, ZERO) - without(sample, ZERO)).item()
        assert extra == pytest.approx(0.2 * 2 * math.sqrt(2 + 1e-5) / 4, abs=1e-12)
        assert extra == pytest.approx(0.1414214, abs=5e-7)

    def test_ms(self) -> None:
        embeddings = torch.tensor([[1, 0], [0.8, 0.6], [0.6, 0.8], [0, 1]], dtype=torch.float64)
        value = pml.ms(2, 2)(embeddings, torch.tensor([0, 0, 1, 1]))
        expected = 2 * (math.log(1 + math.exp(-0.6)) / 2 + math.log(1 + math.exp(23)) / 50) / 4
        assert value.item() == pytest.approx(expected, abs=1e-12) == pytest.approx(0.3393720, abs=1e-7)

    def test_ms_with_one_pair_of_each_kind(self) -> None:
        """The library alone gives 0 here."""
        degrees = [0, math.degrees(math.acos(0.8)), -math.degrees(math.acos(0.75))]
        value = pml.ms(2, 2)(on_circle(*degrees), torch.tensor([0, 0, 1]))
        expected = (math.log(1 + math.exp(-0.6)) / 2 + math.log(1 + math.exp(12.5)) / 50) / 3  # of the first anchor
        assert value.item() == pytest.approx(expected, abs=1e-12)

    def test_margin(self) -> None:
        embeddings, labels = on_circle(0, 90, 60), torch.tensor([0, 0, 1])
        loss = pml.margin(2, 2).double()
        only = tuple(torch.tensor([index]) for index in (0, 1, 2))
        value = loss.loss(embeddings, labels, only)
        assert value.item() == pytest.approx(((math.sqrt(2) - 1) + 0.4) / 2, abs=1e-7)
        assert value.item() == pytest.approx(0.4071068, abs=1e-7)
        # The miner can choose nothing but (0, 1, 2) and (1, 0, 2), whose negatives are at 1 and at 2 sin 15°.
        expected = (2 * (math.sqrt(2) - 1) + 0.4 + 1.4 - 2 * math.sin(math.radians(15))) / 4
        assert loss(embeddings, labels).item() == pytest.approx(expected, abs=1e-7)

    def test_margin_draws_by_inverse_density(self) -> None:
        torch.manual_seed(0)
        degrees = [math.degrees(2 * math.asin(distance / 2)) for distance in (0, 0.6, 1.2, 1.5)]
        on_sphere = F.pad(on_circle(*degrees), (0, 1))  # (4, 3): in three dimensions the density is that of d
        embeddings = torch.cat([on_sphere[:1].expand(60, 3), on_sphere[1:]])
        labels = torch.tensor([0] * 60 + [1, 2, 3])
        _, _, negatives = pml.margin(4, 3).miner(embeddings, labels)
        assert len(negatives) == 3600
        assert ((negatives == 60) | (negatives == 61)).all()  # the one at 1.5 is beyond the cut-off
        assert (negatives == 60).double().mean().item() == pytest.approx(2 / 3, abs=0.03)

    def test_proxy_anchor(self) -> None:
        loss = set_weights(pml.proxy_anchor(2, 2), EYE)
        assert loss(FIRST, ZERO).item() == pytest.approx(1.6199767, abs=1e-7)
        # Two images of one class, at 90° to its proxy: one positive proxy, but two that have negatives.
        value = loss(EYE[[1, 1]], torch.tensor([0, 0])).item()
        expected = math.log(1 + 2 * math.exp(3.2)) + math.log(1 + 2 * math.exp(32 * 1.1)) / 2
        assert value == pytest.approx(expected, abs=1e-12)

    def test_cosface(self) -> None:
        loss = set_weights(pml.cosface(2, 2), EYE)
        value = loss(torch.tensor([[0.8, 0.6]], dtype=torch.float64), ZERO).item()
        assert value == pytest.approx(math.log(1 + math.exp(9.6)), abs=1e-12) == pytest.approx(9.6000677, abs=1e-7)

    @pytest.mark.parametrize("maker", [pml.arcface, pml.subcenter_arcface])
    def test_arcface(self, maker: Callable) -> None:
        settings = {} if maker is pml.arcface else {"sub_centers": 1}
        loss = set_weights(maker(2, 2, margin=30, scale=2, **settings), EYE)
        expected = math.log(1 + math.exp(2 * (math.sin(math.radians(20)) - math.cos(math.radians(50)))))
        assert loss(on_circle(20), ZERO).item() == pytest.approx(expected, abs=1e-12)

    def test_subcenter_arcface_takes_nearest_center(self) -> None:
        loss = pml.subcenter_arcface(2, 2, sub_centers=2, margin=30, scale=2)
        loss = set_weights(loss, on_circle(200, 0, 90, 250))
        expected = math.log(1 + math.exp(2 * (math.sin(math.radians(20)) - math.cos(math.radians(50)))))
        assert loss(on_circle(20), ZERO).item() == pytest.approx(expected, abs=1e-12)

    # ψ(60°) = -cos 240° - 2 = -1.5, with five parts of cos 60° (-1.5 + 2.5) / 6 = 1/6; lengths are 3 and 2.
    @pytest.mark.parametrize(("plain_weight", "own_logit"), [(0.0, -9.0), (5.0, 1.0)])
    def test_l_softmax(self, plain_weight: float, own_logit: float) -> None:
        loss = set_weights(pml.l_softmax(2, 2, plain_weight=plain_weight), 2 * EYE)
        expected = math.log(1 + math.exp(6 * math.sin(math.radians(60)) - own_logit))
        assert loss(3 * on_circle(60), ZERO).item() == pytest.approx(expected, abs=1e-12)


class TestEqualities:
    @pytest.fixture
    def weights(self) -> Tensor:
        return torch.randn(CLASSES, DIMENSION, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def test_proxy_nca_with_positive_is_softplus(self, batch, weights) -> None:
        excluded, included = (
            set_weights(pml.proxy_nca(CLASSES, DIMENSION, exclude_positive=exclude), weights)
            for exclude in (True, False)
        )
        for embedding, label in zip(*batch, strict=True):
            one = embedding[None], label[None]
            torch.testing.assert_close(included(*one), F.softplus(excluded(*one)))

    @pytest.mark.parametrize(("sample_scale", "proxy_scale", "softmax_scale"), [(1, 8, 8), (3, 3, 9)])
    def test_proxy_nca_scale(self, sample_scale: int, proxy_scale: int, softmax_scale: int, batch, weights) -> None:
        embeddings, labels = batch
        loss = set_weights(pml.proxy_nca(CLASSES, DIMENSION, softmax_scale=softmax_scale), weights)
        samples, proxies = sample_scale * F.normalize(embeddings), proxy_scale * F.normalize(weights)
        squared = (samples[:, None] - proxies).square().sum(dim=2)
        torch.testing.assert_close(loss(embeddings, labels), F.cross_entropy(-squared, labels))

    @pytest.mark.parametrize("scale", [1.0, 20.0])
    def test_cosface_without_a_margin_is_normalized_softmax(self, scale: float, batch, weights) -> None:
        first = set_weights(pml.cosface(CLASSES, DIMENSION, margin=0, scale=scale), weights)
        second = set_weights(pml.norm_softmax(CLASSES, DIMENSION, scale=scale), weights)
        torch.testing.assert_close(first(*batch), second(*batch))

    def test_arcface_without_margin_is_softmax(self, batch, weights) -> None:
        plain = set_weights(pml.norm_softmax(CLASSES, DIMENSION), weights)(*batch)
        arc = set_weights(pml.arcface(CLASSES, DIMENSION, margin=0, scale=20), weights)
        threefold = pml.subcenter_arcface(CLASSES, DIMENSION, margin=0, scale=20)
        threefold = set_weights(threefold, weights.repeat_interleave(3, dim=0))
        torch.testing.assert_close(arc(*batch), plain)
        torch.testing.assert_close(threefold(*batch), plain)

    def test_am_softmax_is_cosface_at_scale_30(self, batch, weights) -> None:
        first = set_weights(pml.am_softmax(CLASSES, DIMENSION), weights)
        second = set_weights(pml.cosface(CLASSES, DIMENSION, margin=0.35, scale=30), weights)
        assert first(*batch) == second(*batch)

    def test_softtriple_with_one_centre_is_cosface(self, batch, weights) -> None:
        first = set_weights(pml.softtriple(CLASSES, DIMENSION, centers_per_class=1), weights)
        second = set_weights(pml.cosface(CLASSES, DIMENSION, margin=0.01, scale=20), weights)
        torch.testing.assert_close(first(*batch), second(*batch))

    def test_l_softmax_at_margin_1_is_softmax_without_a_bias(self, batch, weights) -> None:
        embeddings, labels = batch
        loss = set_weights(pml.l_softmax(CLASSES, DIMENSION, margin=1), weights)
        torch.testing.assert_close(loss(embeddings, labels), F.cross_entropy(embeddings @ weights.T, labels))

    def test_fully_linked_is_softtriple(self, batch) -> None:
        proxies = torch.randn(CLASSES, 3, DIMENSION, dtype=torch.float64)
        proxygml = ProxyGMLLoss(CLASSES, DIMENSION, proxies_per_class=3, ratio=1, proxy_weight=0)
        options = {"la": 3, "gamma": 1e9, "margin": 0, "regularization_weight": 0}
        softtriple = pml.softtriple(CLASSES, DIMENSION, centers_per_class=3, **options)
        softtriple = set_weights(softtriple, proxies.flatten(0, 1))
        torch.testing.assert_close(set_weights(proxygml, proxies)(*batch), softtriple(*batch))

    def test_one_proxy_is_normalized_softmax(self, batch, weights) -> None:
        proxygml = ProxyGMLLoss(CLASSES, DIMENSION, proxies_per_class=1, ratio=1, proxy_weight=0)
        value = set_weights(proxygml, weights[:, None])(*batch)
        for other in (
            pml.norm_softmax(CLASSES, DIMENSION, scale=1),
            pml.cosface(CLASSES, DIMENSION, margin=0, scale=1),
            pml.proxy_nca(CLASSES, DIMENSION, softmax_scale=0.5),
        ):
            torch.testing.assert_close(set_weights(other, weights)(*batch), value)


# Loops from the formulas. Each takes the loss (for its parameters only), embeddings and labels.


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def squared(first: Tensor, second: Tensor) -> Tensor:
    return (first - second).square().sum()


def length(vector: Tensor) -> Tensor:
    return vector.square().sum().sqrt()


def mean(values: list[Tensor]) -> Tensor:
    return sum(values) / len(values)


def mean_above_0(values: list[Tensor]) -> Tensor:
    return mean([value for value in values if value > 0])


def pairs_of(labels: Tensor) -> tuple[list, list]:
    """Ordered positive pairs, ordered negative pairs."""
    every = [(i, j) for i in range(len(labels)) for j in range(len(labels)) if i != j]
    return [(i, j) for i, j in every if labels[i] == labels[j]], [(i, j) for i, j in every if labels[i] != labels[j]]


def gaps(embeddings: Tensor, labels: Tensor) -> dict[tuple[int, int, int], Tensor]:
    """d²(a, n) - d²(a, p) of all triplets."""
    x = unit(embeddings)
    positives, negatives = pairs_of(labels)
    return {(a, p, n): squared(x[a], x[n]) - squared(x[a], x[p]) for a, p in positives for b, n in negatives if a == b}


def semihard_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    return mean([0.2 - gap for gap in gaps(embeddings, labels).values() if 0 < gap <= 0.2])


def semihard_nearest_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    found = gaps(embeddings, labels)
    hinges = []
    for a, p in pairs_of(labels)[0]:
        own = [gap for (anchor, positive, _), gap in found.items() if (anchor, positive) == (a, p)]
        farther = [gap for gap in own if gap > 0]
        hinges.append((0.2 - (min(farther) if farther else max(own))).clamp_min(0))
    return mean(hinges)


def triplet_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    return mean_above_0([0.2 - gap for gap in gaps(embeddings, labels).values()])


def triplet_hard_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    found = gaps(embeddings, labels)  # farthest positive and nearest negative: the smallest gap of an anchor
    return mean_above_0([0.2 - min(gap for (a, _, _), gap in found.items() if a == i) for i in range(len(labels))])


def contrastive_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    x = unit(embeddings)
    positives, negatives = pairs_of(labels)
    pulled = mean_above_0([squared(x[i], x[j]) for i, j in positives])
    return pulled + mean_above_0([1 - squared(x[i], x[j]) for i, j in negatives])


def contrastive_cosine_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    x = unit(embeddings)
    positives, negatives = pairs_of(labels)
    return mean_above_0([1 - x[i] @ x[j] for i, j in positives]) + mean_above_0(
        [x[i] @ x[j] - 0.5 for i, j in negatives]
    )


def liftedstruct_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    positives, negatives = pairs_of(labels)
    terms = []
    for i, j in [(i, j) for i, j in positives if i < j]:
        pushed = sum((1 - length(embeddings[a] - embeddings[n])).exp() for a, n in negatives if a in (i, j))
        terms.append((pushed.log() + length(embeddings[i] - embeddings[j])).clamp_min(0) ** 2)
    return mean(terms) / 2


def n_pair_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    chosen = [[i for i in range(len(labels)) if labels[i] == c][:2] for c in range(CLASSES)]
    terms = []
    for anchor, positive in chosen:
        products = [embeddings[anchor] @ embeddings[other] for _, other in chosen]
        terms.append(sum(product.exp() for product in products).log() - embeddings[anchor] @ embeddings[positive])
    return mean(terms) + 0.5 * 0.003 * mean([x.square().sum() for x in embeddings])


def ms_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    x = unit(embeddings)
    positives, negatives = pairs_of(labels)
    total = 0
    for i in range(len(labels)):
        near = [x[i] @ x[p] for a, p in positives if a == i]
        far = [x[i] @ x[n] for a, n in negatives if a == i]
        kept_near, kept_far = [s for s in near if s - 0.1 < max(far)], [s for s in far if s + 0.1 > min(near)]
        total += (1 + sum((-2 * (s - 0.5)).exp() for s in kept_near)).log() / 2 if kept_near else 0
        total += (1 + sum((50 * (s - 0.5)).exp() for s in kept_far)).log() / 50 if kept_far else 0
    return total / len(labels)


def margin_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Over all triplets, as without_chance has it."""
    x = unit(embeddings)
    hinges = []
    for a, p, n in gaps(embeddings, labels):
        beta = loss.loss.beta[labels[a]]
        hinges += [length(x[a] - x[p]) - beta + 0.2, beta - length(x[a] - x[n]) + 0.2]
    return mean_above_0(hinges)


def softmax_loop(logits_of: Callable[[Tensor, int], list[Tensor]]) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """Mean cross-entropy from a function of the loss, a sample and its class that gives its logits."""

    def loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
        terms = []
        for x, y in zip(embeddings, labels.tolist(), strict=True):
            logits = logits_of(loss, x, y)
            terms.append(sum(logit.exp() for logit in logits).log() - logits[y])
        return mean(terms)

    return loop


def cosines(weights: Tensor, x: Tensor) -> list[Tensor]:
    return [unit(x) @ unit(weight) for weight in weights]


@softmax_loop
def proxy_nca_loop(loss: nn.Module, x: Tensor, y: int) -> list[Tensor]:
    return [-9 * squared(unit(x), unit(proxy)) for proxy in loss.loss.proxies]


def proxy_nca_excluding_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    terms = []
    for x, y in zip(embeddings, labels.tolist(), strict=True):
        distances = [9 * squared(unit(x), unit(proxy)) for proxy in loss.loss.loss.proxies]
        terms.append(distances[y] + sum((-d).exp() for z, d in enumerate(distances) if z != y).log())
    return mean(terms)


def softtriple_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    centers = loss.loss.fc.T.unflatten(0, (CLASSES, 3))

    @softmax_loop
    def without_regularizer(loss: nn.Module, x: Tensor, y: int) -> list[Tensor]:
        logits = []
        for c in range(CLASSES):
            s = cosines(centers[c], x)
            relaxed = sum((one / 0.1).exp() * one for one in s) / sum((one / 0.1).exp() for one in s)
            logits.append(20 * (relaxed - 0.01 * (c == y)))
        return logits

    spread = sum(
        (2 + 1e-5 - 2 * unit(centers[c, k]) @ unit(centers[c, other])).sqrt()
        for c in range(CLASSES)
        for k in range(3)
        for other in range(k)
    )
    return without_regularizer(loss, embeddings, labels) + 0.2 / (CLASSES * 3 * 2) * spread


def proxy_anchor_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    pulled, pushed = [], []
    for c, proxy in enumerate(loss.loss.proxies):
        s = [unit(x) @ unit(proxy) for x in embeddings]
        own = [(-32 * (one - 0.1)).exp() for one, y in zip(s, labels, strict=True) if y == c]
        other = [(32 * (one + 0.1)).exp() for one, y in zip(s, labels, strict=True) if y != c]
        pulled += [(1 + sum(own)).log()] if own else []
        pushed.append((1 + sum(other)).log())
    return mean(pulled) + mean(pushed)


@softmax_loop
def norm_softmax_loop(loss: nn.Module, x: Tensor, y: int) -> list[Tensor]:
    return [20 * s for s in cosines(loss.loss.W.T, x)]


@softmax_loop
def cosface_loop(loss: nn.Module, x: Tensor, y: int) -> list[Tensor]:
    return [64 * (s - 0.35 * (c == y)) for c, s in enumerate(cosines(loss.loss.W.T, x))]


@softmax_loop
def am_softmax_loop(loss: nn.Module, x: Tensor, y: int) -> list[Tensor]:
    return [30 * (s - 0.35 * (c == y)) for c, s in enumerate(cosines(loss.loss.W.T, x))]


def with_angular_margin(cosine: Tensor) -> Tensor:
    angle, added = cosine.acos(), math.radians(28.6)
    return (angle + added).cos() if angle <= math.pi - added else cosine - added * math.sin(added)


@softmax_loop
def arcface_loop(loss: nn.Module, x: Tensor, y: int) -> list[Tensor]:
    return [64 * (with_angular_margin(s) if c == y else s) for c, s in enumerate(cosines(loss.loss.W.T, x))]


@softmax_loop
def subcenter_arcface_loop(loss: nn.Module, x: Tensor, y: int) -> list[Tensor]:
    nearest = [max(cosines(centers, x)) for centers in loss.loss.W.T.unflatten(0, (CLASSES, 3))]
    return [64 * (with_angular_margin(s) if c == y else s) for c, s in enumerate(nearest)]


@softmax_loop
def l_softmax_loop(loss: nn.Module, x: Tensor, y: int) -> list[Tensor]:
    logits = []
    for c, weight in enumerate(loss.loss.W.T):
        angle = (unit(x) @ unit(weight)).acos()
        k = math.floor(angle.item() * 4 / math.pi)
        psi = (-1) ** k * (4 * angle).cos() - 2 * k
        logits.append(length(x) * length(weight) * ((psi + 5 * angle.cos()) / 6 if c == y else angle.cos()))
    return logits


def center_loop(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
    @softmax_loop
    def softmax(loss: nn.Module, x: Tensor, y: int) -> list[Tensor]:
        return [w @ x + b for w, b in zip(loss.classifier.weight, loss.classifier.bias, strict=True)]

    distances = [squared(x, loss.centers[y]) for x, y in zip(embeddings, labels, strict=True)]
    return softmax(loss, embeddings, labels) + 0.003 * mean(distances) / 2


@every_loss
def test_value_and_gradients_equal_a_loop_over_the_formula(name: str, batch) -> None:
    torch.manual_seed(2)
    loss = without_chance(made(name)).double()
    for buffer in loss.buffers():  # centers that are not at 0
        buffer.normal_()
    loop = globals()[name.replace(" ", "_") + "_loop"]
    parameters = list(loss.parameters())
    expected = value_and_gradients(lambda *given: loop(loss, *given), *batch, parameters)
    actual = value_and_gradients(loss, *batch, parameters)
    assert actual[1].abs().max() > 1e-4
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("labels", [[1, 1, 1, 1], [0, 1, 2, 3], [2]])
def test_n_pair_without_other_pairs_is_its_regularizer(labels: list[int]) -> None:
    embeddings = torch.randn(len(labels), DIMENSION)
    value = pml.n_pair(CLASSES, DIMENSION, regularization_weight=0.1)(embeddings, torch.tensor(labels))
    torch.testing.assert_close(value, 0.05 * embeddings.square().sum(dim=1).mean())


def test_contrastive_of_a_single_image_is_0() -> None:
    for variant in ("squared", "cosine"):
        loss = pml.contrastive(CLASSES, DIMENSION, variant=variant)
        assert loss(torch.ones(1, DIMENSION), torch.tensor([2])).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize(
    "name", ["arcface", "subcenter_arcface", "cosface", "l_softmax", "proxy_nca", "proxy_anchor", "softtriple"]
)
def test_embedding_on_its_class_weight(name: str, side: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    loss = made(name).to(dtype)
    (parameter,) = loss.parameters()
    weights = parameter.detach() if "proxies" in next(iter(loss.state_dict())) else parameter.detach().T
    labels = torch.arange(CLASSES)
    embeddings = side * weights.view(CLASSES, -1, DIMENSION)[:, 0]
    value, *gradients = value_and_gradients(loss, embeddings, labels, [parameter])
    assert value.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_softtriple_trains_on_once_centres_have_met() -> None:
    """The library's regularizer has NaN gradients for about half of such centers."""
    for seed in range(10):
        torch.manual_seed(seed)
        loss = pml.softtriple(2, 4, centers_per_class=2)
        with torch.no_grad():
            loss.loss.fc[:, 1] = loss.loss.fc[:, 0]
        loss(torch.randn(3, 4), torch.tensor([0, 1, 1])).backward()
        assert loss.loss.fc.grad.isfinite().all()


def test_proxies_and_weights_start_as_documented() -> None:
    torch.manual_seed(0)
    for name, deviation in [("proxy_nca", 1 / 8), ("proxy_anchor", math.sqrt(2 / 50)), ("cosface", 1), ("arcface", 1)]:
        (weights,) = made(name, 50, 400).parameters()
        assert weights.std().item() == pytest.approx(deviation, rel=0.03)
    (centers,) = pml.softtriple(50, 400).parameters()
    assert centers.shape == (400, 500)
    assert 0.99 / math.sqrt(500) < centers.abs().max() <= 1 / math.sqrt(500)


def test_settings_default_to_the_constants_of_the_papers() -> None:
    expected = {
        "semihard": {"variant": "all", "margin": 0.2},
        "triplet": {"variant": "all", "margin": 0.2},
        "contrastive": {"variant": "squared", "margin": None},
        "liftedstruct": {"margin": 1},
        "n_pair": {"regularization_weight": 0.003},
        "ms": {"alpha": 2, "beta": 50, "base": 0.5, "epsilon": 0.1},
        "margin": {"margin": 0.2, "beta": 1.2, "nu": 0, "cutoff": 0.5, "nonzero_loss_cutoff": 1.4},
        "proxy_nca": {"softmax_scale": 9, "exclude_positive": False},
        "softtriple": {
            "centers_per_class": 10, "la": 20, "gamma": 0.1, "margin": 0.01, "regularization_weight": 0.2
        },
        "proxy_anchor": {"margin": 0.1, "alpha": 32},
        "norm_softmax": {"scale": 20},
        "cosface": {"margin": 0.35, "scale": 64},
        "am_softmax": {"margin": 0.35, "scale": 30},
        "arcface": {"margin": 28.6, "scale": 64},
        "subcenter_arcface": {"sub_centers": 3, "margin": 28.6, "scale": 64},
        "l_softmax": {"margin": 4, "scale": 1, "plain_weight": 5},
        "center": {"center_weight": 0.003, "center_rate": 0.5},
    }  # fmt: skip
    for name, settings in expected.items():
        parameters = inspect.signature(MADE[name][0]).parameters
        assert list(parameters)[:2] == ["num_classes", "embedding_dim"]
        assert {key: one.default for key, one in list(parameters.items())[2:]} == settings, name


def test_margin_learns_a_boundary_for_each_class() -> None:
    (beta,) = pml.margin(CLASSES, DIMENSION).parameters()
    torch.testing.assert_close(beta.detach(), torch.full((CLASSES,), 1.2))


class TestCenter:
    EMBEDDINGS = torch.tensor([[1.0, 0], [3, 0], [0, 2]])
    LABELS = torch.tensor([0, 0, 1])

    def test_the_case_done_by_hand(self) -> None:
        torch.manual_seed(0)
        loss = CenterLoss(2, 2, center_weight=0.1)
        logits = loss.classifier(self.EMBEDDINGS)
        pulled = (loss(self.EMBEDDINGS, self.LABELS) - F.cross_entropy(logits, self.LABELS)) / 0.1
        assert 3 * pulled.item() == pytest.approx(7, abs=1e-5)  # half the sum of squares, over three images
        torch.testing.assert_close(loss.centers, torch.tensor([[2 / 3, 0], [0, 0.5]]))

    def test_second_batch_moves_its_centers(self) -> None:
        loss = CenterLoss(3, 2)
        loss.centers.copy_(torch.tensor([[1.0, 1], [5, 5], [2, 2]]))
        loss(self.EMBEDDINGS, self.LABELS)
        # Class 0: ((1-1)+(1-3), 1+1) / 3 = (-2/3, 2/3); class 1: (5, 3) / 2; halved, then subtracted.
        expected = torch.tensor([[1 + 1 / 3, 1 - 1 / 3], [5 - 1.25, 5 - 0.75], [2, 2]])
        torch.testing.assert_close(loss.centers, expected)

    def test_without_a_weight_it_is_softmax(self) -> None:
        loss = CenterLoss(2, 2, center_weight=0)
        expected = F.cross_entropy(loss.classifier(self.EMBEDDINGS), self.LABELS)
        assert loss(self.EMBEDDINGS, self.LABELS) == expected

    def test_centers_are_buffers(self) -> None:
        loss = CenterLoss(2, 2).eval()
        loss(self.EMBEDDINGS, self.LABELS)
        assert loss.centers.abs().max() == 0
        assert "centers" in loss.state_dict()
        assert "centers" not in dict(loss.named_parameters())

    def test_centres_come_to_the_mean_of_their_class(self) -> None:
        loss = CenterLoss(2, 2)
        for _ in range(60):
            loss(self.EMBEDDINGS, self.LABELS)
        torch.testing.assert_close(loss.centers, torch.tensor([[2.0, 0], [0, 2]]))


class TestBadSettings:
    @pytest.mark.parametrize(
        ("maker", "settings", "message"),
        [
            (pml.semihard, {"variant": "hardest"}, "expected variant as one of all, nearest, got 'hardest'"),
            (pml.triplet, {"variant": "semihard"}, "expected variant as one of all, hard"),
            (pml.contrastive, {"variant": "euclidean"}, "expected variant as one of squared, cosine"),
            (pml.ms, {"beta": 0}, "expected beta above 0, got 0"),
            (pml.proxy_nca, {"softmax_scale": -1}, "expected softmax_scale above 0, got -1"),
            (pml.softtriple, {"gamma": 0}, "expected gamma above 0"),
            (pml.softtriple, {"centers_per_class": 0}, "centers_per_class as a whole number of at least 1"),
            (pml.subcenter_arcface, {"sub_centers": 2.5}, "sub_centers as a whole number of at least 1, got 2.5"),
            (pml.l_softmax, {"margin": 0.5}, "margin as a whole number of at least 1, got 0.5"),
            (pml.norm_softmax, {"scale": math.nan}, "expected scale above 0, got nan"),
            (pml.semihard, {"margin": -0.1}, "expected margin of at least 0, got -0.1"),
            (pml.triplet, {"margin": -0.1}, "expected margin of at least 0, got -0.1"),
            (pml.liftedstruct, {"margin": math.nan}, "expected margin of at least 0, got nan"),
            (pml.n_pair, {"regularization_weight": -1}, "expected regularization_weight of at least 0, got -1"),
            (pml.margin, {"beta": 0}, "expected beta above 0, got 0"),
            (pml.proxy_anchor, {"alpha": -32}, "expected alpha above 0, got -32"),
            (pml.cosface, {"margin": -0.35}, "expected margin of at least 0, got -0.35"),
            (pml.arcface, {"scale": 0}, "expected scale above 0, got 0"),
            (pml.subcenter_arcface, {"margin": -28.6}, "expected margin of at least 0, got -28.6"),
            (pml.l_softmax, {"plain_weight": -1}, "expected plain_weight of at least 0, got -1"),
            (CenterLoss, {"center_weight": -0.1}, "expected center_weight of at least 0, got -0.1"),
        ],
    )
    def test_out_of_range_are_refused(self, maker: Callable, settings: dict, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            maker(3, 4, **settings)

    def test_proxy_nca_without_any_negative_proxy_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expected at least 2 classes"):
            pml.proxy_nca(1, 4, exclude_positive=True)
