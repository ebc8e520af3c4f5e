"""The clustering loss against loops written from its formulas, all sets of medoids, and scikit-learn's NMI."""

import itertools
import math
from collections import Counter

import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor

from proxygml.losses.clustering import (
    ClusteringLoss,
    assign,
    class_medoids,
    disagreement_of,
    disagreement_with,
    greedy_medoids,
    refined_medoids,
)
from tests.losses.test_every_loss import value_and_gradients

GAMMAS = [0.0, 0.5, 3.0, 10.0, 1000.0]


def random_batch(seed: int, images: int = 14, classes: int = 5, dimension: int = 4) -> tuple[Tensor, Tensor]:
    """Unit vectors (M, D) and labels (M,), of which some may be missing."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(images, dimension, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(vectors), torch.randint(classes, (images,), generator=generator)


def matrices(vectors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Distances (M, M) and same_class (M, M), as the search wants them."""
    return (vectors[:, None] - vectors).norm(dim=-1), labels[:, None] == labels


def line(*points: float) -> Tensor:
    return torch.tensor(points, dtype=torch.float64)[:, None]


class Slow:
    """The paper's formulas, one image and one candidate at a time."""

    def __init__(self, vectors: Tensor, labels: Tensor, gamma: float) -> None:
        self.vectors, self.labels, self.gamma = vectors, labels.tolist(), gamma
        self.images = range(len(vectors))
        self.distances = [[self.distance(i, j).item() for j in self.images] for i in self.images]

    def distance(self, i: int, j: int) -> Tensor:
        return ((self.vectors[i] - self.vectors[j]).pow(2).sum() + 1e-12).sqrt()

    def clusters(self, medoids: list[int]) -> list[int]:
        return [i if i in medoids else min(medoids, key=lambda j: self.distances[i][j]) for i in self.images]

    def delta(self, medoids: list[int]) -> float:
        clusters, images = self.clusters(medoids), len(self.images)
        in_class, in_cluster = Counter(self.labels), Counter(clusters)
        in_both = Counter(zip(self.labels, clusters, strict=True))
        if len(in_cluster) == 1:
            return 1.0 if len(in_class) > 1 else 0.0
        information = sum(
            n / images * math.log(images * n / (in_class[name] * in_cluster[medoid]))
            for (name, medoid), n in in_both.items()
        )
        entropies = [
            -sum(n / images * math.log(n / images) for n in count.values()) for count in (in_class, in_cluster)
        ]
        return 1 - information / math.sqrt(entropies[0] * entropies[1])

    def augmented_energy(self, medoids: list[int]) -> float:
        energy = -sum(min(self.distances[i][j] for j in medoids) for i in self.images)
        return energy + self.gamma * self.delta(medoids)

    def greedy(self) -> list[int]:
        medoids: list[int] = []
        for _ in set(self.labels):
            left = [i for i in self.images if i not in medoids]
            medoids.append(max(left, key=lambda i: self.augmented_energy([*medoids, i])))
        return medoids

    def pam(self, medoids: list[int], sweeps: int) -> list[int]:
        for _ in range(sweeps):
            clusters = self.clusters(medoids)
            for position, old in list(enumerate(medoids)):
                members = [i for i in self.images if clusters[i] == old]
                best = -math.inf
                for j in members:
                    replaced = [*medoids[:position], j, *medoids[position + 1 :]]
                    score = -sum(self.distances[i][j] for i in members) + self.gamma * self.delta(replaced)
                    if score > best:
                        best, chosen = score, replaced
                medoids = chosen
        return medoids

    def loss(self, sweeps: int = 5) -> Tensor:
        medoids = self.pam(self.greedy(), sweeps)
        energy = -sum(self.distance(i, j) for i, j in enumerate(self.clusters(medoids)))
        true_energy = 0.0
        for name in set(self.labels):
            members = [i for i in self.images if self.labels[i] == name]
            sums = [-sum(self.distance(i, j) for i in members) for j in members]
            true_energy = true_energy + max(sums, key=lambda value: value.item())
        return (energy + self.gamma * self.delta(medoids) - true_energy).clamp_min(0)


