"""RowAdam beside torch's Adam."""

import math

import pytest
import torch

from proxygml import ProxyGMLLoss
from proxygml.optim import RowAdam

OPTIONS = {"lr": 0.03, "betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 1e-2}


def sparse_rows(gradient: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The rows of a dense gradient (rows, D) as a sparse one."""
    return torch.sparse_coo_tensor(torch.tensor([rows]), gradient[rows], gradient.shape, check_invariants=True)


def both(
    start: torch.Tensor, **options: bool
) -> tuple[torch.nn.Parameter, RowAdam, torch.nn.Parameter, torch.optim.Adam]:
    """The same weights twice, each with its optimizer."""
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    return ours, RowAdam([ours], **OPTIONS, **options), theirs, torch.optim.Adam([theirs], **OPTIONS, **options)


@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"amsgrad": True}, {"decoupled_weight_decay": True}], ids=str
)
@pytest.mark.parametrize("rows_at_a_time", [4096, 3])
def test_every_row_touched_in_every_step_is_adam(
    rows_at_a_time: int, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxygml.optim.ROWS", rows_at_a_time)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    ours, row_adam, theirs, adam = both(start, **options)
    for _ in range(5):
        theirs.grad = torch.randn(7, 4, generator=generator, dtype=torch.float64)
        ours.grad = sparse_rows(theirs.grad, [3, 0, 1, 6, 5, 4, 2])
        row_adam.step()
        adam.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_equals_adam_on_rows_with_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    ours, row_adam, theirs, adam = both(start)
    for _ in range(3):
        theirs.grad = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        ours.grad = sparse_rows(theirs.grad, [1, 4])
        row_adam.step()
        adam.step()
    untouched, touched = [0, 2, 3], [1, 4]
    assert torch.equal(ours[untouched], start[untouched])
    assert row_adam.state[ours]["exp_avg"][untouched].abs().max() == 0
    torch.testing.assert_close(ours[touched], theirs[touched], rtol=1e-12, atol=1e-12)


def test_parameter_that_is_not_contiguous() -> None:
    torch.manual_seed(0)
    start = torch.randn(2, 5, 3).transpose(0, 1)
    ours, row_adam, theirs, adam = both(start)
    ours.data = start.clone(memory_format=torch.preserve_format)
    assert not ours.is_contiguous()
    for _ in range(3):
        theirs.grad = torch.randn(5, 2, 3)
        ours.grad = theirs.grad.to_sparse(2)
        row_adam.step()
        adam.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("fused", [True, None])
def test_grad_scaler_scales_and_skips(fused: bool | None) -> None:
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    ours, row_adam, theirs, adam = both(start, fused=fused)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2**16) for _ in range(2)]
    for factor in (1.0, math.inf, 0.5, 2.0):
        theirs.grad = 2**16 * factor * torch.ones(4, 3)
        ours.grad = theirs.grad.to_sparse(1)
        for scaler, optimizer, parameter in zip(scalers, (row_adam, adam), (ours, theirs), strict=True):
            scaler.scale(parameter.new_zeros(()))  # creates its state
            scaler.step(optimizer)
            scaler.update()
            parameter.grad = None
    torch.testing.assert_close(ours, theirs)
    assert row_adam.state[ours]["step"] == 3
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2**15


def test_step_count_is_on_the_device_of_its_parameter() -> None:
    parameter = torch.nn.Parameter(torch.empty(5, 3, device="meta"))
    optimizer = RowAdam([parameter], lr=0.1)
    optimizer.state[parameter] |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter]["step"] = torch.ones(())  # as from a checkpoint
    for _ in range(2):
        parameter.grad = torch.sparse_coo_tensor(
            torch.empty(1, 2, dtype=torch.int64, device="meta"),
            torch.empty(2, 3, device="meta"),
            (5, 3),
            is_coalesced=True,
            check_invariants=False,
        )
        optimizer.step()  # the kernel takes tensors of one device
        assert optimizer.state[parameter]["step"].device.type == "meta"


def test_sparse_and_dense_parameters() -> None:
    torch.manual_seed(0)
    network = torch.nn.Linear(6, 4)
    loss = ProxyGMLLoss(9, 4, proxies_per_class=2, ratio=0.4, proxy_weight=0, sparse_gradient=True)
    groups = [{"params": list(network.parameters()), "lr": 1e-2}, {"params": list(loss.parameters())}]
    images, labels = torch.randn(8, 6), torch.arange(8)
    optimizer = RowAdam(groups, fused=True, **OPTIONS)
    values = []
    for _ in range(30):
        value = loss(network(images), labels)
        optimizer.zero_grad()
        value.backward()
        assert loss.proxies.grad.is_sparse
        optimizer.step()
        assert loss.proxies.grad.is_sparse  # the step does not change it
        values.append(value.item())
    assert values[-1] < values[0] - 0.2
    adam = torch.optim.Adam([{"params": list(network.parameters())}, {"params": list(loss.parameters())}])
    adam.load_state_dict(optimizer.state_dict())
    assert torch.equal(adam.state[loss.proxies]["exp_avg"], optimizer.state[loss.proxies]["exp_avg"])


def test_a_closure_is_called_with_gradients_on() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))

    def closure() -> torch.Tensor:
        value = parameter.square().sum()
        value.backward()
        return value

    assert RowAdam([parameter], lr=0.1).step(closure).item() == 2
    assert parameter.max() < 1
