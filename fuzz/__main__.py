"""Feed every reader with mutations of valid inputs by atheris, and record the failures.

    python -m fuzz [--runs N] [--seconds S] [--target NAME ...] [--out results/fuzz.json]

A reader may reject an input with a one-line error (see readers.py), within a minute and two gigabytes. Each reader runs
in its own process and keeps its inputs in runs/fuzz/NAME for the next call. --out is written every 5,000 inputs.
The same command continues: the counts of a reader add up while the commit is the same. Readers that are not named
keep their entries in --out.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from proxygml.display import output, show_progress
from proxygml.files import atomic_write
from proxygml.optional import library
from proxygml.paper.tables import Table
from proxygml.training.run import provenance

SECONDS_OF_AN_INPUT, MEGABYTES = 60, 2048  # on the clock: others may keep the machine busy
SLICE = 5000  # inputs between two savings
FOUND = Path("runs/fuzz")


def fuzz(name: str, runs: int, seconds: int, before: dict) -> dict:
    """What came of a reader, and of it before; inputs that are read again count once."""
    folder = FOUND / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("complaint*"), *folder.glob("timeout-*"), *folder.glob("oom-*"), *folder.glob("crash-*")):
        if not before["failures"]:
            old.unlink()
    again = len(list((folder / "inputs").glob("*")))
    options = [f"-timeout={SECONDS_OF_AN_INPUT}", f"-rss_limit_mb={MEGABYTES}", "-max_len=65536"]
    options += [f"-seed={1 + before['runs']}", f"-runs={again + runs}", f"-max_total_time={seconds}"]
    options += ["-print_final_stats=1", "-reload=0"]
    began = time.monotonic()
    command = [sys.executable, "-m", "fuzz.one", name, str(folder), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    (folder / "log.txt").write_text(done.stdout)
    listed = folder / "complaints.json"
    complaints = json.loads(listed.read_text()) if listed.exists() else []
    complaints += [path.name for kind in ("timeout", "oom", "crash") for path in folder.glob(f"{kind}-*")]
    if done.returncode and not complaints:
        complaints = [f"ended with {done.returncode}: see {folder}/log.txt"]
    coverage = re.findall(r"cov: (\d+)", done.stdout)
    return {
        "runs": before["runs"] + max(0, _stat(done.stdout, "number_of_executed_units") - again),
        "seconds": before["seconds"] + round(time.monotonic() - began),
        "branches": max(before["branches"], *map(int, coverage), 0),
        "peak_mb": max(before["peak_mb"], _stat(done.stdout, "peak_rss_mb")),
        "failures": sorted({*before["failures"], *complaints}),
        "commit": before["commit"],
    }


def _stat(log: str, name: str) -> int:
    found = re.findall(rf"stat::{name}:\s*(\d+)", log) or re.findall(r"^#(\d+)", log, re.M)
    return int(found[-1]) if found else 0


def main() -> None:
    library("atheris", extra="fuzz", user="the fuzzer")
    from fuzz.readers import READERS

    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10**9, help="inputs for each reader, with those of before")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader, now")
    parser.add_argument("--target", nargs="+", choices=list(READERS), default=list(READERS))
    parser.add_argument("--out", type=Path, default=Path("results/fuzz.json"))
    options = parser.parse_args()
    targets = json.loads(options.out.read_text())["targets"] if options.out.exists() else {}
    commit = provenance()["commit"]
    with show_progress() as progress:
        for number, name in enumerate(options.target):
            progress("fuzzing", number, len(options.target), name)
            found, ends = targets.get(name, {}), time.monotonic() + options.seconds
            if found.get("commit") != commit:
                found = {"runs": 0, "seconds": 0, "branches": 0, "peak_mb": 0, "failures": [], "commit": commit}
            while found["runs"] < options.runs and (left := round(ends - time.monotonic())) > 0:
                targets[name] = found = fuzz(name, min(SLICE, options.runs - found["runs"]), left, found)
                kept = summary({name: targets[name] for name in READERS if name in targets})
                with atomic_write(options.out) as draft:  # now, so that it can be stopped at will
                    draft.write_text(json.dumps(kept, indent=1) + "\n")
            output.print(f"{name}: {found['runs']:,} inputs, {len(found['failures'])} failures", highlight=False)
            for said in found["failures"]:
                output.print(f"  {said}", highlight=False, markup=False)
    kept = summary({name: targets[name] for name in READERS if name in targets})
    with atomic_write(options.out.with_suffix(".md")) as draft:
        draft.write_text(page(kept))
    output.print(table(kept), highlight=False)
    counts = f"{len(targets)} readers, {kept['runs']:,} inputs, {kept['failures']} failures"
    output.print(f"{counts}: {options.out}", highlight=False)
    sys.exit(kept["failures"] > 0)


def summary(targets: dict[str, dict]) -> dict:
    """What results/ keeps: the sums, each reader, and what it was made by."""
    runs = sum(found["runs"] for found in targets.values())
    failures = sum(len(found["failures"]) for found in targets.values())
    made_by = provenance() | {"command": shlex.join(["python", "-m", "fuzz", *sys.argv[1:]])}
    return {"runs": runs, "failures": failures, "targets": targets, "made_by": made_by}


def page(results: dict) -> str:
    """The text of results/fuzz.md."""
    return f"# Fuzzing of every reader\n\n{table(results)}"


def table(results: dict) -> str:
    """The results as a Markdown table."""
    targets = results["targets"]
    rows = [
        (name, f"{target['runs']:,}", str(target["branches"]), str(len(target["failures"])))
        for name, target in targets.items()
    ]
    peak = max(target["peak_mb"] for target in targets.values())
    return (
        Table(("reader", "inputs", "branches", "failures"), tuple(rows)).to_markdown() + f"\nPeak memory: {peak} MB.\n"
    )


if __name__ == "__main__":
    main()