class TestByHand:
    def test_a_batch_whose_classes_lie_across_its_clusters(self) -> None:
        # F = -2, Delta = 1, F~ = -20
        loss = ClusteringLoss(2, 1, gamma=1.0)
        assert loss(line(0, 1, 10, 11), torch.tensor([0, 1, 0, 1])).item() == pytest.approx(19, abs=1e-5)
        assert loss.last_terms.energy_gap.item() == pytest.approx(18, abs=1e-5)
        assert loss.last_terms.disagreement.item() == pytest.approx(1, abs=1e-12)
        for gamma in (0.0, 7.0):
            value = ClusteringLoss(2, 1, gamma=gamma)(line(0, 1, 10, 11), torch.tensor([0, 1, 0, 1]))
            assert value.item() == pytest.approx(18 + gamma, abs=1e-5)

    def test_a_batch_whose_classes_are_its_clusters(self) -> None:
        assert ClusteringLoss(2, 1, gamma=1.0)(line(0, 1, 10, 11), torch.tensor([0, 0, 1, 1])).item() == 0

    def test_a_large_gamma_finds_a_wrong_clustering_even_then(self) -> None:
        # The best of six sets is {0, 1}: F = -9 - 10, clusters {0} and {1, 10, 11}, F~ = -2.
        # MI = 1/4 log 2 + 1/4 log(2/3) + 1/2 log(4/3), H(Y) = log 2, H(g) = 1/4 log 4 + 3/4 log(4/3)
        information = (math.log(2) + math.log(2 / 3) + 2 * math.log(4 / 3)) / 4
        entropy = (math.log(4) + 3 * math.log(4 / 3)) / 4
        delta = 1 - information / math.sqrt(math.log(2) * entropy)
        value = ClusteringLoss(2, 1, gamma=100.0)(line(0, 1, 10, 11), torch.tensor([0, 0, 1, 1]))
        assert value.item() == pytest.approx(-19 + 100 * delta + 2, abs=1e-5)


class TestAgainstALoop:
    @pytest.mark.parametrize("gamma", GAMMAS)
    @pytest.mark.parametrize("seed", range(4))
    def test_value_and_gradient_equal_it(self, gamma: float, seed: int) -> None:
        embeddings, labels = random_batch(seed)
        value, gradient = value_and_gradients(ClusteringLoss(5, 4, gamma=gamma), embeddings, labels)
        leaf = embeddings.clone().requires_grad_()
        expected = Slow(leaf, labels, gamma).loss()
        assert expected > 0
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, *torch.autograd.grad(expected, [leaf]), rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("gamma", GAMMAS)
    def test_medoids_equal_its_medoids_after_every_stage(self, gamma: float) -> None:
        refined = 0
        for seed in range(12):
            vectors, labels = random_batch(seed, images=30, classes=4, dimension=3)
            slow = Slow(vectors, labels, gamma)
            greedy, expected = greedy_medoids(*matrices(vectors, labels), len(labels.unique()), gamma), slow.greedy()
            assert greedy.tolist() == expected
            for sweeps in (0, 1, 5):
                medoids = refined_medoids(*matrices(vectors, labels), greedy, gamma, sweeps)
                assert medoids.tolist() == slow.pam(expected, sweeps)
            refined += not medoids.equal(greedy)
        assert refined > 0  # PAM found better medoids in some batch

    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.slow
    def test_the_gradient_is_that_of_finite_differences(self, seed: int) -> None:
        embeddings, labels = random_batch(seed)
        loss = ClusteringLoss(5, 4, gamma=3.0)
        assert torch.autograd.gradcheck(lambda x: loss(x, labels), [embeddings.requires_grad_()])


class TestAgainstAllSetsOfMedoids:
    @pytest.mark.parametrize("gamma", GAMMAS)
    def test_no_set_found_is_better_than_the_best(self, gamma: float) -> None:
        optimal = 0
        for seed in range(12):
            vectors, labels = random_batch(seed, images=5 + seed % 4, classes=3, dimension=2)
            slow, count = Slow(vectors, labels, gamma), len(labels.unique())
            best = max(slow.augmented_energy(list(medoids)) for medoids in itertools.combinations(slow.images, count))
            greedy = greedy_medoids(*matrices(vectors, labels), count, gamma)
            refined = refined_medoids(*matrices(vectors, labels), greedy, gamma, 5)
            found = [slow.augmented_energy(medoids.tolist()) for medoids in (greedy, refined)]
            assert len(set(refined.tolist())) == count
            assert max(found) <= best + 1e-9
            optimal += max(found) >= best - 1e-9
        assert optimal > 6  # of 12: a search that chose at random would rarely meet the best of up to 56 sets


