"""Embeddings that are extremely long, extremely short, or of no length at all."""

import pytest
import torch
from torch import Tensor

from proxygml.losses import METHODS
from proxygml.losses.interface import rescaled
from tests.losses.test_every_loss import CASES, Case, made, outcome, over, overlapping_classes

WITH_LENGTHS = ("clustering", "proxygml")  # the first counts lengths, the second has its own test
BY_DIRECTION = [case for case in CASES if METHODS[case.name].unit_length and case.name not in WITH_LENGTHS]


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
