"""The ProxyGML loss against loops written from the paper, cases done by hand, and other libraries."""

import itertools
import math
import re
import unittest.mock
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pytorch_metric_learning import losses as pml
from torch import Tensor

from benchmarks.profiling import allocations
from proxygml import ProxyGMLLoss
from proxygml.losses.proxygml import chunked, topk
from proxygml.losses.proxygml.chunked import link
from proxygml.losses.proxygml.definition import NO_POSITIVE_LINK
from proxygml.losses.proxygml.fused import fits_fused
from proxygml.losses.proxygml.gradients import proxy_regularizer
from proxygml.losses.proxygml.settings import ABOVE_ANY_COSINE, choose_links
from tests.losses import oracle
from tests.losses.test_every_loss import value_and_gradients

TABLE_1 = list(itertools.product([False, True], repeat=3))  # S^pos, M, L^p: the eight rows of the ablation
pytestmark = pytest.mark.filterwarnings("ignore:.*every link of a sample")


def loss_with(proxies: Tensor, **options: object) -> ProxyGMLLoss:
    """A loss with these proxies (C, N, D)."""
    classes, per_class, dimension = proxies.shape
    loss = ProxyGMLLoss(classes, dimension, proxies_per_class=per_class, **options).to(proxies.dtype)
    with torch.no_grad():
        loss.proxies.copy_(proxies)
    return loss


EAST = torch.tensor([[1.0, 0.0]], dtype=torch.float64)


def at_cosines(*classes: list[float]) -> Tensor:
    """Proxies (C, N, 2) of length 2 that have these cosines with EAST."""
    cosines = torch.tensor(classes, dtype=torch.float64)
    return 2 * torch.stack([cosines, (1 - cosines.square()).sqrt()], dim=-1)


@st.composite
def problems(draw: st.DrawFn) -> dict:
    """A random batch and random proxies of random shape and scale."""
    classes, per_class, dimension, batch = (draw(st.integers(1, high)) for high in (6, 4, 5, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([1e-3, 1.0, 100.0]))
    return {
        "proxies": torch.randn(classes, per_class, dimension, generator=generator, dtype=torch.float64) / scale,
        "embeddings": torch.randn(batch, dimension, generator=generator, dtype=torch.float64) * scale,
        "labels": torch.randint(classes, (batch,), generator=generator),
        "ratio": draw(st.floats(0.01, 1.2)),
        "weight": draw(st.sampled_from([0.05, 0.3, 1.0, 7.0])),
        "softmax_scale": draw(st.sampled_from([1.0, 0.5, 8.0])),
    }


PATHS = {  # implementation, and constants that send it through each of its branches
    "definition": ("definition", {}),
    "fused, gradients by matrix products": ("fused", {"SPARSE_LINKS": 0}),
    "fused, gradients by sums over links": ("fused", {"SPARSE_LINKS": 1}),
    "chunked, gradients by matrix products": ("chunked", {"SPARSE_LINKS": 0, "PROXY_ELEMENTS": 6}),
    "chunked, gradients by sums over links": ("chunked", {"SPARSE_LINKS": 1}),
    "chunks": ("chunked", {"PROXY_ELEMENTS": 6, "CHUNK_ELEMENTS": 9, "SPARSE_LINKS": 1}),
    "chunks and blocks": ("chunked", {"CHUNK_ELEMENTS": 20, "BLOCKS": (2,)}),
    "chunks and tiles": ("chunked", {"CHUNK_ELEMENTS": 200, "PROXY_ELEMENTS": 60, "BLOCKS": (4, 2)}),
    "sparse gradient": ("chunked", {"PROXY_ELEMENTS": 6}),
}


@contextmanager
def taking(path: str, loss: ProxyGMLLoss) -> Iterator[None]:
    """In which a loss takes one of the PATHS."""
    loss.implementation, constants = PATHS[path]
    with ExitStack() as changed:
        for name, number in constants.items():
            module = chunked if name == "SPARSE_LINKS" else topk
            changed.enter_context(unittest.mock.patch.object(module, name, number))
        yield


@pytest.mark.parametrize(
    ("fits", "classes", "batch", "options"),
    [
        (True, 98, 32, {}),
        (True, 98, 32, {"proxy_weight": 0}),
        (False, 350, 32, {}),  # chunks are faster
        (False, 98, 2000, {}),  # too much memory
        (False, 98, 32, {"proxy_weight": 0, "sparse_gradient": True}),
        (False, 98, 32, {"proxy_rows": 50}),
    ],
)
def test_fused_runs_for_few_proxies_that_fit_in_memory(fits: bool, classes: int, batch: int, options: dict) -> None:
    loss = ProxyGMLLoss(classes, 4, **options)
    assert fits_fused(batch, loss.proxies, loss.settings) == fits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("positive_mask", "mask_softmax", "regularized"), TABLE_1)
