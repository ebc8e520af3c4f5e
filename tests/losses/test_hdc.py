"""The loss of hard-aware cascades against loops written from its formulas and cases done by hand."""

import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.reducers import DoNothingReducer
from torch import Tensor

from proxygml.losses.hdc import HDCLoss, keep_hardest
from tests.losses.test_every_loss import value_and_gradients


def random_batch(classes: int, per_class: int, dimension: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(per_class)
    return torch.randn(len(labels), dimension, generator=generator, dtype=torch.float64), labels


def by_loops(
    embeddings: Tensor, labels: Tensor, ratios: tuple[float, ...], cascade: bool
) -> tuple[float, float, Tensor, list[set[tuple[int, int]]]]:
    """The objective, the displayed value, the gradient as the released backward adds it up, and each head's pairs."""
    objective, displayed, gradients, kept_by_head = 0.0, 0.0, [], []
    for part, ratio in zip(embeddings.chunk(len(ratios), dim=1), ratios, strict=True):
        lengths = part.norm(dim=1, keepdim=True)
        rows = part / lengths
        positives, negatives = {}, {}
        for i, j in itertools.combinations(range(len(rows)), 2):
            apart = (rows[i] - rows[j]).square().sum().item()
            if labels[i] != labels[j]:
                negatives[i, j] = 10 * max(0.0, 1 - apart), -apart
            elif apart != 0:
                positives[i, j] = apart, apart
        kept = {}
        for listed in (positives, negatives):
            allowed = [pair for pair in listed if not cascade or not kept_by_head or pair in kept_by_head[-1]]
            hardest = sorted(allowed, key=lambda pair: listed[pair][1], reverse=True)[: math.floor(ratio * len(listed))]
            kept |= {pair: listed[pair][0] for pair in hardest}
        count = sum((1 if pair in positives else 2) for pair, cost in kept.items() if cost > 0)
        gradient = torch.zeros_like(rows)
        for (i, j), cost in kept.items():
            if cost == 0:
                continue
            objective += 0.5 * cost / count  # 1/2 D, and 5 [1 - D]_+
            displayed += (1 if (i, j) in positives else 2) * cost / count
            pull = (rows[i] - rows[j]) * (1 if (i, j) in positives else -10) / count
            gradient[i] += pull
            gradient[j] -= pull
        gradients.append((gradient - (gradient * rows).sum(dim=1, keepdim=True) * rows) / lengths)
        kept_by_head.append(set(kept))
    return objective, displayed, torch.cat(gradients, dim=1), kept_by_head


class TestAnglesOf0And30AgainstOneOf70Degrees:
    ANGLES = torch.tensor([0.0, 30, 70], dtype=torch.float64).deg2rad()
    EMBEDDINGS = torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)
    LABELS = torch.tensor([0, 0, 1])

    def test_one_head(self) -> None:
        loss = HDCLoss(2, 2, heads=1, ratios=(1.0,))
        assert loss(self.EMBEDDINGS, self.LABELS).item() == pytest.approx(0.9314730, abs=5e-8)
        displayed, active = loss.last_terms
        assert displayed.item() == pytest.approx((0.267949 + 2 * 5.320889) / 3, abs=1e-6)
        assert displayed.item() == pytest.approx(3.636576, abs=1e-6)
        assert active.item() == 2  # the negatives 0 and 70 degrees are further apart than 1

    def test_heads_add_up_and_each_vector_may_have_any_length(self) -> None:
        loss = HDCLoss(2, 6, ratios=(1.0, 1.0, 1.0))
        scaled = torch.cat([self.EMBEDDINGS, 5 * self.EMBEDDINGS, self.EMBEDDINGS / 7], dim=1)
        assert loss(scaled, self.LABELS).item() == pytest.approx(3 * 0.9314730, abs=2e-7)
        assert loss.last_terms.displayed.item() == pytest.approx(3 * 3.636576, abs=2e-6)


