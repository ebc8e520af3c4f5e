"""What the benchmarks share: taking turns on the clock, peak memory, and results/bench/NAME.json.

Ratios come from one process in which all contenders take turns, so that whatever else the machine does falls on all.
"""

import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from proxygml.files import written_whole
from proxygml.runs import provenance

RESULTS = Path("results/bench")
TURN, CALLS = 70.0, 6  # a turn ends after so many milliseconds, or calls
LONG = 500.0  # milliseconds of a call that is made less often
Calls = Mapping[str, Callable[[], object]]


def take_turns(calls: Calls, seconds: float, least: int = 3, most: int = 50) -> dict[str, dict[str, float]]:
    """Milliseconds of each call, median and quartiles: after a round to warm up, as many rounds as fit the time.

    Long calls have `least` turns, others at least twice as many.

    A turn is one long call, or several short ones of which the first does not count: it finds the caches full of what
    another contender left, the others are as in a loop of their own. The median of the first is there as "first". As
    the pace of a machine changes from one moment to the next, "times" is the median of what a turn takes of the first
    contender's in the same round.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    first: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(most + 1):
        if turn > 2 * least and time.perf_counter() - began > seconds:
            break
        for name, call in calls.items():
            if len(taken[name]) >= least and taken[name][0] > LONG:
                continue
            milliseconds = [timed(call)]
            while sum(milliseconds) < TURN and len(milliseconds) < CALLS:
                milliseconds.append(timed(call))
            if turn:
                first[name].append(milliseconds[0])
                taken[name].append(statistics.median(milliseconds[1:] or milliseconds))
    found, reference = {}, next(iter(taken.values()))
    for name in calls:
        low, times, high = quartiles([mine / theirs for mine, theirs in zip(taken[name], reference, strict=False)])
        found[name] = spread(taken[name]) | {"first": round(statistics.median(first[name]), 3)}
        found[name] |= {"times": times, "times_low": low, "times_high": high}
    return found


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call, on the clock of the GPU where there is one."""
    if torch.cuda.is_available():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = quartiles(values)
    return {"ms": middle, "low": low, "high": high, "rounds": len(values)}


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 3) for value in statistics.quantiles(values, n=4, method="inclusive")]


def peak_megabytes(call: Callable[[], object]) -> float:
    """The most memory that a call takes above its own lowest point, by torch's account: no noise.

    It is to have been called before.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    now = lowest = rise = 0  # a call begins by dropping the gradients of the one before it
    for change in allocations(call):
        now += change
        lowest = min(lowest, now)
        rise = max(rise, now - lowest)
    return rise / 2**20


def allocations(call: Callable[[], object]) -> list[int]:
    """Bytes that tensors of a call take (above 0) and give back (below 0) on a CPU, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def save(name: str, found: dict, folder: Path = RESULTS) -> Path:
    """Write results/bench/NAME.json: what was found, the threads, and by what it was made."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made_by = provenance() | {"command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])}
    with written_whole(path) as draft:
        draft.write_text(json.dumps(found | {"threads": torch.get_num_threads(), "made_by": made_by}, indent=1) + "\n")
    return path


def resident_megabytes(process: int | str = "self") -> float:
    """The memory that a process has now, by its number."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())