@settings(max_examples=20, deadline=None)
@given(problem=problems(), literal=st.booleans(), path=st.sampled_from(list(PATHS)))
def test_every_implementation_equals_the_oracle(
    dtype: torch.dtype,
    positive_mask: bool,
    mask_softmax: bool,
    regularized: bool,
    problem: dict,
    literal: bool,
    path: str,
) -> None:
    proxies, embeddings = problem["proxies"].to(dtype), problem["embeddings"].to(dtype)
    sparse = "sparse" in path
    regularized = regularized and not sparse
    loss = loss_with(
        proxies,
        sparse_gradient=sparse,
        ratio=problem["ratio"],
        proxy_weight=problem["weight"] * regularized,
        positive_mask=positive_mask,
        mask_softmax=mask_softmax,
        literal_mask=literal,
        scale=problem["softmax_scale"],
    )
    expected, embedding_gradient, proxy_gradient, gap = oracle.value_and_gradients(
        embeddings,
        problem["labels"],
        proxies,
        links=min(proxies.shape[0] * proxies.shape[1], max(1, math.ceil(problem["ratio"] * proxies[..., 0].numel()))),
        proxy_weight=problem["weight"] * regularized,
        positive_bonus=0 if not positive_mask else 1 if literal else 1000,
        mask_softmax=mask_softmax,
        scale=problem["softmax_scale"],
    )
    assume(gap > 1e-5)  # a tie is decided by neither
    with taking(path, loss):
        value, *gradients = value_and_gradients(loss, embeddings, problem["labels"])
    gradients = [gradient.to_dense() for gradient in gradients]
    # Gradients scale with the inverse length of what is normalized, so they are compared at unit length.
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)
    for actual, wanted, vectors in zip(
        gradients, [embedding_gradient, proxy_gradient], [embeddings, proxies], strict=True
    ):
        length = vectors.double().norm(dim=-1, keepdim=True)
        torch.testing.assert_close(actual.double() * length, wanted * length, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("positive_mask", "mask_softmax", "regularized"), TABLE_1)
def test_gradcheck_passes_for_every_row_of_the_ablation(
    positive_mask: bool, mask_softmax: bool, regularized: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    loss = loss_with(
        torch.randn(4, 3, 5, generator=generator, dtype=torch.float64),
        links=5,
        proxy_weight=0.3 * regularized,
        positive_mask=positive_mask,
        mask_softmax=mask_softmax,
    )
    embeddings = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 3])

    def as_function(embeddings: Tensor, proxies: Tensor) -> Tensor:
        return torch.func.functional_call(loss, {"proxies": proxies}, (embeddings, labels))

    assert torch.autograd.gradcheck(as_function, (embeddings, loss.proxies))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("per_class", [32, 33, 200])
