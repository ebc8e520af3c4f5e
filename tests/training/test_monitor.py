"""The monitor of training steps, read after every step or after every twenty."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from proxygml.training.monitor import StepMonitor, are_finite

CPU = torch.device("cpu")
YES, NO = torch.tensor(True), torch.tensor(False)


def steps(monitor: StepMonitor, values: list[float], finite: list[bool]) -> None:
    for value, good in zip(values, finite, strict=True):
        monitor.add({"loss": torch.tensor(value)}, YES if good else NO, 2)


@pytest.mark.parametrize("every", [1, 20])
def test_means_and_skipped_steps_do_not_depend_on_how_often_they_are_read(every: int) -> None:
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


def test_twenty_skipped_steps_in_a_row_are_an_error_across_epochs() -> None:
    first = StepMonitor(CPU)
    steps(first, [1.0] * 13, [True] + [False] * 12)
    second = StepMonitor(CPU, in_a_row=first.in_a_row)
    with pytest.raises(ValueError, match="not finite in 20 steps in a row"):
        steps(second, [1.0] * 8, [False] * 8)


def test_between_reads_no_value_is_fetched_from_the_device() -> None:
    monitor = StepMonitor(CPU)
    monitor.every = 20
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        steps(monitor, [1.0] * 19, [True] * 19)
    assert not [event.key for event in profiled.key_averages() if event.key == "aten::_local_scalar_dense"]


def test_checking_a_hundred_gradients_takes_a_handful_of_operators() -> None:
    gradients = [torch.randn(3, 4) for _ in range(100)]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert are_finite(gradients)
    called = {event.key: event.count for event in profiled.key_averages()}
    assert called["aten::_foreach_norm"] == 1
    assert called["aten::isfinite"] == 1
    gradients[50][1, 1] = float("inf")
    assert not are_finite(gradients)
