"""What a GPU computes: `python -m pytest -m cuda` on a machine with one. Without one, fake tensors stand in for it.

Tests of numbers run on the CPU too, so that they do not rot.
"""

import multiprocessing
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from proxygml import ProxyGMLLoss, ShardedProxyGMLLoss, proxygml_loss
from proxygml.losses.proxygml import fused
from proxygml.losses.proxygml.gradients import loss_and_gradients
from proxygml.losses.proxygml.module import ProxyGMLFunction
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.optim import RowAdam
from proxygml.training import checks, start
from proxygml.training.monitor import StepMonitor, are_finite, loss_terms
from proxygml.training.recipe import Recipe
from tests.training.test_training import PlugPulledError, stop_at

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_gpu])])
WITHIN = {"atol": 1e-10, "rtol": 1e-8}


def batch_on(device: str, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(32, 16, generator=generator, dtype=torch.float64)
    return embeddings.to(device).requires_grad_(), torch.randint(classes, (32,), generator=generator).to(device)


def definition_of(loss: ProxyGMLLoss, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Value and gradients of embeddings and proxies by the definition on the CPU."""
    embeddings, labels = batch_on("cpu", classes)
    proxies = loss.proxies.detach().cpu().requires_grad_()
    options = {name: getattr(loss.settings, name) for name in ("proxy_weight", "scale")}
    value = proxygml_loss(embeddings, labels, proxies, links=loss.links, **options)
    return value.detach(), *torch.autograd.grad(value, (embeddings, proxies))


@devices
@pytest.mark.parametrize("implementation", ["definition", "fused", "chunked", "sparse"])
@pytest.mark.parametrize(("classes", "per_class"), [(20, 3), (3000, 1)])
@pytest.mark.slow
def test_implementations_equal_the_definition(device: str, implementation: str, classes: int, per_class: int) -> None:
    torch.manual_seed(0)
    options = {"implementation": implementation, "scale": 3.0}
    if implementation == "sparse":
        options = {"sparse_gradient": True, "proxy_weight": 0.0}
    loss = ProxyGMLLoss(classes, 16, proxies_per_class=per_class, links=9, **options).double().to(device)
    embeddings, labels = batch_on(device, classes)
    value = loss(embeddings, labels)
    value.backward()
    gradient = loss.proxies.grad.to_dense() if implementation == "sparse" else loss.proxies.grad
    found = [each.detach().cpu() for each in (value, embeddings.grad, gradient)]
    torch.testing.assert_close(found, list(definition_of(loss, classes)), **WITHIN)


@pytest.fixture
def group(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """A group of this process alone."""
    backend = "nccl" if request.getfixturevalue("device") == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@devices
@pytest.mark.usefixtures("group")
def test_sharded_loss_equals_the_definition(device: str) -> None:
    loss = ProxyGMLLoss(20, 16, proxies_per_class=3, links=9).double()
    settings = ProxyGMLSettings(proxies_per_class=3, links=9)
    sharded = ShardedProxyGMLLoss(20, 16, settings).double().to(device)
    sharded.proxies.data.copy_(loss.proxies.data)
    embeddings, labels = batch_on(device, 20)
    value = sharded(embeddings, labels)
    value.backward()
    found = [each.detach().cpu() for each in (value, embeddings.grad, sharded.proxies.grad)]
    torch.testing.assert_close(found, list(definition_of(loss, 20)), **WITHIN)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("precision", checks.TOLERANCE)
def test_training_in_each_precision(precision: str) -> None:
    try:
        checks.train_steps("cuda", precision)
    except checks.NotAvailableError as error:
        pytest.skip(str(error))


@devices
def test_row_adam_equals_adam_on_the_cpu(device: str) -> None:
    start, gradient = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(-2, 1, 12).view(4, 3)
    rows, expected = nn.Parameter(start.to(device)), nn.Parameter(start.clone())
    row_adam, adam = RowAdam([rows], lr=0.1), torch.optim.Adam([expected], lr=0.1)
    for step in range(3):
        expected.grad = gradient * (step + 1)
        with torch.sparse.check_sparse_tensor_invariants():
            rows.grad = torch.sparse_coo_tensor(torch.arange(4)[None], expected.grad, (4, 3)).to(device)
        row_adam.step()
        adam.step()
    torch.testing.assert_close(rows.cpu(), expected)


@pytest.mark.cuda
@needs_gpu
def test_resumed_run_ends_as_if_not_stopped(tiny: Recipe, tmp_path: Path) -> None:
    recipe = tiny.changed({"device": "cuda", "adam_epsilon": 0.01, "learning_rate": 1e-4})
    expected = start.train(recipe, tmp_path / "undisturbed").log
    with pytest.raises(PlugPulledError):
        start.train(recipe, tmp_path / "stopped", progress=stop_at(10))
    log = start.resume(tmp_path / "stopped").log
    assert [entry["loss"] for entry in log] == pytest.approx([entry["loss"] for entry in expected], abs=1e-3)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_gpus_train_as_one() -> None:
    checks.compare_processes("cuda")


def step_on_a_fake_gpu() -> None:
    """Train steps on a device without memory: reading a value from it, or mixing it with the CPU, is an error."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("fakegpu")
    with FakeTensorMode(), torch.device("fakegpu"):
        network, loss = nn.Linear(8, 16), ProxyGMLLoss(98, 16)
        optimizer = torch.optim.Adam([*network.parameters(), *loss.parameters()], fused=True)
        monitor = StepMonitor(torch.device("fakegpu"))
        options = {"settings": loss.settings, "links": loss.links, "pool": loss.gradient_pool}
        compute = partial(loss_and_gradients, sample_loss=fused.sample_loss, **options)
        run_fused = lambda *batch: ProxyGMLFunction.call(compute, batch[0], loss.proxies, batch[1])[0]  # noqa: E731
        for implementation in (loss, run_fused):
            embeddings, labels = loss.check(network(torch.randn(32, 8)), torch.randint(98, (32,)), 98)
            value = implementation(embeddings, labels)  # the loss itself takes the definition for fake tensors
            value.backward()
            finite = are_finite([parameter.grad for parameter in (*network.parameters(), *loss.parameters())])
            optimizer.found_inf = (~finite).float()
            optimizer.step()
            monitor.add(loss_terms(loss, value), finite, 32)
        assert {str(each.device) for each in (value, loss.proxies.grad, monitor.counts)} == {"fakegpu:0"}


@pytest.mark.slow
def test_step_never_waits_for_the_device() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # a device, once registered, stays for the process
        pool.apply(step_on_a_fake_gpu)