class TestNormalizedMutualInformation:
    @pytest.mark.parametrize("seed", range(10))
    def test_equals_scikit_learns_with_the_geometric_mean(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        labels, clusters = torch.randint(seed + 1, (2, 40), generator=generator)
        expected = 1 - normalized_mutual_info_score(labels, clusters, average_method="geometric")
        value = disagreement_of(labels[:, None] == labels, clusters)
        assert value.item() == pytest.approx(expected, abs=1e-12)

    def test_disagreement_of_partitions(self) -> None:
        labels, one = torch.tensor([0, 0, 1, 2]), torch.zeros(4, dtype=torch.int64)
        same_class = labels[:, None] == labels
        assert disagreement_of(same_class, one) == 1
        assert disagreement_of(same_class, torch.tensor([5, 5, 0, 3])).item() == pytest.approx(0, abs=1e-15)
        assert disagreement_of(torch.ones(4, 4, dtype=torch.bool), one) == 0
        assert disagreement_of(torch.ones(4, 4, dtype=torch.bool), labels) == 1

    @pytest.mark.parametrize("seed", range(5))
    def test_candidates_at_once_or_in_turn(self, seed: int) -> None:
        vectors, labels = random_batch(seed, images=16)
        vectors[5], vectors[9] = vectors[2], vectors[2]  # a medoid, a candidate and a bystander at one place
        distances, same_class = matrices(vectors, labels)
        medoids, candidates = torch.tensor([7, 2, 11]), torch.tensor([0, 5, 8, 15])
        together = disagreement_with(distances, same_class, medoids, candidates)
        for candidate, value in zip(candidates, together, strict=True):
            clusters = assign(distances, torch.cat([medoids, candidate[None]]))
            expected = 1 - normalized_mutual_info_score(labels, clusters, average_method="geometric")
            assert value.item() == pytest.approx(expected, abs=1e-12)


def test_medoid_is_its_own_nearest() -> None:
    distances, _ = matrices(line(4, 4, 0, 5), torch.zeros(4))
    assert assign(distances, torch.tensor([1, 0, 2])).tolist() == [1, 0, 2, 0]


def test_medoid_of_a_class() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    # class 0 at 0, 2, 9: the middle one; class 1 at 1, 30, 31: the middle one
    medoids = class_medoids(*matrices(line(0, 2, 9, 31, 1, 30, 4), labels))
    assert medoids.tolist() == [1, 1, 1, 5, 5, 5, 6]


class TestProperties:
    @pytest.mark.parametrize("gamma", GAMMAS)
    def test_never_negative(self, gamma: float) -> None:
        for seed in range(30):
            embeddings, labels = random_batch(seed, images=2 + seed, classes=1 + seed // 3)
            assert ClusteringLoss(12, 4, gamma=gamma)(embeddings, labels) >= 0

    def test_classes_far_apart_cost_nothing_without_gamma(self) -> None:
        embeddings, labels = random_batch(0, images=20, classes=4)
        embeddings = 0.01 * embeddings + 5 * torch.eye(4, dtype=torch.float64)[labels]
        value, gradient = value_and_gradients(ClusteringLoss(4, 4, gamma=0.0), embeddings, labels)
        assert value.item() == pytest.approx(0, abs=1e-12)
        assert gradient.abs().max() < 1e-12

    def test_images_at_one_place_have_finite_gradients(self) -> None:
        embeddings, labels = random_batch(1)
        embeddings[3:9] = embeddings[2]
        value, gradient = value_and_gradients(ClusteringLoss(5, 4), embeddings, labels)
        assert value > 0
        assert gradient.isfinite().all()
        assert gradient.norm(dim=1).max() < 14  # at most 1 from each of the images that a medoid serves

    def test_collapsed_batch(self) -> None:
        loss = ClusteringLoss(2, 4, gamma=10.0)
        embeddings = torch.ones(6, 4)
        value, gradient = value_and_gradients(loss, embeddings, torch.tensor([0, 1, 0, 1, 0, 1]))
        # Distances are all 0, so that nothing but Delta is left, at most 1.
        assert value.item() == pytest.approx(10 * loss.last_terms.disagreement.item(), abs=1e-5)
        assert 0 < value <= 10
        assert gradient.abs().max() == 0

    def test_no_length_is_changed(self) -> None:
        embeddings, labels = random_batch(2)
        loss = ClusteringLoss(5, 4, gamma=0.0)
        torch.testing.assert_close(loss(3 * embeddings, labels), 3 * loss(embeddings, labels))


class TestGamma:
    def test_decays_by_the_epoch_alone(self) -> None:
        def embed() -> tuple[Tensor, Tensor]:
            raise AssertionError("not needed")

        loss = ClusteringLoss(2, 1)
        assert loss.gamma == 10
        for epoch in (0, 1, 7, 7, 2):  # a resumed run begins anywhere
            loss.begin_epoch(epoch, embed)
            assert loss.gamma == pytest.approx(10 * 0.94**epoch, rel=1e-12)
        other = ClusteringLoss(2, 1, gamma=3.0, gamma_decay=0.5)
        other.begin_epoch(2, embed)
        assert other(line(0, 1, 10, 11), torch.tensor([0, 1, 0, 1])).item() == pytest.approx(18.75, abs=1e-5)

    def test_terms_of_the_last_loss_add_up_and_carry_no_gradient(self) -> None:
        embeddings, labels = random_batch(4)
        loss = ClusteringLoss(5, 4, gamma=2.5)
        value = loss(embeddings.requires_grad_(), labels)
        terms = loss.last_terms
        torch.testing.assert_close(value.detach(), terms.energy_gap + 2.5 * terms.disagreement)
        assert not terms.energy_gap.requires_grad
        assert not terms.disagreement.requires_grad


def test_counts_are_exact_under_autocast() -> None:
    embeddings, labels = random_batch(0, images=600, classes=2)  # above 256 it holds even numbers only
    loss = ClusteringLoss(2, 4, gamma=1e5)
    plain = loss(embeddings.float(), labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss(embeddings.float(), labels) == plain


@pytest.mark.parametrize("options", [{"gamma": -1.0}, {"gamma_decay": math.nan}, {"sweeps": -1}, {"sweeps": 1.5}])
def test_settings_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=rf"expected .*{next(iter(options))}.* of at least 0, got"):
        ClusteringLoss(3, 4, **options)
