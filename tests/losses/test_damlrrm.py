"""The reconstruction of DAMLRRM against loops written from its formulas, all trees, scipy's trees and other losses."""

import itertools
import math
import re

import pytest
import torch
from pytorch_metric_learning import distances, losses
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree
from torch import Tensor

from proxygml.losses.damlrrm import BASES, DAMLRRMLoss, negative_pairs, spanning_trees
from tests.losses.test_every_loss import value_and_gradients

Pairs = set[tuple[int, int]]


def random_batch(seed: int, images: int = 16, classes: int = 5, dimension: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(images, dimension, generator=generator, dtype=torch.float64)
    return vectors, torch.randint(classes, (images,), generator=generator)


def at_degrees(*angles: float) -> Tensor:
    radians = torch.tensor(angles, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def squared_distances(vectors: Tensor) -> Tensor:
    return (vectors[:, None] - vectors).square().sum(dim=-1)


def edges_of(apart: Tensor, labels: Tensor) -> list[tuple[int, int]]:
    one, other = spanning_trees(apart, labels)
    return sorted((min(edge), max(edge)) for edge in zip(one.tolist(), other.tolist(), strict=True))


def pairs_of(labels: list[int], structured: int) -> Pairs:
    anchors, negatives = negative_pairs(torch.tensor(labels), structured)
    pairs = list(zip(anchors.tolist(), negatives.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    return set(pairs)


def slow_tree(apart: Tensor, members: list[int]) -> Pairs:
    """Prim's algorithm on one class: from its first member, always the shortest edge that leaves the tree."""
    tree, edges = {members[0]}, set()
    while len(tree) < len(members):
        leaving = [(i, j) for i in tree for j in members if j not in tree]
        one, other = min(leaving, key=lambda edge: apart[edge].item())
        tree.add(other)
        edges.add((one, other))
    return edges


def slow_loss(embeddings: Tensor, labels: Tensor, base: str, structured: int) -> Tensor:
    """The reconstruction with the lifted structure, multi-similarity and contrastive losses, pair by pair."""
    unit = embeddings / embeddings.norm(dim=1, keepdim=True)
    names, images = labels.tolist(), range(len(labels))
    apart = squared_distances(unit.detach())
    edges: Pairs = set()
    for name in set(names):
        edges |= slow_tree(apart, [i for i in images if names[i] == name])
    positives = edges | {(j, i) for i, j in edges}
    negatives: Pairs = set()
    for i in images:
        different = [j for j in images if names[j] != names[i]]
        across = [j for j in different if (i < structured) != (j < structured)]
        negatives |= {(i, j) for j in across or different}

    def distance(i: int, j: int) -> Tensor:
        return (unit[i] - unit[j]).pow(2).sum().sqrt()

    if base == "liftedstruct":
        total = 0.0
        for i, j in edges:
            pushed = sum((1 - distance(a, n)).exp() for a, n in negatives if a in (i, j))
            total = total + (pushed.log() + distance(i, j)).relu() ** 2
        return total / (2 * len(edges))
    if base == "contrastive":
        pulls = [distance(i, j) ** 2 for i, j in positives]
        pushes = [push for push in ((1 - distance(i, j) ** 2).relu() for i, j in negatives) if push > 0]
        return sum(pulls) / len(pulls) + sum(pushes) / max(1, len(pushes))
    total = 0.0
    for i in images:
        pulls = [(-2 * (unit[i] @ unit[j] - 0.5)).exp() for a, j in positives if a == i]
        pushes = [(50 * (unit[i] @ unit[j] - 0.5)).exp() for a, j in negatives if a == i]
        total = total + torch.log1p(sum(pulls, torch.zeros(()))) / 2 + torch.log1p(sum(pushes, torch.zeros(()))) / 50
    return total / len(labels)


class TestTrees:
    def test_points_on_a_line_are_joined_to_their_neighbors(self) -> None:
        points = torch.tensor([[0.0], [1], [3], [7]])
        assert edges_of(squared_distances(points), torch.zeros(4, dtype=torch.int64)) == [(0, 1), (1, 2), (2, 3)]
        shuffled = points[[2, 0, 3, 1]]  # 3, 0, 7, 1
        assert edges_of(squared_distances(shuffled), torch.zeros(4, dtype=torch.int64)) == [(0, 2), (0, 3), (1, 3)]

    def test_classes_have_trees_of_their_own(self) -> None:
        points = torch.tensor([[0.0], [0.5], [1], [1.5], [7], [9]])
        labels = torch.tensor([3, 0, 3, 0, 3, 8])
        assert edges_of(squared_distances(points), labels) == [(0, 2), (1, 3), (2, 4)]

    @pytest.mark.parametrize("seed", range(8))
    def test_equal_prims_algorithm_and_scipy(self, seed: int) -> None:
        vectors, labels = random_batch(seed, images=30)
        apart = squared_distances(vectors)
        edges = edges_of(apart, labels)
        for name in labels.unique().tolist():
            members = (labels == name).nonzero()[:, 0].tolist()
            own = [edge for edge in edges if edge[0] in members]
            assert set(own) == {(min(edge), max(edge)) for edge in slow_tree(apart, members)}
            expected = minimum_spanning_tree(apart[members][:, members].numpy()).sum()
            assert sum(apart[edge].item() for edge in own) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("seed", range(4))
    def test_no_other_tree_is_shorter(self, seed: int) -> None:
        vectors, _ = random_batch(seed, images=5)
        apart = squared_distances(vectors)
        chosen = edges_of(apart, torch.zeros(5, dtype=torch.int64))
        weights = {}
        for edges in itertools.combinations(itertools.combinations(range(5), 2), 4):
            graph = torch.zeros(5, 5)
            graph[tuple(zip(*edges, strict=True))] = 1
            if connected_components(graph.numpy(), directed=False)[0] == 1:
                weights[edges] = sum(apart[edge].item() for edge in edges)
        assert len(weights) == 5**3  # Cayley's number of trees on 5 points
        assert min(weights, key=weights.get) == tuple(chosen)

    @pytest.mark.parametrize("images", [2, 3, 6])
    def test_images_at_one_place_are_joined_too(self, images: int) -> None:
        edges = edges_of(torch.zeros(images, images), torch.zeros(images, dtype=torch.int64))
        assert len(edges) == images - 1
        graph = torch.zeros(images, images)
        graph[tuple(zip(*edges, strict=True))] = 1
        assert connected_components(graph.numpy(), directed=False)[0] == 1

    def test_tiny_differences_decide(self) -> None:
        apart = torch.tensor([[0, 3e-9, 2e-9], [3e-9, 0, 1e-9], [2e-9, 1e-9, 0]], dtype=torch.float64)
        assert edges_of(apart, torch.zeros(3, dtype=torch.int64)) == [(0, 2), (1, 2)]

    def test_an_image_alone_in_its_class_has_no_edge(self) -> None:
        one, other = spanning_trees(torch.rand(3, 3), torch.tensor([0, 1, 2]))
        assert one.shape == other.shape == (0,)
        assert one.dtype == torch.int64


class TestNegativePairs:
    def test_are_of_different_class_and_stream_in_both_orders(self) -> None:
        assert pairs_of([0, 1, 0, 2], structured=2) == {(0, 3), (1, 2), (1, 3), (2, 1), (3, 0), (3, 1)}

    def test_an_anchor_without_any_takes_all_of_other_classes(self) -> None:
        # Image 2 sees only its own class in the other stream, which is image 3.
        assert pairs_of([0, 0, 1, 1], structured=3) == {(0, 3), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)}

    def test_with_one_stream_are_all_of_different_class(self) -> None:
        assert pairs_of([0, 1, 0], structured=3) == {(0, 1), (1, 0), (1, 2), (2, 1)}

    def test_one_class_has_none(self) -> None:
        assert pairs_of([4, 4, 4], structured=2) == set()


class TestByHand:
    angles, labels = (0, 60, 90, 180), torch.tensor([0, 0, 1, 1])  # 3 of the 4 are the structured stream
    near = 2 * math.sin(math.radians(15))  # between 60 and 90 degrees

    def test_lifted_structure(self) -> None:
        # Negatives: 0-3, 1-3 across the streams; 2 has none across, so 2-0, 2-1; 3-0, 3-1.
        first = math.log(math.exp(1 - 2) + math.exp(1 - math.sqrt(3))) + 1
        terms = [1 - math.sqrt(2), 1 - self.near, 1 - 2, 1 - math.sqrt(3)]
        second = math.log(sum(math.exp(term) for term in terms)) + math.sqrt(2)
        value = DAMLRRMLoss(2, 2, base="liftedstruct")(at_degrees(*self.angles), self.labels)
        assert value.item() == pytest.approx((first**2 + second**2) / 4, abs=1e-6)

    def test_contrastive(self) -> None:
        # Squared distances of the positives are 1 and 2; of the negatives only 2-1 is within the margin.
        value = DAMLRRMLoss(2, 2, base="contrastive")(at_degrees(*self.angles), self.labels)
        assert value.item() == pytest.approx(1.5 + 1 - self.near**2, abs=1e-6)

    def test_a_wider_margin(self) -> None:
        value = DAMLRRMLoss(2, 2, base="contrastive", margin=2.5)(at_degrees(*self.angles), self.labels)
        assert value.item() == pytest.approx(1.5 + (0.5 + 2.5 - self.near**2) / 2, abs=1e-6)  # 2-0 and 2-1

    def test_multi_similarity(self) -> None:
        def anchor(positive: float, *negatives: float) -> float:
            pushed = sum(math.exp(50 * (cosine - 0.5)) for cosine in negatives)
            return math.log1p(math.exp(-2 * (positive - 0.5))) / 2 + math.log1p(pushed) / 50

        half, root = 0.5, math.cos(math.radians(30))
        expected = (anchor(half, -1) + anchor(half, -half) + anchor(0, 0, root) + anchor(0, -1, -half)) / 4
        value = DAMLRRMLoss(2, 2, base="ms")(at_degrees(*self.angles), self.labels)
        assert value.item() == pytest.approx(expected, abs=1e-9)

    def test_the_longest_side_of_a_class_of_three_is_not_pulled(self) -> None:
        value = DAMLRRMLoss(2, 2, base="contrastive")(at_degrees(0, 60, 120, 240), torch.tensor([0, 0, 0, 1]))
        assert value.item() == pytest.approx(1, abs=1e-6)  # 0-60 and 60-120, not 0-120, whose square is 3


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("share", "structured"), [(0.75, 12), (0.5, 8), (0.6, 10), (1.0, 16)])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_a_loop(base: str, share: float, structured: int, seed: int) -> None:
    embeddings, labels = random_batch(seed)
    value, gradient = value_and_gradients(DAMLRRMLoss(5, 4, base=base, structured_fraction=share), embeddings, labels)
    leaf = embeddings.clone().requires_grad_()
    expected = slow_loss(leaf, labels, base, structured)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, *torch.autograd.grad(expected, [leaf]), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ("liftedstruct", losses.LiftedStructureLoss(neg_margin=1, pos_margin=0)),
        ("contrastive", losses.ContrastiveLoss(distance=distances.LpDistance(power=2))),
        ("ms", losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)),
    ],
)
def test_pairs_in_one_stream_give_the_base_loss_itself(base: str, other: torch.nn.Module) -> None:
    embeddings, _ = random_batch(0)
    labels = torch.arange(16) // 2
    loss = DAMLRRMLoss(8, 4, base=base, structured_fraction=1.0)
    torch.testing.assert_close(
        value_and_gradients(loss, embeddings, labels), value_and_gradients(other, embeddings, labels)
    )


