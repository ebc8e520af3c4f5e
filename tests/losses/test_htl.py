"""The hierarchical triplet loss against loops written from its formulas, scipy's linkage and cases done by hand."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor

from proxygml.losses import htl
from proxygml.losses.htl import HTLLoss, class_statistics, join_classes, merge_levels
from tests.losses.test_every_loss import value_and_gradients


def clustered(classes: int, dimension: int, per_class: int, seed: int, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Images around random centers, not of unit length: (M, D) in float64, (M,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(per_class)
    centers = torch.randn(classes, dimension, generator=generator, dtype=torch.float64)
    noises = torch.randn(len(labels), dimension, generator=generator, dtype=torch.float64)
    return centers[labels] + noise * noises, labels


def loss_with_tree(embeddings: Tensor, labels: Tensor, **options: object) -> HTLLoss:
    loss = HTLLoss(int(labels.max()) + 1, embeddings.shape[1], **options)
    loss.begin_epoch(1, lambda: (embeddings, labels))
    return loss


def statistics_by_loops(embeddings: Tensor, labels: Tensor) -> tuple[list[list[float]], list[float], float]:
    """d(p, q) for p != q, s_c and d_0, pair by pair."""
    rows = [vector / vector.norm() for vector in embeddings]
    members = [[i for i, y in enumerate(labels.tolist()) if y == c] for c in range(int(labels.max()) + 1)]

    def apart(i: int, j: int) -> float:
        return (rows[i] - rows[j]).square().sum().item()

    between = [
        [sum(apart(i, j) for i in first for j in second) / (len(first) * len(second)) for second in members]
        for first in members
    ]
    within, spread_classes = [], []
    for images in members:
        count = len(images)
        total = sum(apart(i, j) for i in images for j in images if i != j)
        within.append(total / (count**2 - count) if count > 1 else 0.0)
        if count > 1:
            spread_classes.append(within[-1])
    return between, within, sum(spread_classes) / max(1, len(spread_classes))


def levels_by_loops(between: list[list[float]], thresholds: list[float]) -> list[list[int]]:
    """H by joining, level by level, any two nodes that hold two classes closer than d_l, until nothing changes."""
    classes = range(len(between))
    levels = [[len(thresholds) - 1] * len(between) for _ in classes]
    for level in reversed(range(len(thresholds))):
        node = list(classes)
        changed = True
        while changed:
            changed = False
            for p, q in itertools.combinations(classes, 2):
                if between[p][q] < thresholds[level] and node[p] != node[q]:
                    node = [node[p] if name == node[q] else name for name in node]
                    changed = True
        for p, q in itertools.product(classes, classes):
            if node[p] == node[q]:
                levels[p][q] = level
    return levels


def loss_by_loops(
    embeddings: Tensor, labels: Tensor, training: tuple[Tensor, Tensor], *, steps: int, beta: float
) -> Tensor:
    between, within, lowest = statistics_by_loops(*training)
    thresholds = [step * (4 - lowest) / steps + lowest for step in range(steps + 1)]
    levels = levels_by_loops(between, thresholds)
    rows = embeddings / embeddings.norm(dim=1, keepdim=True)
    hinges = []
    for a, p, n in itertools.product(range(len(rows)), repeat=3):
        if a == p or labels[a] != labels[p] or labels[a] == labels[n]:
            continue
        margin = beta + thresholds[levels[labels[a]][labels[n]]] - within[labels[a]]
        near, far = (rows[a] - rows[p]).square().sum(), (rows[a] - rows[n]).square().sum()
        hinges.append((near - far + margin).clamp_min(0))
    return torch.stack(hinges).sum() / (2 * len(hinges))


class TestTwoCollapsedClasses:
    """At cosine .45: d = 1.1, d_0 = 0, thresholds l / 4, so that 1.1 < d_5 = 1.25 joins them."""

    EMBEDDINGS = torch.tensor([[1.0, 0], [1, 0], [0.45, math.sqrt(1 - 0.45**2)]], dtype=torch.float64)[[0, 1, 2, 2]]
    LABELS = torch.tensor([0, 0, 1, 1])

    def test_meet_at_level_five_and_cost_an_eighth(self) -> None:
        loss = loss_with_tree(self.EMBEDDINGS, self.LABELS)
        assert loss.class_distances.flatten().tolist() == pytest.approx([0, 1.1, 1.1, 0], abs=1e-12)
        assert merge_levels(loss.tree.nodes).tolist() == [[0, 5], [5, 0]]
        assert loss.tree.thresholds[5].item() == pytest.approx(1.25, abs=1e-12)
        assert loss.margins(self.LABELS, torch.float64)[0, 2].item() == pytest.approx(1.35, abs=1e-12)
        assert loss(self.EMBEDDINGS, self.LABELS).item() == pytest.approx(0.125, abs=1e-12)
        assert loss.last_terms.active_fraction.item() == 1
        assert loss.last_terms.margin.item() == pytest.approx(1.35, abs=1e-12)

    def test_far_classes_cost_nothing(self) -> None:
        loss = HTLLoss(2, 2)
        loss.begin_epoch(0, lambda: pytest.fail("epoch 0 has no tree and asks for no embeddings"))
        assert loss.class_distances is None
        assert loss(self.EMBEDDINGS, self.LABELS).item() == 0
        assert loss.last_terms.active_fraction.item() == 0
        assert loss.last_terms.margin.item() == pytest.approx(0.2)
        nearer = HTLLoss(2, 2, first_margin=1.5)(self.EMBEDDINGS, self.LABELS)
        assert nearer.item() == pytest.approx(0.5 * (1.5 - 1.1))


class TestClassStatistics:
    @pytest.mark.parametrize("seed", range(3))
    def test_closed_forms_are_the_means_over_pairs(self, seed: int) -> None:
        embeddings, labels = clustered(5, 4, 4, seed)
        embeddings, labels = embeddings[:-3], labels[:-3]  # class 4 has one image
        between, within, lowest = statistics_by_loops(embeddings, labels)
        distances, spreads, counts = class_statistics(embeddings, labels, 5)
        off_diagonal = ~torch.eye(5, dtype=torch.bool)
        torch.testing.assert_close(distances[off_diagonal], torch.tensor(between, dtype=torch.float64)[off_diagonal])
        assert distances.diagonal().tolist() == [0] * 5
        assert spreads.tolist() == pytest.approx(within, abs=1e-12)
        assert spreads[4].item() == 0
        assert counts.tolist() == [4, 4, 4, 4, 1]
        thresholds = loss_with_tree(embeddings, labels, levels=10).tree.thresholds
        expected = [lowest + step * (4 - lowest) / 10 for step in range(11)]
        assert thresholds.tolist() == pytest.approx(expected, abs=1e-12)

    def test_threshold_without_pairs(self) -> None:
        embeddings, labels = clustered(4, 3, 1, seed=0)
        tree = loss_with_tree(embeddings, labels, levels=4).tree
        assert tree.thresholds.tolist() == [0, 1, 2, 3, 4]
        assert tree.spreads.tolist() == [0] * 4

    def test_half_precision_embeddings_are_averaged_in_float32(self) -> None:
        embeddings, labels = clustered(6, 8, 4, seed=1)
        half = embeddings.half()
        distances, spreads, _ = class_statistics(half, labels, 6)
        expected_distances, expected_spreads, _ = class_statistics(half.double(), labels, 6)
        assert distances.dtype == spreads.dtype == torch.float32
        torch.testing.assert_close(distances.double(), expected_distances, rtol=0, atol=1e-6)
        torch.testing.assert_close(spreads.double(), expected_spreads, rtol=0, atol=1e-6)


class TestTree:
    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("levels", [1, 7, 16])
    def test_levels_are_those_of_the_loops(self, seed: int, levels: int) -> None:
        embeddings, labels = clustered(9, 3, 3, seed)
        between, _, lowest = statistics_by_loops(embeddings, labels)
        thresholds = [lowest + step * (4 - lowest) / levels for step in range(levels + 1)]
        tree = loss_with_tree(embeddings, labels, levels=levels).tree
        assert merge_levels(tree.nodes).tolist() == [
            [0 if p == q else level for q, level in enumerate(row)]
            for p, row in enumerate(levels_by_loops(between, thresholds))
        ]

    def test_chain_of_near_classes(self) -> None:
        places = torch.tensor([0.0, 1.0, 2.0, 9.0])
        distances = (places[:, None] - places).abs()
        nodes = join_classes(distances, torch.tensor([0.5, 1.5, 8.0]))
        assert merge_levels(nodes).tolist() == [[0, 1, 1, 2], [1, 0, 1, 2], [1, 1, 0, 2], [2, 2, 2, 0]]

    @pytest.mark.parametrize("seed", range(3))
    def test_levels_are_symmetric_and_an_ultrametric(self, seed: int) -> None:
        embeddings, labels = clustered(30, 6, 2, seed, noise=0.1)
        levels = merge_levels(loss_with_tree(embeddings, labels).tree.nodes)
        assert len(levels.unique()) > 3
        assert torch.equal(levels, levels.T)
        around = torch.maximum(levels[:, :, None], levels[None, :, :])  # p, r, q: through r
        assert (levels[:, None, :] <= around).all()

    def test_margins_are_at_least_those_of_the_lowest_level(self) -> None:
        embeddings, labels = clustered(30, 3, 3, seed=2)
        loss = loss_with_tree(embeddings, labels, beta=0.3)
        classes = torch.arange(30)
        lowest = 0.3 + loss.tree.thresholds[0] - loss.tree.spreads
        margins = loss.margins(classes, torch.float64)
        assert (margins >= lowest[:, None] - 1e-12).all()
        torch.testing.assert_close(margins.diagonal(), lowest)  # a class shares every node with itself

    def test_opposite_classes_get_the_last_level(self) -> None:
        embeddings = torch.tensor([[1.0, 0], [1, 0], [-1, 0], [-1, 0]])
        loss = loss_with_tree(embeddings, torch.tensor([0, 0, 1, 1]))
        assert loss.tree.nodes[-1].tolist() == [0, 1]  # 4 is not closer than 4
        assert merge_levels(loss.tree.nodes).tolist() == [[0, 16], [16, 0]]

    def test_one_class_makes_a_tree_too(self) -> None:
        embeddings, labels = clustered(1, 3, 4, seed=0)
        assert loss_with_tree(embeddings, labels).tree.nodes.tolist() == [[0]] * 17


@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_the_loops(seed: int) -> None:
    training = clustered(5, 4, 3, seed)
    training = training[0][:-2], training[1][:-2]  # class 4 has one image
    loss = loss_with_tree(*training, levels=9, beta=0.25)
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(11, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (11,), generator=generator)
    value, gradient = value_and_gradients(loss, embeddings, labels)

    embeddings.requires_grad_()
    expected = loss_by_loops(embeddings, labels, training, steps=9, beta=0.25)
    expected.backward()
    assert expected.item() > 0.05
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, embeddings.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("margin", [0.2, 1.0])
def test_equal_margins(margin: float) -> None:
    embeddings, labels = clustered(3, 4, 3, seed=0, noise=1.5)
    embeddings.requires_grad_()
    ours = HTLLoss(3, 4, first_margin=margin)
    other = pml.TripletMarginLoss(margin, distance=LpDistance(power=2), reducer=MeanReducer())
    expected = 0.5 * other(embeddings, labels)
    value, gradient = value_and_gradients(ours, embeddings, labels)
    assert expected.item() > 0.01
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, embeddings)[0], rtol=1e-12, atol=1e-12)


def test_three_classes_of_three_images_are_108_triplets(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = torch.ones(9, 2, dtype=torch.float64)  # all at one place: every triplet costs half its margin
    labels = torch.arange(3).repeat_interleave(3)
    loss = HTLLoss(3, 2, first_margin=1.0)
    assert loss(embeddings, labels).item() == pytest.approx(0.5, abs=1e-12)
    counted = []
    relu = F.relu
    monkeypatch.setattr(htl.F, "relu", lambda excess: counted.append(excess.isfinite().sum().item()) or relu(excess))
    loss(embeddings, labels)
    assert sum(counted) == 108  # A(3, 2) * A(3, 2) * 3


def test_gradcheck_passes() -> None:
    embeddings, labels = clustered(4, 3, 3, seed=5)
    loss = loss_with_tree(embeddings, labels)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), embeddings.requires_grad_())


class TestBeginEpoch:
    def test_makes_the_same_tree_whatever_was_before(self) -> None:
        early, late = clustered(6, 4, 3, seed=1), clustered(6, 4, 3, seed=2)
        trained, resumed = HTLLoss(6, 4), HTLLoss(6, 4)
        trained.begin_epoch(0, lambda: pytest.fail("not in epoch 0"))
        trained.begin_epoch(1, lambda: early)
        trained.begin_epoch(2, lambda: late)
        resumed.begin_epoch(2, lambda: late)
        assert all(torch.equal(a, b) for a, b in zip(trained.tree, resumed.tree, strict=True))
        assert torch.equal(trained.class_distances, resumed.class_distances)
        assert trained(*early) == resumed(*early)
        trained.begin_epoch(0, lambda: pytest.fail("not in epoch 0"))
        assert trained.tree is trained.class_distances is None

    def test_leaves_nothing_in_the_state_and_no_graph(self) -> None:
        embeddings, labels = clustered(3, 4, 3, seed=1)
        loss = loss_with_tree(embeddings.requires_grad_(), labels)
        assert loss.state_dict() == {}
        assert list(loss.parameters()) == []
        assert not loss.class_distances.requires_grad

    def test_a_class_without_images_is_refused(self) -> None:
        embeddings, labels = clustered(3, 4, 3, seed=1)
        with pytest.raises(ValueError, match="images of all 5 classes, got none of 2 of them, first class 3"):
            HTLLoss(5, 4).begin_epoch(1, lambda: (embeddings, labels))


@pytest.mark.parametrize("labels", [[0], [1, 1, 1], [0, 1, 2]], ids=["one image", "one class", "every class once"])
def test_batch_without_triplets(labels: list[int]) -> None:
    loss = HTLLoss(3, 4)
    value, gradient = value_and_gradients(loss, torch.randn(len(labels), 4), torch.tensor(labels))
    assert value.item() == 0
    assert gradient.abs().max() == 0
    assert all(term.isfinite() for term in loss.last_terms)


def test_separated_classes_cost_nothing() -> None:
    embeddings = torch.eye(3, dtype=torch.float64).repeat_interleave(2, dim=0)
    value, gradient = value_and_gradients(HTLLoss(3, 3), embeddings, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert value.item() == 0
    assert gradient.abs().max() == 0


@pytest.mark.parametrize("levels", [0, -1, 2.5])
def test_levels_out_of_range_are_refused(levels: float) -> None:
    with pytest.raises(ValueError, match=f"levels as a whole number of at least 1, got {levels}"):
        HTLLoss(3, 4, levels=levels)
