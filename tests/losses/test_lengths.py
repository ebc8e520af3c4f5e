"""Embeddings that are extremely long, extremely short, or of no length at all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxygml import ProxyGMLLoss, ShardedProxyGMLLoss
from proxygml.losses import METHODS
from proxygml.losses.interface import rescaled
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from tests.losses.test_every_loss import CASES, Case, made, outcome, over, overlapping_classes

BY_DIRECTION = [case for case in CASES if METHODS[case.name].unit_length and case.name != "clustering"]


@over(BY_DIRECTION)
@pytest.mark.parametrize("exponent", [80, -80])
def test_only_directions_count_however_long_embeddings_are(case: Case, exponent: int) -> None:
    loss = made(case)
    embeddings, labels = overlapping_classes()
    length = 2.0**exponent  # about 1e24, 1e-24: a power of two loses no digit, but of what gets too small for float32
    expected = outcome(loss, embeddings.float(), labels)
    found = outcome(loss, embeddings.float() * length, labels)
    assert found.value == expected.value
    torch.testing.assert_close(found.gradient * length, expected.gradient, rtol=0, atol=1e-12)
    assert expected.gradient.abs().max() > 0
    for name, gradient in expected.state.items():
        assert torch.equal(found.state[name], gradient), name


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone, for the sharded loss."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("implementation", ["definition", "fused", "chunked", "sharded"])
@pytest.mark.parametrize("rows", [slice(None), slice(1)], ids=["all", "one"])
@pytest.mark.parametrize("exponent", [100, -40, -100])
def test_implementations_count_only_directions(implementation: str, rows: slice, exponent: int) -> None:
    torch.manual_seed(0)
    embeddings, labels = torch.randn(6, 4), torch.arange(6) % 3
    if implementation == "sharded":
        loss: nn.Module = ShardedProxyGMLLoss(3, 4, ProxyGMLSettings(links=30))
    else:
        loss = ProxyGMLLoss(3, 4, links=30, implementation=implementation)
    lengths = torch.ones(6, 1)
    lengths[rows] = 2.0**exponent
    (expected, wanted), (found, gradient) = (
        (value, torch.autograd.grad(value, leaf)[0])
        for leaf in (embeddings.clone().requires_grad_(), (embeddings * lengths).requires_grad_())
        for value in [loss(leaf, labels)]
    )
    assert found.item() == expected.item()
    torch.testing.assert_close(gradient * lengths, wanted)


@over(BY_DIRECTION)
def test_zero_vector_has_no_gradient(case: Case) -> None:
    embeddings, labels = overlapping_classes()
    embeddings[3] = 0
    gradient = outcome(made(case), embeddings.float(), labels).gradient
    assert gradient.isfinite().all()
    assert gradient[3].abs().max() == 0
    assert 0 < gradient.abs().max() < 1e6


@over([case for case in CASES if case.name == "clustering" or not METHODS[case.name].unit_length])
def test_where_lengths_count_they_may_not_overflow(case: Case) -> None:
    loss = made(case)
    embeddings, labels = overlapping_classes()
    assert outcome(loss, 1e14 * embeddings.float(), labels).value.isfinite()
    with pytest.raises(ValueError, match=r"expected embeddings up to 1e\+15, since this loss squares them"):
        outcome(loss, 1e30 * embeddings.float(), labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rescaled_vectors_keep_their_direction(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype)
    vectors = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    lengths = torch.tensor([1, most.max / 8, most.tiny * 8, most.tiny / 64, 1e-12, 0], dtype=dtype)[:, None]
    found = rescaled(vectors * lengths)
    unit = torch.nn.functional.normalize(found, dim=1)
    assert found.abs().max() <= 4
    assert torch.equal(unit[5], torch.zeros(5, dtype=dtype))
    digits = torch.tensor([1, 1, 1, 2**18, 1], dtype=dtype)[:, None] * 8 * most.eps  # the fourth has lost some already
    assert bool(((unit - torch.nn.functional.normalize(vectors, dim=1))[:5].abs() <= digits).all())


def test_an_ordinary_vector_is_normalized_to_the_same_bits() -> None:
    vectors: Tensor = torch.randn(100, 32, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(
        torch.nn.functional.normalize(rescaled(vectors), dim=1), torch.nn.functional.normalize(vectors, dim=1)
    )
