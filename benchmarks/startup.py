"""CPU seconds of commands from a cold start, beside those of `import torch`.

    python -m benchmarks.startup

Each command runs in a process of its own, with one thread; all take turns. Writes results/bench/startup.json;
`python -m benchmarks.report` renders it in docs/performance.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks.profiling import print_table, save
from proxygml.training import build
from proxygml.training.presets import GLYPHS
from proxygml.training.run import Run

IMPORT = "import torch"
SEARCH = "search RUN --image PHOTO"  # the images of the run are embedded already
COMMANDS = ("--help", "losses", "datasets", "paper", "train glyphs --epoch 4", SEARCH)  # one is a usage error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = make_run(Path(folder))
        measure(SEARCH, paths)
        turns = [{name: measure(name, paths) for name in (IMPORT, *COMMANDS)} for _ in range(options.turns)]
    seconds = {name: round(statistics.median(turn[name] for turn in turns), 3) for name in turns[0]}
    ratios = {name: round(statistics.median(turn[name] / turn[IMPORT] for turn in turns), 3) for name in turns[0]}
    rows = [(name, f"{seconds[name]:.2f}", f"{ratios[name]:.2f}") for name in seconds]
    print_table("cold starts", ("", "CPU s", "relative"), rows)
    if not options.dry_run:
        print(f"written: {save('startup', {'turns': options.turns, 'cpu_s': seconds, 'ratio': ratios})}")


def make_run(folder: Path) -> dict[str, Path]:
    """A run of untrained weights on some glyphs, and a photo to search for."""
    run = Run.create(folder / "run", GLYPHS.changed({"classes": 10}))
    run.save_best({"model": build.build_model(run.recipe).state_dict(), "loss": {}, "epoch": 1, "class_names": []})
    Image.effect_noise((640, 480), 60).save(folder / "photo.jpg")
    return {"RUN": run.folder, "PHOTO": folder / "photo.jpg"}


def measure(name: str, paths: dict[str, Path]) -> float:
    """User and system seconds of a command in a new process."""
    arguments = [str(paths.get(word, word)) for word in name.split()]
    command = [sys.executable, *(["-c", name] if name == IMPORT else ["-m", "proxygml", *arguments])]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **silent)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != (2 if "--epoch" in arguments else 0):
        raise RuntimeError(f"{name} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
