"""Real commands with injected faults: `python -m benchmarks.faults`."""