def test_extreme_proxy_scores_have_a_finite_loss(per_class: int, dtype: torch.dtype) -> None:
    angles = torch.zeros(2, per_class, dtype=torch.float64)  # all but one of class 0 are opposite to class 1, and
    angles[0, 0] = angles[1] = math.pi  # that one has a Z^p of 2 - N for its own class and N for the other
    angles += torch.rand(angles.shape, generator=torch.Generator().manual_seed(0)) / 10
    proxies = torch.stack([angles.cos(), angles.sin()], dim=-1).requires_grad_()
    similarity = proxies.flatten(0, 1) @ proxies.flatten(0, 1).T
    scores = similarity @ torch.eye(2, dtype=torch.float64).repeat_interleave(per_class, dim=0)  # (2N, 2)
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 1]).repeat_interleave(per_class))
    (gradient,) = torch.autograd.grad(expected, proxies)
    gradient -= (gradient * proxies.detach()).sum(-1, keepdim=True) * proxies.detach()  # through normalization

    loss = loss_with(proxies.detach().to(dtype), proxy_weight=1, links=1)
    loss(torch.ones(1, 2, dtype=dtype), torch.tensor([0])).backward()
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(loss.last_terms.proxy_loss.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(loss.proxies.grad.double(), gradient, rtol=0, atol=tolerance / 30)  # it is 1e-4 or more


@pytest.mark.parametrize("per_class", [12, 32, 33])
def test_tiny_proxy_loss_is_accurate(per_class: int) -> None:
    """Z^p has errors of a millionth of N in float32, and the loss is not to have them too."""
    torch.manual_seed(0)
    loss = loss_with(torch.eye(40)[:, None] + torch.randn(40, per_class, 40) / 1000, proxy_weight=1, links=1)
    loss(torch.ones(1, 40), torch.tensor([0]))
    unit = torch.nn.functional.normalize(loss.proxies.detach().double(), dim=-1)
    scores = unit.flatten(0, 1) @ unit.sum(dim=1).T  # (CN, C)
    expected = torch.nn.functional.cross_entropy(scores, torch.arange(40).repeat_interleave(per_class))
    found = loss.last_terms.proxy_loss.double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    assert found >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("path", [path for path in PATHS if "matrix products" not in path])
def test_opposite_samples_without_mask(path: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    proxies = torch.ones(5, 4, 3, dtype=dtype) + torch.randn(5, 4, 3, generator=generator, dtype=dtype) / 10
    embeddings, labels = -torch.ones(2, 3, dtype=dtype), torch.tensor([0, 3])
    scale = 500.0  # times a sum of four cosines of almost -1
    loss = loss_with(
        proxies, ratio=1, mask_softmax=False, proxy_weight=0, scale=scale, sparse_gradient="sparse" in path
    )
    with taking(path, loss):
        value, *gradients = value_and_gradients(loss, embeddings, labels)
    unit = torch.nn.functional.normalize(proxies.double(), dim=-1).sum(dim=1)  # (C, D)
    scores = scale * torch.nn.functional.normalize(embeddings.double()) @ unit.T
    expected = torch.nn.functional.cross_entropy(scores, labels)
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)
    assert all(gradient.to_dense().isfinite().all() for gradient in gradients)


def test_gradient_is_probability_minus_target() -> None:
    generator = torch.Generator().manual_seed(0)
    proxies = torch.nn.functional.normalize(torch.randn(5, 2, 16, generator=generator, dtype=torch.float64), dim=-1)
    embeddings = torch.nn.functional.normalize(torch.randn(4, 16, generator=generator, dtype=torch.float64), dim=-1)
    labels = torch.tensor([0, 1, 2, 4])
    loss = loss_with(proxies, links=6, proxy_weight=0)
    _, _, proxy_gradient = value_and_gradients(loss, embeddings, labels)

    similarity = torch.einsum("bd,cnd->bcn", embeddings, proxies)
    linked = torch.zeros_like(similarity, dtype=torch.bool)
    linked.flatten(1).scatter_(1, link(embeddings, proxies, labels, 6, ABOVE_ANY_COSINE).linked, True)
    assert linked.flatten(1).sum(dim=1).tolist() == [6] * 4
    probability = (similarity * linked).sum(-1).masked_fill(~linked.any(-1), -math.inf).softmax(-1)
    expected = linked * (probability - torch.nn.functional.one_hot(labels, 5))[:, :, None] / 4  # dL/dS
    through_normalization = torch.einsum("bcn,bd->cnd", expected, embeddings)
    through_normalization -= (through_normalization * proxies).sum(-1, keepdim=True) * proxies
    torch.testing.assert_close(proxy_gradient, through_normalization)


class TestTheCasesDoneByHand:
    PROXIES = torch.eye(2, dtype=torch.float64)[:, None]  # class 0 at e1, class 1 at e2
    SAMPLE = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    LABEL = torch.tensor([0])

    def test_two_classes_fully_linked(self) -> None:
        loss = loss_with(self.PROXIES, ratio=1, proxy_weight=0.3)
        assert loss(self.SAMPLE, self.LABEL).item() == pytest.approx(0.8921174, abs=1e-7)
        assert loss.last_terms.sample_loss.item() == pytest.approx(math.log(1 + math.exp(0.2)), abs=1e-12)
        assert loss.last_terms.proxy_loss.item() == pytest.approx(math.log(1 + math.exp(-1)), abs=1e-12)

    def test_one_link_is_the_positive(self) -> None:
        value, *gradients = value_and_gradients(
            loss_with(self.PROXIES, ratio=0.5, proxy_weight=0), self.SAMPLE, self.LABEL
        )
        assert value.item() == 0
        assert all(gradient.abs().max() == 0 for gradient in gradients)

    def test_one_link_without_positive_mask(self) -> None:
        loss = loss_with(self.PROXIES, ratio=0.5, proxy_weight=0, positive_mask=False, mask_softmax=False)
        assert loss(self.SAMPLE, self.LABEL).item() == pytest.approx(math.log(1 + math.exp(0.8)), abs=1e-12)
        assert loss.last_terms.unlinked_fraction.item() == 1

    def test_sample_without_positive_link(self) -> None:
        loss = loss_with(self.PROXIES, ratio=0.5, proxy_weight=0, positive_mask=False)
        value, *gradients = value_and_gradients(loss, self.SAMPLE, self.LABEL)
        assert value.item() == pytest.approx(46.0517, abs=1e-4) == pytest.approx(NO_POSITIVE_LINK, abs=1e-4)
        assert all(gradient.abs().max() == 0 for gradient in gradients)

    @pytest.mark.parametrize(("label", "expected"), [(0, 1.5514447), (1, 0.5514447)])
    def test_an_orthogonal_proxy_that_is_linked_still_counts(self, label: int, expected: float) -> None:
        """Where Z == 0 makes the mask, as in the authors' code, these are 46.05 and 0."""
        loss = loss_with(torch.eye(3, dtype=torch.float64)[:, None], ratio=1, proxy_weight=0)
        sample = torch.eye(3, dtype=torch.float64)[1:2]
        assert loss(sample, torch.tensor([label])).item() == pytest.approx(expected, abs=1e-6)

    def test_literal_mask_drops_a_positive(self) -> None:
        proxies = at_cosines([-0.6], [0.8], [0.9])  # own class at -.6: -.6 + 1 < .8
        assert link(EAST, proxies, self.LABEL, 1, ABOVE_ANY_COSINE)[0].tolist() == [[0]]
        assert link(EAST, proxies, self.LABEL, 1, 1.0)[0].tolist() == [[2]]

        safe, literal = (
            loss_with(proxies, links=1, proxy_weight=0, literal_mask=literal)(EAST, self.LABEL).item()
            for literal in (False, True)
        )
        assert safe == 0
        assert literal == pytest.approx(NO_POSITIVE_LINK)


class TestLimitCases:
    @pytest.fixture
    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(7)
        proxies = torch.randn(6, 3, 8, generator=generator)
        return proxies, torch.randn(10, 8, generator=generator), torch.randint(6, (10,), generator=generator)

    def test_one_proxy_is_normalized_softmax(self, batch) -> None:
        proxies, embeddings, labels = batch
        ours = loss_with(proxies[:, :1], ratio=1, proxy_weight=0)(embeddings, labels)
        for other, weight, transpose in [
            (pml.NormalizedSoftmaxLoss(6, 8, temperature=1), "W", True),
            (pml.CosFaceLoss(6, 8, margin=0, scale=1), "W", True),
            (pml.ProxyNCALoss(6, 8, softmax_scale=0.5), "proxies", False),
        ]:
            with torch.no_grad():
                getattr(other, weight).copy_(proxies[:, 0].T if transpose else proxies[:, 0])
            torch.testing.assert_close(other(embeddings, labels), ours)

    def test_scale_is_inverse_temperature(self, batch) -> None:
        proxies, embeddings, labels = batch
        other = pml.NormalizedSoftmaxLoss(6, 8, temperature=0.05)
        with torch.no_grad():
            other.W.copy_(proxies[:, 0].T)
        ours = loss_with(proxies[:, :1], ratio=1, proxy_weight=0, scale=20)
        torch.testing.assert_close(ours(embeddings, labels), other(embeddings, labels))

    def test_fully_linked_proxies_add_up(self, batch) -> None:
        proxies, embeddings, labels = batch
        normalize = torch.nn.functional.normalize
        ours = loss_with(proxies, ratio=1, proxy_weight=0)(embeddings, labels)
        logits = normalize(embeddings) @ normalize(proxies, dim=-1).sum(dim=1).T
        torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(logits, labels))
        soft_triple = pml.SoftTripleLoss(6, 8, centers_per_class=3, la=3, gamma=1e9, margin=0)
        with torch.no_grad():
            soft_triple.fc.copy_(proxies.flatten(0, 1).T)
        torch.testing.assert_close(ours, soft_triple(embeddings, labels))

    def test_order_and_length_do_not_matter(self, batch) -> None:
        proxies, embeddings, labels = (x.double() if x.is_floating_point() else x for x in batch)
        loss = loss_with(proxies, ratio=0.5)(embeddings, labels)
        torch.testing.assert_close(loss_with(proxies[:, [2, 0, 1]], ratio=0.5)(embeddings, labels), loss)
        torch.testing.assert_close(loss_with(proxies * 5, ratio=0.5)(embeddings / 9, labels), loss)

    @pytest.mark.parametrize(
        ("classes", "links", "bound"),
        [(40, 12, math.log(1 + 11 * math.exp(-2))), (11318, 566, 4.3498), (98, 98, 2.648), (98, 98, -math.log(0.0708))],
    )
    def test_lower_bound_with_one_proxy(self, classes: int, links: int, bound: float) -> None:
        best = torch.zeros(classes, 1, 2, dtype=torch.float64)
        best[:, 0, 0] = -1
        best[0, 0, 0] = 1  # the sample's own proxy on top of it, all others opposite
        value = loss_with(best, links=links, proxy_weight=0)(torch.tensor([[2.0, 0]]).double(), torch.tensor([0]))
        assert value.item() == pytest.approx(bound, abs=5e-4)
        assert value.item() == pytest.approx(math.log(1 + (links - 1) * math.exp(-2)), abs=1e-12)

    def test_fewer_links_than_positives(self) -> None:
        proxies = at_cosines([0.1, 0.9, 0.5], [1.0, 1.0, 1.0])
        linked, cosines, *_ = link(EAST, proxies, torch.tensor([0]), 2, ABOVE_ANY_COSINE)
        assert linked.tolist() == [[1, 2]]
        assert cosines[0].tolist() == pytest.approx([0.9, 0.5])

    def test_zero_vectors_are_similar_to_nothing(self) -> None:
        proxies = torch.tensor([[[0.0, 0]], [[1.0, 0]]])
        loss = loss_with(proxies, ratio=1, proxy_weight=0.3)
        value, *gradients = value_and_gradients(loss, torch.tensor([[0.0, 0], [1, 0]]), torch.tensor([1, 1]))
        # Similarities are 0 and 0 for the first sample, 0 and 1 for the second: log 2 and log(1 + 1/e).
        expected = (math.log(2) + math.log(1 + math.exp(-1))) / 2
        assert loss.last_terms.sample_loss.item() == pytest.approx(expected, abs=1e-6)
        assert value.isfinite()
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("classes", "per_class", "ratio", "links"),
    [
        (100, 12, 0.05, 60),
        (98, 12, 0.05, 59),
        (11318, 1, 0.05, 566),
        (100, 12, 0.07, 84),
        (98, 49, 0.01, 49),
        (98, 50, 0.01, 49),
        (5, 2, 3.0, 10),
        (9, 1, 1e-6, 1),
    ],
)
def test_links_are_the_papers_share_of_all_proxies(classes: int, per_class: int, ratio: float, links: int) -> None:
    assert choose_links(classes, per_class, ratio) == links


