"""Inject faults into real commands: does each report it in one line, recover, and produce the same result?

    python -m benchmarks.faults [--trials 200] [--seed 0] [--new] [--quick]

A trial starts a command, injects a fault, then follows the command's message and repeats it until it succeeds. The
result is compared bit for bit, except for times, with that of an undisturbed command. A file that a message gives up
counts as rebuilt: its content exists only because its source still does.

Each trial is saved in results/faults.json, and the command without --new continues there. All are of one commit, and a
trial that went wrong stays: after a change of the code, --new starts again and keeps such trials under "earlier".
--quick runs a few and writes nothing. A full disk is a small tmpfs, a read-only folder a remounted one, both in a
private mount namespace; without permission to mount they are skipped.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.hostile import HOSTILE, changed_mine
from benchmarks.faults.injection import INJECTED, Trial, folder_bytes, mounts_on, recover
from benchmarks.faults.processes import Command
from benchmarks.faults.workloads import WORKLOADS, Workload, make_shared_inputs
from proxygml.display import show_progress
from proxygml.files import atomic_write
from proxygml.paper.tables import Table
from proxygml.training.run import provenance

RESULTS = Path("results/faults.json")
MAY_MOUNT = "PROXYGML_MAY_MOUNT"  # environment variable, set in the private mount namespace
NEED_MOUNT = ("full disk", "read-only")
FAULTS = INJECTED | HOSTILE
APPLIES: dict[str, Callable[[Workload], bool]] = {  # faults that some commands cannot meet
    "worker killed": lambda workload: workload.workers,
    "stale lock": lambda workload: workload.locks,
    "journal": lambda workload: workload.name.startswith("index"),
    "edited recipe": lambda workload: workload.name.startswith("train"),
    "few open files": lambda workload: workload.name == "train-tar",
    "concurrent removal": lambda workload: workload.name == "index-vectors",
}
QUICK = (
    *(("train", "kill"), ("train", "flipped bits"), ("index-vectors", "truncated file")),
    *(("index-vectors", "two commands"), ("embed", "full disk")),
)


def run_undisturbed(workload: Workload, shared: Path, *, quick: bool) -> dict:
    """Result, CPU time and peak folder size of a command without a fault."""
    results, cpu_seconds, peak_bytes = [], {}, 0
    for fresh in (not workload.forks, workload.forks)[: 1 if quick or not workload.forks else 2]:
        # Other commands start from the run of the first.
        in_shared = workload.name == "train" and not fresh
        folder = shared if in_shared else shared / f"undisturbed-{fresh}" / workload.name
        folder.mkdir(parents=True, exist_ok=True)
        workload.prepare(shared, folder)
        command = Command(workload.arguments(shared, folder), folder, fresh=fresh)
        while not command.ends_within(0.05):
            cpu_seconds[fresh] = max(cpu_seconds.get(fresh, 0.0), command.cpu_seconds())
            peak_bytes = max(peak_bytes, folder_bytes(folder))
        ended = command.wait()
        if ended.code:
            raise RuntimeError(f"{workload.name} failed without a fault: {ended.lines}")
        results.append(workload.result(folder))
    if results[0] != results[-1]:
        raise RuntimeError(f"{workload.name} is not reproducible in a fresh interpreter")
    return {"cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes, "expected": results[0]}


def run_trial(number: int, pair: tuple[str, str], seed: int, shared: Path, undisturbed: dict) -> dict:
    """Inject a fault into a command in a new folder and let it recover."""
    (name, fault), started = pair, time.monotonic()
    folder = shared / f"trial{number}"
    folder.mkdir()
    workload = WORKLOADS[name]
    workload.prepare(shared, folder)
    trial = Trial(workload, shared, folder, rng=random.Random(f"{seed} {number}"), **undisturbed)
    FAULTS[fault](trial)
    with_fault = trial.exits[:]
    equal = recover(trial)
    problems = [note for note in trial.notes if note.startswith("wrong")]
    problems += [problem for ended in trial.exits for problem in ended.problems()]
    problems += ["wrong: a file of the user was changed"] * changed_mine(folder)
    while mounts_on(folder):
        subprocess.run(["umount", "--lazy", folder], check=True)
    shutil.rmtree(folder)
    return {
        "number": number,
        "command": name,
        "fault": fault,
        "notes": trial.notes,
        "exits": [f"{ended.code} {ended.message}".replace(str(shared), "").strip() for ended in trial.exits],
        "reported": any(e.code or any(line.startswith("warning") for line in e.lines) for e in with_fault),
        "rebuilt": [path.replace(str(shared), "") for path in trial.rebuilt],
        "lost": not equal,
        "unclear": problems,
        "seconds": round(time.monotonic() - started, 1),
    }


def plan(trials: int, seed: int) -> list[tuple[str, str]]:
    """Pairs of command and fault in random order: each pair once, then pairs of fast commands again."""
    pairs = [
        (workload.name, fault)
        for workload in WORKLOADS.values()
        for fault in FAULTS
        if fault not in APPLIES or APPLIES[fault](workload)
        if fault not in NEED_MOUNT or MAY_MOUNT in os.environ
    ]
    fast = [pair for pair in pairs if pair[0] not in ("train-sharded", "paper")]
    rng, planned = random.Random(seed), []
    while len(planned) < trials:
        choices = fast if planned else pairs
        planned += rng.sample(choices, len(choices))
    return planned[:trials]


def run_trials(pairs: list[tuple[str, str]], results: dict, save: Callable[[dict], None], *, quick: bool) -> None:
    """Run the missing trials and save after each."""
    done = {trial["number"] for trial in results["trials"]}
    missing = [(number, pair) for number, pair in enumerate(pairs) if number not in done]
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, show_progress() as progress:
        (shared := Path(folder) / "shared").mkdir()
        os.environ.setdefault("PROXYGML_CACHE", f"{folder}/cache")
        os.environ["OMP_NUM_THREADS"] = "1"  # results are bit-exact only with the same number of threads
        names = [name for name in WORKLOADS if name == "train" or name in {pair[0] for _, pair in missing}]
        undisturbed = {}
        for done, name in enumerate(names):
            progress("undisturbed", done, len(names), name)
            undisturbed[name] = run_undisturbed(WORKLOADS[name], shared, quick=quick)
            if name == "train":
                make_shared_inputs(shared, paper="paper" in names)
        progress("undisturbed", len(names), len(names), "")
        for done, (number, pair) in enumerate(missing):
            progress("trials", done, len(missing), f"{pair[0]}, {pair[1]}")
            trial = run_trial(number, pair, results["seed"], shared, undisturbed[pair[0]])
            trial["commit"] = results["made_by"]["commit"]
            problems = [*trial["unclear"], *(["LOST"] if trial["lost"] else [])]
            print("; ".join([str(number), *pair, *trial["notes"], *trial["exits"], *problems]), flush=True)
            results["trials"].append(trial)
            save(results)
        progress("trials", len(missing), len(missing), "")


def table(results: dict) -> str:
    """The trials as a Markdown table with a row for each fault."""
    rows = []
    for fault in FAULTS:
        trials = [trial for trial in results["trials"] if trial["fault"] == fault]
        if trials:
            counts = [sum(bool(trial[key]) for trial in trials) for key in ("reported", "unclear", "rebuilt", "lost")]
            rows.append((fault, str(len(trials)), *map(str, counts)))
    columns = ("fault", "trials", "stopped or warned", "unclear messages", "rebuilt", "results lost")
    return Table(columns, tuple(rows)).to_markdown()


def summary(results: dict) -> str:
    trials = results["trials"]
    lost, unclear, rebuilt = (sum(bool(trial[key]) for trial in trials) for key in ("lost", "unclear", "rebuilt"))
    faults, commands = (len({trial[key] for trial in trials}) for key in ("fault", "command"))
    seconds = sum(trial["seconds"] for trial in trials)
    return (
        f"{len(trials)} trials, {faults} faults, {commands} commands: {lost} results lost, "
        f"{unclear} unclear messages, {rebuilt} rebuilt from their sources; {seconds:.0f} s"
    )


def page(results: dict) -> str:
    """The text of results/faults.md."""
    text = f"# Injected faults\n\n{table(results)}\n{results['summary']}.\n"
    if results["earlier"]:
        names = ("commit", "command", "fault", "unclear", "lost")
        rows = tuple(tuple(str(trial[name]) for name in names) for trial in results["earlier"])
        text += f"\n## Went wrong at earlier commits\n\n{Table(names, rows).to_markdown()}"
    return text


def went_wrong(results: dict) -> list[dict]:
    return [trial for trial in results["trials"] if trial["lost"] or trial["unclear"]]


def enter_mount_namespace() -> None:
    """Restart in a private mount namespace, so that mounts are invisible to other processes."""
    unshare = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    if MAY_MOUNT in os.environ:
        return
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        print("mounting is not permitted: skipping full disks and read-only folders")
        return
    command = [*unshare, sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]]
    os.execvpe("unshare", command, {**os.environ, MAY_MOUNT: "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--new", action="store_true", help="start again at this commit, keep what went wrong before")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    enter_mount_namespace()
    made_by = provenance() | {"command": "python -m benchmarks.faults"}
    results = {"made_by": made_by, "seed": options.seed, "trials": [], "earlier": []}
    if options.quick:
        pairs = [pair for pair in QUICK if pair[1] not in NEED_MOUNT or MAY_MOUNT in os.environ]
        run_trials(pairs, results, lambda _: None, quick=True)
    else:
        if RESULTS.exists():
            previous = json.loads(RESULTS.read_text())
            if options.new:
                results["earlier"] = previous["earlier"] + went_wrong(previous)
            elif (previous["seed"], previous["made_by"]["commit"]) == (options.seed, made_by["commit"]):
                results = previous
            else:
                commit = previous["made_by"]["commit"]
                sys.exit(f"{RESULTS} has seed {previous['seed']} and commit {commit}: check that out, or pass --new")

        def save(results: dict) -> None:
            results["summary"] = summary(results)
            with atomic_write(RESULTS) as draft:
                draft.write_text(json.dumps(results, indent=1) + "\n")

        run_trials(plan(options.trials, options.seed), results, save, quick=False)
        with atomic_write(RESULTS.with_suffix(".md")) as draft:
            draft.write_text(page(results))
    failed = went_wrong(results)
    for trial in failed:
        print(json.dumps(trial, indent=1))
    print(table(results))
    print(summary(results))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
