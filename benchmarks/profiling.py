"""Shared by the benchmarks: interleaved timing, peak memory, tables on the terminal, and results/bench/NAME.json."""

import json
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from proxygml.files import atomic_write
from proxygml.training.run import provenance

RESULTS = Path("results/bench")
MAX_TURN_MS, MAX_TURN_CALLS = 70.0, 6
SLOW_MS = 500.0  # slower calls get fewer rounds


def time_interleaved(
    calls: Mapping[str, Callable[[], object]], seconds: float, min_rounds: int = 3, max_rounds: int = 50
) -> dict[str, dict[str, float]]:
    """Milliseconds of each call: median and quartiles over as many rounds as fit into `seconds`, after a warm-up.

    All calls take turns in one process, so that other load on the machine affects all alike. A turn is one slow call,
    or several fast ones. The first call of a turn runs with caches full of another contender's data: it counts only
    for "cold_ms". "ratio" is the median, over rounds, of the time relative to the first contender in the same round.
    Slow calls get `min_rounds`, others at least twice as many.
    """
    warm: dict[str, list[float]] = {name: [] for name in calls}
    cold: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for turn in range(max_rounds + 1):
        if turn > 2 * min_rounds and time.perf_counter() - start > seconds:
            break
        for name, call in calls.items():
            if len(warm[name]) >= min_rounds and warm[name][0] > SLOW_MS:
                continue
            milliseconds = [time_call(call)]
            while sum(milliseconds) < MAX_TURN_MS and len(milliseconds) < MAX_TURN_CALLS:
                milliseconds.append(time_call(call))
            if turn:
                cold[name].append(milliseconds[0])
                warm[name].append(statistics.median(milliseconds[1:] or milliseconds))
    results, reference = {}, next(iter(warm.values()))
    for name in calls:
        low, ratio, high = quartiles([ours / first for ours, first in zip(warm[name], reference, strict=False)])
        results[name] = time_summary(warm[name]) | {"cold_ms": round(statistics.median(cold[name]), 3)}
        results[name] |= {"ratio": ratio, "ratio_low": low, "ratio_high": high}
    return results


def time_call(call: Callable[[], object]) -> float:
    """Milliseconds of a call, measured by CUDA events where there is a GPU."""
    if torch.cuda.is_available():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def time_summary(milliseconds: list[float]) -> dict[str, float]:
    low, median, high = quartiles(milliseconds)
    return {"ms": median, "low": low, "high": high, "rounds": len(milliseconds)}


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 3) for value in statistics.quantiles(values, n=4, method="inclusive")]


def peak_tensor_mb(call: Callable[[], object]) -> float:
    """Peak tensor memory of a call, above the lowest point during the call. Call it once before."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    current = lowest = peak = 0  # a call first frees the gradients of the previous one
    for change in allocations(call):
        current += change
        lowest = min(lowest, current)
        peak = max(peak, current - lowest)
    return peak / 2**20


def allocations(call: Callable[[], object]) -> list[int]:
    """Bytes that tensors of a call allocate (positive) and free (negative) on a CPU, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def resident_mb(pid: int | str = "self") -> float:
    """Current resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_resident_mb() -> float:
    """Peak resident memory of this process; getrusage would include that of the process that started it."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) / 1024


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", box=None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table, "")


def save(name: str, results: dict, folder: Path = RESULTS) -> Path:
    """Write results/bench/NAME.json with the number of threads and the provenance."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    arguments = ["ROOT" if Path(argument).is_absolute() else argument for argument in sys.argv[1:]]
    made_by = provenance() | {"command": shlex.join(["python", "-m", f"benchmarks.{name}", *arguments])}
    content = results | {"threads": torch.get_num_threads(), "made_by": made_by}
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(content, indent=1) + "\n")
    return path


def load(name: str) -> dict:
    """The results in results/bench/NAME.json, or {} where there are none yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
