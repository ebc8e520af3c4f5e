"""Memory that gradients are lent: used again, but never while anyone holds it."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from proxygml import ProxyGMLLoss
from proxygml.losses.proxygml import buffers, topk
from proxygml.losses.proxygml.buffers import BufferPool


@pytest.fixture(autouse=True)
def _every_gradient_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LARGE", 1)
    monkeypatch.setattr(topk, "PROXY_ELEMENTS", 24)  # some rows at a time


def test_memory_is_lent_again_once_nobody_holds_it() -> None:
    pool = BufferPool()
    first = pool.empty(10, torch.empty(1, 4))
    place = first.data_ptr()
    part = first[3:]
    del first
    assert pool.empty(10, part).data_ptr() != place
    del part
    assert pool.empty(9, torch.empty(1, 4, dtype=torch.float32)).data_ptr() == place
    assert pool.empty(1000, torch.empty(1, 4)).shape == (1000, 4)


def test_a_tensor_has_the_type_and_width_of_what_it_is_like() -> None:
    for dtype in (torch.float32, torch.float64):
        tensor = BufferPool().empty(3, torch.empty(7, 5, dtype=dtype))
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 5), dtype, True)


def gradients(loss: ProxyGMLLoss, embeddings: Tensor, labels: Tensor) -> Tensor:
    loss.proxies.grad = None
    loss(embeddings, labels).backward()
    assert loss.proxies.grad is not None
    return loss.proxies.grad


@pytest.mark.parametrize("sparse", [False, True])
def test_kept_gradients_are_not_overwritten(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    loss = ProxyGMLLoss(40, 6, proxies_per_class=2, links=7, proxy_weight=0, sparse_gradient=sparse)
    batches = [(torch.randn(5, 6), torch.randint(40, (5,))) for _ in range(4)]
    kept = [gradients(loss, *batch) for batch in batches]
    copies = [each.to_dense().clone() for each in kept]
    again = [gradients(loss, *batch).to_dense().clone() for batch in batches]  # each in the memory of the one before
    monkeypatch.setattr(buffers, "LARGE", 2**40)
    fresh = [gradients(loss, *batch).to_dense() for batch in batches]
    for one, two, three, four in zip(kept, copies, again, fresh, strict=True):
        assert torch.equal(one.to_dense(), two)
        assert torch.equal(two, three)
        assert torch.equal(three, four)


def test_steps_of_one_loss_use_the_same_memory() -> None:
    loss = ProxyGMLLoss(40, 6, proxies_per_class=2, links=7, proxy_weight=0, sparse_gradient=True)
    places = set()
    for _ in range(5):
        values = gradients(loss, torch.randn(5, 6), torch.arange(5))._values()
        places.add(values.data_ptr())
        del values
    assert len(places) <= 2  # a larger one may be needed once


def test_a_copied_or_pickled_loss_has_a_pool_of_its_own() -> None:
    loss = ProxyGMLLoss(40, 6, proxies_per_class=2, links=7, proxy_weight=0)
    held = gradients(loss, torch.randn(5, 6), torch.arange(5))
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        found = gradients(other, torch.randn(5, 6), torch.arange(5))
        assert other.gradient_pool is not loss.gradient_pool
        assert found.data_ptr() != held.data_ptr()