def test_links_instead_of_ratio() -> None:
    assert ProxyGMLLoss(1000, 4, proxies_per_class=1, links=37).links == 37
    assert ProxyGMLLoss(3, 4, proxies_per_class=2, links=99).links == 6


def test_proxies_start_as_in_the_authors_code() -> None:
    torch.manual_seed(0)
    proxies = ProxyGMLLoss(98, 512).proxies
    assert proxies.shape == (98, 12, 512)
    assert proxies.abs().max() <= 1 / math.sqrt(98 * 12)
    assert proxies.norm(dim=-1).mean().item() == pytest.approx(math.sqrt(512 / 3 / (98 * 12)), abs=0.002)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_autocast_on_cuda_changes_nothing() -> None:
    loss = ProxyGMLLoss(20, 32).cuda()
    embeddings, labels = torch.randn(8, 32, device="cuda"), torch.randint(20, (8,))
    plain = loss(embeddings, labels)
    with torch.autocast("cuda"):
        torch.testing.assert_close(loss(embeddings, labels), plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, "ratio above 0"),
        ({"ratio": math.nan}, "ratio above 0"),
        ({"ratio": math.inf}, "ratio above 0"),
        ({"links": 0}, "links as a whole number of at least 1"),
        ({"links": 20.5}, "links as a whole number of at least 1, got 20.5"),
        ({"proxies_per_class": 0}, "proxies_per_class as a whole number of at least 1"),
        ({"proxy_weight": -0.1}, "proxy_weight of at least 0"),
        ({"proxy_weight": math.inf}, "proxy_weight of at least 0"),
        ({"scale": 0.0}, "scale above 0"),
        ({"scale": math.inf}, "scale above 0"),
        ({"links": math.inf}, "links as a whole number of at least 1, got inf"),
        ({"proxies_per_class": 2.0}, "proxies_per_class as a whole number of at least 1, got 2.0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProxyGMLLoss(3, 4, **options)


@pytest.mark.filterwarnings("default")
class TestASettingThatLinksNoNegatives:
    def test_warns_with_a_better_ratio(self) -> None:
        with pytest.warns(UserWarning, match=r"no negative is linked .* links of at least 13") as caught:
            ProxyGMLLoss(98, 4, ratio=0.01)
        ratio = float(re.search(r"ratio of at least ([0-9.]+)", str(caught[0].message)).group(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ProxyGMLLoss(98, 4, ratio=ratio).links == 13

    def test_one_class_is_told_that_no_ratio_helps(self) -> None:
        with pytest.warns(UserWarning, match="with one class there is nothing to separate"):
            ProxyGMLLoss(1, 4, ratio=1)

    def test_no_warning_without_positive_mask(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ProxyGMLLoss(98, 4, ratio=0.01, positive_mask=False)

    def test_still_trains_the_proxies_through_their_regularizer(self) -> None:
        with pytest.warns(UserWarning, match="no negative"):
            loss = ProxyGMLLoss(4, 3, proxies_per_class=2, links=2)
        embeddings = torch.randn(5, 3, requires_grad=True)
        loss(embeddings, torch.tensor([0, 1, 2, 3, 0])).backward()
        assert embeddings.grad.abs().max() < 1e-7
        assert loss.proxies.grad.abs().max() > 1e-4


def test_terms_of_the_last_loss_add_up_and_carry_no_gradient() -> None:
    loss = ProxyGMLLoss(10, 6, proxies_per_class=3, ratio=0.5, proxy_weight=0.7)
    value = loss(torch.randn(4, 6), torch.arange(4))
    terms = loss.last_terms
    torch.testing.assert_close(value.detach(), terms.sample_loss + 0.7 * terms.proxy_loss)
    assert not terms.sample_loss.requires_grad
    assert not terms.proxy_loss.requires_grad
    assert terms.unlinked_fraction.item() == 0
    without = ProxyGMLLoss(10, 6, proxies_per_class=3, ratio=0.5, proxy_weight=0)
    without(torch.randn(4, 6), torch.arange(4))
    assert without.last_terms.proxy_loss is None


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 200),
    columns=st.integers(1, 30),
    share=st.floats(0, 1),
    levels=st.sampled_from([2, 10, 10**6]),
)
def test_two_round_topk(rows: int, width: int, columns: int, share: float, levels: int) -> None:
    count = round(share * width)
    values = torch.randint(levels, (rows, width)).float()
    with unittest.mock.patch.multiple(topk, BLOCKS=(8, 4, 2)):
        found, ranks = topk._topk(in_tiles(values, columns), count)
    assert found.shape == (rows, count)
    assert all(len(set(row)) == count for row in found.tolist())
    assert torch.equal(values.gather(1, found), ranks)
    assert torch.equal(ranks.sort(descending=True).values, values.topk(count).values)


def in_tiles(values: torch.Tensor, columns: int) -> torch.Tensor:
    """(B, P) -> (tiles, B, columns), as many tiles as eight divides, filled up with -inf."""
    missing = -values.shape[1] % (8 * columns)
    filled = torch.nn.functional.pad(values, (0, missing), value=-math.inf)
    return filled.unflatten(1, (-1, columns)).permute(1, 0, 2).contiguous()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 60),
    columns=st.integers(1, 9),
    share=st.floats(0, 1),
    size=st.sampled_from([1, 2, 4, 8]),
)
def test_columns_above_a_threshold(rows: int, width: int, columns: int, share: float, size: int) -> None:
    values = torch.rand(rows, width)
    edge = share * torch.rand(rows, 1)
    tiles = in_tiles(values, columns)
    with unittest.mock.patch.object(topk, "BLOCKS", (size,)):
        found, ranks = topk._above(tiles, edge)
    filled = tiles.permute(1, 0, 2).flatten(1)
    assert torch.equal(filled.gather(1, found), ranks)
    for row, columns_found in enumerate(found.tolist()):
        assert len(set(columns_found)) == len(columns_found)
        assert set((values[row] > edge[row]).nonzero()[:, 0].tolist()) <= set(columns_found)


