"""The definition where only it can run: torch.func, torch.compile, fake tensors and second derivatives."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from proxygml import ProxyGMLLoss, proxygml_loss
from proxygml.losses.interface import BatchCheck

LABELS = torch.tensor([0, 3, 3])


@pytest.fixture
def loss() -> ProxyGMLLoss:
    torch.manual_seed(0)
    return ProxyGMLLoss(4, 5, proxies_per_class=3, links=5).double()


@pytest.fixture
def embeddings() -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)


def gradients_of(loss: ProxyGMLLoss, embeddings: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(embeddings, LABELS), (embeddings, loss.proxies))


def test_public_function_equals_the_module(loss: ProxyGMLLoss, embeddings: Tensor) -> None:
    torch.testing.assert_close(proxygml_loss(embeddings, LABELS, loss.proxies, links=5), loss(embeddings, LABELS))


@pytest.mark.parametrize("implementation", ["auto", "definition", "fused", "chunked"])
@pytest.mark.slow
def test_second_derivatives_pass_gradgradcheck(loss: ProxyGMLLoss, embeddings: Tensor, implementation: str) -> None:
    loss.implementation = implementation

    def as_function(embeddings: Tensor, proxies: Tensor) -> Tensor:
        return torch.func.functional_call(loss, {"proxies": proxies}, (embeddings, LABELS))

    assert torch.autograd.gradgradcheck(as_function, (embeddings, loss.proxies))


def test_func_grad_gives_the_same_gradient(loss: ProxyGMLLoss, embeddings: Tensor) -> None:
    expected, _ = gradients_of(loss, embeddings)
    torch.testing.assert_close(torch.func.grad(loss)(embeddings.detach(), LABELS), expected)


def test_jacrev_gives_the_same_gradient(loss: ProxyGMLLoss, embeddings: Tensor) -> None:
    expected, _ = gradients_of(loss, embeddings)
    torch.testing.assert_close(torch.func.jacrev(loss)(embeddings.detach(), LABELS), expected)


def test_vmap_gives_the_loss_of_each_batch(loss: ProxyGMLLoss, embeddings: Tensor) -> None:
    batches = torch.stack([embeddings.detach(), 1 - embeddings.detach()])  # (2, B, D)
    found = torch.func.vmap(loss)(batches, torch.stack([LABELS, LABELS]))
    torch.testing.assert_close(found, torch.stack([loss(batch, LABELS) for batch in batches]))


@pytest.mark.slow
def test_compiles_as_one_graph(loss: ProxyGMLLoss, embeddings: Tensor) -> None:
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = gradients_of(loss, embeddings)
    found = torch.autograd.grad(compiled(embeddings, LABELS), (embeddings, loss.proxies))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("classes", [98, 11_318])
def test_runs_on_fake_tensors(classes: int) -> None:
    with FakeTensorMode():
        loss = ProxyGMLLoss(classes, 8, proxies_per_class=1)
        embeddings = torch.randn(32, 8, requires_grad=True)
        loss(embeddings, torch.zeros(32, dtype=torch.int64)).backward()
        assert embeddings.grad.shape == (32, 8)
        assert loss.proxies.grad.shape == (classes, 1, 8)


@pytest.mark.parametrize("options", [{"sparse_gradient": True, "proxy_weight": 0.0}, {"proxy_rows": 4}])
def test_what_the_definition_lacks_is_refused(options: dict) -> None:
    loss = ProxyGMLLoss(4, 5, links=30, **options)
    with pytest.raises(ValueError, match="cannot trace"):
        torch.func.grad(loss)(torch.randn(3, 5), LABELS)
    with pytest.raises(ValueError, match="definition does not support sparse_gradient and proxy_rows"):
        ProxyGMLLoss(4, 5, implementation="definition", **options)


@pytest.mark.parametrize("implementation", ["definition", "fused"])
def test_without_validation_nothing_waits_for_the_device(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator the values of a batch are not read; a scalar that is read is aten::_local_scalar_dense."""
    monkeypatch.setattr(BatchCheck, "__call__", lambda self, embeddings, labels, classes: (embeddings, labels))
    loss = ProxyGMLLoss(98, 16, implementation=implementation)
    embeddings, labels = torch.randn(32, 16, requires_grad=True), torch.randint(98, (32,))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        (2 * loss(embeddings, labels)).sum().backward(torch.ones(()))
    counts = {event.key: event.count for event in profiled.key_averages()}
    waits = counts.get("aten::_local_scalar_dense", 0)
    assert waits == (0 if implementation == "definition" else 1)  # on a CPU, a gradient of 1 saves a copy


class TestBatchCheck:
    def check(self, embeddings: Tensor, labels: Tensor) -> None:
        check = BatchCheck()
        for batch in range(BatchCheck.EVERY):
            wrong = batch == 3
            check.record(embeddings if wrong else torch.ones(2, 2), labels if wrong else torch.tensor([0, 1]), 2)

    def test_right_batches_pass(self) -> None:
        self.check(torch.ones(2, 2), torch.tensor([1, 1]))

    def test_wrong_label_is_an_error_some_steps_later(self) -> None:
        with pytest.raises(ValueError, match=r"expected labels in 0\.\.1, got 0\.\.7 in the last 20 batches"):
            self.check(torch.ones(2, 2), torch.tensor([0, 7]))

    def test_nan_is_an_error_some_steps_later(self) -> None:
        with pytest.raises(ValueError, match="expected finite embeddings"):
            self.check(torch.full((2, 2), float("nan")), torch.tensor([0, 1]))
