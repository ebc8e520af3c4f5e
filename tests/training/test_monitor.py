"""Training steps: what the monitor counts, how many operators run, and that nothing waits for the device."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from proxygml.data.splits import hold_out
from proxygml.losses.interface import BatchCheck
from proxygml.training import build, loop
from proxygml.training.loop import TrainingLoop
from proxygml.training.monitor import StepMonitor, are_finite, loss_terms
from proxygml.training.recipe import Recipe

CPU = torch.device("cpu")
YES, NO = torch.tensor(True), torch.tensor(False)


def steps(monitor: StepMonitor, values: list[float], finite: list[bool]) -> None:
    for value, good in zip(values, finite, strict=True):
        monitor.add({"loss": torch.tensor(value)}, YES if good else NO, 2)


@pytest.mark.parametrize("every", [1, 20])
def test_means_do_not_depend_on_reading(every: int) -> None:
    monitor = StepMonitor(CPU)
    monitor.every = every
    steps(monitor, [1.0, 2.0, 6.0], [True, False, True])
    assert monitor.means() == {"loss": 3.0, "skipped_steps": 1}
    assert monitor.in_a_row == 0


@pytest.mark.parametrize(("every", "noticed"), [(1, 2), (20, 20)])
def test_nan_is_noticed_when_it_is_read(every: int, noticed: int) -> None:
    monitor = StepMonitor(CPU)
    monitor.every = every
    with pytest.raises(ValueError, match="the loss became nan: lower learning_rate"):
        steps(monitor, [1.0, float("nan"), *[1.0] * 30], [True] * 32)
    assert monitor.steps == noticed


def test_twenty_skipped_steps_are_an_error() -> None:
    first = StepMonitor(CPU)
    steps(first, [1.0] * 13, [True] + [False] * 12)
    second = StepMonitor(CPU, in_a_row=first.in_a_row)
    with pytest.raises(ValueError, match="not finite in 20 steps in a row"):
        steps(second, [1.0] * 8, [False] * 8)


def profiled_operators(function: Callable[[], object]) -> list[FunctionEvent]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function()
    return [event for event in profiled.events() if event.name.startswith("aten::")]


def waits_for_device(event: FunctionEvent) -> bool:
    """Whether a value is read from a tensor, except by the CPU version of fused Adam, which reads its step count."""
    callers, caller = [], event.cpu_parent
    while caller is not None:
        callers.append(caller.name)
        caller = caller.cpu_parent
    return event.name == "aten::_local_scalar_dense" and "aten::_fused_adam_" not in callers


def test_gradient_check_takes_few_operators() -> None:
    gradients = [torch.randn(3, 4) for _ in range(100)]
    names = [event.name for event in profiled_operators(lambda: are_finite(gradients))]
    assert names.count("aten::_foreach_norm") == names.count("aten::isfinite") == 1
    assert are_finite(gradients)
    gradients[50][1, 1] = float("inf")
    assert not are_finite(gradients)


@pytest.fixture
def training_loop(tiny: Recipe) -> TrainingLoop:
    fabric = Fabric(accelerator="cpu", devices=1)
    images, _ = hold_out(build.load_images(tiny)[0], tiny.held_out)
    loss = build.build_loss(tiny, len(images.class_names))
    return TrainingLoop(tiny, fabric, build.build_model(tiny), loss, images)


def test_step_never_waits_for_the_device(training_loop: TrainingLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where values are read every 20 steps; a read is aten::_local_scalar_dense."""
    monkeypatch.setattr(BatchCheck, "__call__", lambda self, embeddings, labels, classes: (embeddings, labels))
    training_loop.loss.implementation = "definition"  # on a CPU, "fused" reads whether the gradient is 1
    training_loop.model.train()
    monitor = StepMonitor(CPU)
    monitor.every = 20
    images, labels = torch.zeros(32, 3, 32, 32, dtype=torch.uint8), torch.arange(32) % 8

    def step() -> None:
        value, finite = training_loop.train_step(images, labels)
        monitor.add(loss_terms(training_loop.loss, value), finite, 32)

    step()  # creates the optimizer's state
    operators = profiled_operators(step)
    assert not any(waits_for_device(event) for event in operators)
    assert len(operators) < 1050


@pytest.mark.parametrize(
    ("device", "workers", "expected"),
    [("cuda", 2, (True, 4)), ("cuda", 0, (True, None)), ("cpu", 2, (False, 2))],
)
def test_batches_are_pinned_and_prefetched_for_a_gpu(
    training_loop: TrainingLoop, monkeypatch: pytest.MonkeyPatch, device: str, workers: int, expected: tuple
) -> None:
    monkeypatch.setattr(loop, "load_batches", lambda loader: loader)
    training_loop.recipe = training_loop.recipe.changed({"workers": workers})
    training_loop.fabric = SimpleNamespace(device=torch.device(device), world_size=1, global_rank=0)
    loader = training_loop._load([[0, 1]], epoch=0)
    assert (loader.pin_memory, loader.prefetch_factor) == expected


def test_state_holds_scaler_and_cuda_generator(training_loop: TrainingLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    training_loop.fabric = Fabric(plugins=MixedPrecision("16-mixed", "cpu"), accelerator="cpu", devices=1)
    scaler = training_loop.fabric.strategy.precision.scaler
    scaler.scale(torch.ones(()))
    scaler.update(512.0)
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([7]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append(state))
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(TrainingLoop, "on_cuda", True)
        state = training_loop.state()
        scaler.update(2.0)
        training_loop.restore(state)
        assert scaler.get_scale() == 512
        assert restored == [torch.tensor([7])]
    training_loop.restore(state)  # on a CPU
    assert len(restored) == 1