def test_sampled_classes_are_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = torch.randn(3, 2, 4, dtype=torch.float64)
    inverse_lengths = 1 / proxies.flatten(0, 1).norm(dim=1)

    def classified(sampled: int | None) -> tuple[Tensor, Tensor]:
        gradient = torch.zeros_like(proxies)
        return proxy_regularizer(proxies, inverse_lengths, sampled, gradient=gradient), gradient

    drawn = []
    for pair in ([0, 3], [5, 1], [2, 4]):  # every proxy once
        monkeypatch.setattr(torch, "randperm", lambda *_, pair=pair, **__: torch.tensor([*pair, 0, 0, 0, 0]))
        drawn.append(classified(sampled=2))
    torch.testing.assert_close([torch.stack(each).mean(0) for each in zip(*drawn, strict=True)], list(classified(None)))
    torch.testing.assert_close(classified(6), classified(None))
    torch.testing.assert_close(classified(60), classified(None))


def test_the_loss_draws_as_many_proxies_as_it_is_told() -> None:
    loss = loss_with(torch.randn(4, 3, 5), links=6, proxy_rows=2)
    batch = torch.randn(3, 5), torch.tensor([0, 1, 2])
    values = {loss(*batch).item() for _ in range(8)}
    assert len(values) > 1
    everyone = loss_with(loss.proxies.detach(), links=6, proxy_rows=12)
    assert len({everyone(*batch).item() for _ in range(3)}) == 1


