"""The loss and evaluation multiply in full float32, whatever precision the network is allowed."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proxygml import ProxyGMLLoss, evaluate, losses
from proxygml.precision import BACKENDS, full_float32


def switches() -> list[str]:
    return [backend.fp32_precision for backend in BACKENDS]


@pytest.fixture(autouse=True)
def keep_precision() -> Iterator[None]:
    before = switches()
    yield
    torch.set_float32_matmul_precision("highest")
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


class Products(TorchDispatchMode):
    """Records the switches at every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket._qualified_op_name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_"):
            self.seen.append(switches())
        return function(*args, **(kwargs or {}))


def backward(loss: torch.nn.Module) -> None:
    embeddings = torch.randn(12, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss(embeddings, torch.arange(12) % 4).backward()


def search() -> None:
    vectors = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))
    evaluate(vectors, torch.arange(60) % 10, cluster=False)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: backward(ProxyGMLLoss(4, 16, ratio=0.5, implementation="fused")),
        lambda: backward(ProxyGMLLoss(4, 16, ratio=0.5, implementation="chunked")),
        lambda: losses.make("proxy-anchor", 4, 16, {})(torch.randn(12, 16), torch.arange(12) % 4),
        search,
    ],
    ids=["fused", "chunked", "proxy-anchor", "evaluation"],
)
def test_products_have_full_precision(compute: Callable[[], None]) -> None:
    torch.set_float32_matmul_precision("high")
    with Products() as products:
        compute()
    assert products.seen
    assert all(one == ["ieee", "ieee"] for one in products.seen)
    assert torch.get_float32_matmul_precision() == "high"
    assert switches() == ["tf32", "tf32"]


def test_newer_switches_are_restored() -> None:
    BACKENDS[0].fp32_precision = "tf32"
    before = switches()
    for _ in range(2):
        with full_float32():
            assert switches() == ["ieee", "ieee"]
        assert switches() == before


def test_default_is_left_alone() -> None:
    before = switches()
    with full_float32():
        assert switches() == before