@pytest.mark.parametrize("base", BASES)
class TestEveryBase:
    def test_the_streams_matter(self, base: str) -> None:
        embeddings, labels = random_batch(1)
        loss = DAMLRRMLoss(5, 4, base=base)
        assert (loss(embeddings, labels) - loss(embeddings.flip(0), labels.flip(0))).abs() > 1e-3

    @pytest.mark.parametrize("images", [8, 40])  # torch.cdist has another algorithm above 25 rows
    def test_equal_and_zero_vectors(self, base: str, images: int) -> None:
        embeddings, labels = random_batch(2, images=images)
        embeddings[1:5] = embeddings[0]
        embeddings[6] = 0
        value, gradient = value_and_gradients(DAMLRRMLoss(5, 4, base=base), embeddings.float(), labels)
        assert value > 0
        assert gradient.isfinite().all()


@pytest.mark.parametrize(("images", "structured"), [(32, 24), (10, 8), (9, 7), (6, 4)])  # 7.5 to 8, 4.5 to 4
def test_three_quarters_of_a_batch_are_the_structured_stream(images: int, structured: int) -> None:
    embeddings, _ = random_batch(0, images=images, dimension=2)
    labels = torch.arange(images) % 3
    value = DAMLRRMLoss(3, 2, base="liftedstruct")(embeddings, labels)
    for count in (structured - 1, structured, structured + 1):
        expected = slow_loss(embeddings, labels, "liftedstruct", count)
        assert (value.item() == pytest.approx(expected.item(), rel=1e-6)) == (count == structured)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "triplet"}, "expected a base among liftedstruct, contrastive, ms, got 'triplet'"),
        ({"structured_fraction": 0.0}, "expected a structured_fraction above 0 and up to 1, got 0.0"),
        ({"structured_fraction": 1.5}, "got 1.5"),
        ({"structured_fraction": math.nan}, "got nan"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DAMLRRMLoss(3, 4, **options)