def test_sparse_gradient_adds_up() -> None:
    proxies = torch.randn(6, 2, 4)
    dense, sparse = (loss_with(proxies, links=3, proxy_weight=0, sparse_gradient=form) for form in (False, True))
    linked = set()
    for labels in ([0, 1], [1, 5]):
        samples = torch.nn.functional.normalize(torch.randn(2, 4))
        for loss in (dense, sparse):
            loss(samples, torch.tensor(labels)).backward()
        linked |= set(link(samples, proxies, torch.tensor(labels), 3, ABOVE_ANY_COSINE).linked.flatten().tolist())
    gradient = sparse.proxies.grad.coalesce()
    assert {2 * row + place for row, place in gradient.indices().T.tolist()} == linked
    torch.testing.assert_close(gradient.to_dense(), dense.proxies.grad)


def test_sparse_gradient_with_regularizer_is_refused() -> None:
    with pytest.raises(ValueError, match="sparse_gradient needs proxy_weight=0"):
        ProxyGMLLoss(4, 3, sparse_gradient=True)


@pytest.mark.parametrize("sparse", [False, True])
def test_memory_with_many_classes(sparse: bool) -> None:
    """CI's guard of memory: bytes are the same on every machine."""
    batch, classes, dimension, links = 64, 60_000, 16, 100
    loss = ProxyGMLLoss(classes, dimension, proxies_per_class=1, links=links, proxy_weight=0, sparse_gradient=sparse)
    samples, labels = torch.randn(batch, dimension, requires_grad=True), torch.arange(batch)
    changes = allocations(lambda: loss(samples, labels).backward())
    similarities, gradient = 4 * batch * classes, 4 * classes * dimension
    assert (
        4 * topk.CHUNK_ELEMENTS == max(changes) < similarities
    )  # one part of the similarities, and nothing else as large
    rows = 4 * batch * links * dimension if sparse else gradient
    assert sorted(changes)[-2] <= max(
        rows, topk.CHUNK_ELEMENTS
    )  # the gradient, and a mask of that part with a byte for each