@pytest.mark.parametrize("cascade", [False, True])
@pytest.mark.parametrize("ratios", [(1.0, 0.5, 0.2), (0.6, 0.6, 0.3), (0.75, 0.4, 0.1), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_the_loops(seed: int, ratios: tuple[float, ...], cascade: bool) -> None:
    embeddings, labels = random_batch(3, 4, 9, seed)
    if min(ratios) == 1:  # with fewer pairs kept there would be ties
        embeddings[1] = embeddings[0]  # two of one class at distance 0, which is no pair
    loss = HDCLoss(3, 9, ratios=ratios, cascade=cascade)
    value, gradient = value_and_gradients(loss, embeddings, labels)
    expected, displayed, expected_gradient, kept = by_loops(embeddings, labels, ratios, cascade)
    assert expected > 0.1
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert loss.last_terms.displayed.item() == pytest.approx(displayed, rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)

    first, second = torch.triu_indices(12, 12, offset=1)
    samples = F.normalize(embeddings.unflatten(1, (3, 3)), dim=-1).transpose(0, 1)
    distances = (samples[:, first] - samples[:, second]).square().sum(dim=-1)
    ours = keep_hardest(distances, labels[first] == labels[second], ratios, cascade)
    assert [{(i.item(), j.item()) for i, j in zip(first[row], second[row], strict=True)} for row in ours] == kept


def test_one_head_is_contrastive() -> None:
    embeddings, labels = random_batch(3, 4, 5, seed=1)
    loss = HDCLoss(3, 5, heads=1, ratios=(1.0,))
    contrastive = pml.ContrastiveLoss(
        pos_margin=0, neg_margin=1, distance=LpDistance(power=2), reducer=DoNothingReducer()
    )
    parts = contrastive(embeddings, labels)  # each pair in both orders
    pulls, pushes = (parts[name]["losses"].sum().item() for name in ("pos_loss", "neg_loss"))
    active = (parts["pos_loss"]["losses"] > 0).sum() / 2 + (parts["neg_loss"]["losses"] > 0).sum()
    expected = (0.5 * pulls / 2 + 5 * pushes / 2) / active.item()
    assert loss(embeddings, labels).item() == pytest.approx(expected, rel=1e-12)


class TestKeptPairs:
    @pytest.fixture
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Squared distances of three heads (3, 300), and which pairs are positive: 100."""
        distances = 4 * torch.rand(3, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return distances, torch.arange(300) < 100

    @pytest.mark.parametrize("cascade", [False, True])
    def test_are_the_share_of_either_kind(self, pairs: tuple[Tensor, Tensor], cascade: bool) -> None:
        distances, positive = pairs
        kept = keep_hardest(distances, positive, (1.0, 0.5, 0.29), cascade)
        assert (kept & positive).sum(dim=1).tolist() == [100, 50, 29]
        assert (kept & ~positive).sum(dim=1).tolist() == [200, 100, 58]

    def test_are_harder_than_all_that_are_dropped(self, pairs: tuple[Tensor, Tensor]) -> None:
        distances, positive = pairs
        for row, kept in zip(distances, keep_hardest(distances, positive, (0.9, 0.5, 0.2), cascade=False), strict=True):
            assert row[kept & positive].min() >= row[~kept & positive].max()
            cost = (1 - row).relu()
            assert cost[kept & ~positive].min() >= cost[~kept & ~positive].max()

    def test_cascade_keeps_the_hardest(self, pairs: tuple[Tensor, Tensor]) -> None:
        distances, positive = pairs
        ratios = (0.9, 0.5, 0.2)
        free, kept = (
            keep_hardest(distances, positive, ratios, cascade=False),
            keep_hardest(distances, positive, ratios, True),
        )
        assert torch.equal(kept[0], free[0])
        for head in (1, 2):
            assert not (kept[head] & ~kept[head - 1]).any()
            assert (free[head] & ~free[head - 1]).any()
            dropped = kept[head - 1] & ~kept[head]
            assert distances[head][kept[head] & positive].min() >= distances[head][dropped & positive].max()
            assert distances[head][kept[head] & ~positive].max() <= distances[head][dropped & ~positive].min()

    def test_of_a_cascade_never_grow_again(self, pairs: tuple[Tensor, Tensor]) -> None:
        distances, positive = pairs
        kept = keep_hardest(distances, positive, (0.2, 1.0, 0.5), cascade=True)
        assert kept.sum(dim=1).tolist() == [60, 60, 60]

    def test_positives_at_distance_zero(self) -> None:
        distances = torch.tensor([[0.0, 0.0, 0.1, 0.3, 0.2, 0.0, 0.5]])
        positive = torch.tensor([True] * 5 + [False] * 2)
        kept = keep_hardest(distances, positive, (0.7,), cascade=False)
        assert kept.tolist() == [[False, False, False, True, True, True, False]]


def test_a_share_of_less_than_one_pair_costs_nothing() -> None:
    embeddings, labels = random_batch(3, 4, 9, seed=0)
    loss = HDCLoss(3, 9, ratios=(1e-6, 1e-6, 1e-6))
    value, gradient = value_and_gradients(loss, embeddings, labels)
    assert value.item() == 0
    assert gradient.abs().max() == 0
    assert [term.item() for term in loss.last_terms] == [0, 0]


def test_gradcheck_passes() -> None:
    embeddings, labels = random_batch(3, 3, 9, seed=2)
    loss = HDCLoss(3, 9, cascade=True)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), embeddings.requires_grad_())


@pytest.mark.parametrize("cascade", [False, True])
@pytest.mark.parametrize(
    ("angles", "labels"),
    [([10.0], [0]), ([0.0, 0.0, 0.0], [1, 1, 1]), ([0.0, 120.0, 240.0], [0, 1, 2]), ([0.0, 0.0, 180.0], [0, 0, 1])],
    ids=["one image", "one class at one place", "negatives beyond the margin", "nothing left to learn"],
)
def test_batches_without_a_pair_that_costs_cost_nothing(angles: list[float], labels: list[int], cascade: bool) -> None:
    radians = torch.tensor(angles, dtype=torch.float64).deg2rad()
    embeddings = torch.stack([radians.cos(), radians.sin()], dim=1).repeat(1, 3)
    value, gradient = value_and_gradients(HDCLoss(3, 6, cascade=cascade), embeddings, torch.tensor(labels))
    assert value.item() == 0
    assert gradient.abs().max() == 0


@pytest.mark.parametrize("labels", [[1, 1, 1, 1], [0, 1, 2, 3]], ids=["one class", "every class once"])
def test_one_kind_of_pairs(labels: list[int]) -> None:
    embeddings = F.normalize(torch.rand(4, 6, generator=torch.Generator().manual_seed(0)))
    value, gradient = value_and_gradients(HDCLoss(4, 6), embeddings, torch.tensor(labels))
    assert value > 0
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("vector", [1.0, 0.0])
def test_equal_images_of_two_classes(vector: float) -> None:
    value, gradient = value_and_gradients(HDCLoss(2, 6), torch.full((4, 6), vector), torch.tensor([0, 0, 1, 1]))
    assert value.item() == pytest.approx(
        2.5 + 2.5
    )  # 5 n / (2 n) in each head that keeps some of its 4: not in the third
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("dimension", "options", "message"),
    [
        (2, {}, "embedding_dim that 3 heads can share, got 2"),
        (6, {"heads": 0}, "heads as a whole number of at least 1, got 0"),
        (6, {"heads": 2}, "for each of 2 heads, got (1.0, 0.5, 0.2)"),
        (6, {"ratios": (1.0, 0.5, 0.0)}, "a ratio above 0 and up to 1"),
        (6, {"ratios": (1.5, 0.5, 0.2)}, "a ratio above 0 and up to 1"),
    ],
)
def test_settings_out_of_range_are_refused(dimension: int, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        HDCLoss(3, dimension, **options)