def test_fused_step_takes_few_products() -> None:
    """CI's guard of time: the number of large operations."""
    loss = ProxyGMLLoss(98, 32)
    samples, labels = torch.randn(32, 32, requires_grad=True), torch.arange(32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
        loss(samples, labels).backward()
    calls = {event.key: event.count for event in watched.key_averages()}
    assert calls["aten::mm"] == 3  # similarities, Z^p, gradient of proxies
    assert calls["aten::addmm_"] == 2  # gradients of L^p: of proxies and of class sums
    assert calls["aten::embedding_bag"] == 1  # gradient of samples
    assert calls["aten::bmm"] == 1  # class sums
    assert calls["aten::topk"] == 1


def test_gradients_add_up() -> None:
    loss = loss_with(torch.randn(5, 2, 4, dtype=torch.float64), links=4)
    embeddings, labels = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 4])
    value = loss(embeddings, labels)
    value.backward(retain_graph=True)
    once = [embeddings.grad.clone(), loss.proxies.grad.clone()]
    value.backward(retain_graph=True)
    torch.testing.assert_close([embeddings.grad, loss.proxies.grad], [2 * gradient for gradient in once])
    (3 * value).backward()
    torch.testing.assert_close([embeddings.grad, loss.proxies.grad], [5 * gradient for gradient in once])


@pytest.mark.parametrize("factor", [1e25, 1e37])
def test_embeddings_with_large_squares(factor: float) -> None:
    loss = loss_with(torch.randn(5, 2, 4), links=4)
    embeddings, labels = torch.randn(3, 4), torch.tensor([0, 1, 4])
    value, gradient, proxy_gradient = value_and_gradients(loss, embeddings, labels)
    huge, huge_gradient, huge_proxy_gradient = value_and_gradients(loss, embeddings * factor, labels)
    torch.testing.assert_close([huge, huge_proxy_gradient], [value, proxy_gradient])
    torch.testing.assert_close(huge_gradient.double() * factor, gradient.double(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("options", [{"sparse_gradient": True, "proxy_weight": 0}, {"proxy_rows": 4}])
def test_sparse_or_sampled_loss_has_no_second_derivatives(options: dict) -> None:
    loss = loss_with(torch.randn(5, 2, 4), links=4, **options)
    embeddings = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss(embeddings, torch.tensor([0, 1, 4])), embeddings, create_graph=True)
