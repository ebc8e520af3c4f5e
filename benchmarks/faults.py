"""Commands that are disturbed at random moments: does each say so in a line, go on, and end with what it would have?

    python -m benchmarks.faults [--trials 120] [--seed 0] [--quick]

A trial starts a real command, disturbs it or its files, then gives it again, doing what its last line says, until it
ends well; what it ends with is compared with an undisturbed run, bit by bit but for times. Each trial is kept in
results/faults.json at once, and only one that went wrong is made again; --quick makes a few and writes nothing. A full
disk is a small tmpfs, a read-only folder one that is mounted again, both seen by nobody else; where mounting is not
allowed they are left out.
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

from benchmarks.disturbing import FAULTS, Trial, go_on, mounts_of, size_of
from benchmarks.started import Command
from benchmarks.victims import VICTIMS, Victim, make_ground
from proxygml.display import drawn_progress
from proxygml.experiments.tables import Table
from proxygml.files import written_whole
from proxygml.runs import provenance

FOUND, PAGE = Path("results/faults.json"), Path("docs/faults.md")
MOUNTS, ON_MOUNTS = "PROXYGML_MOUNTS", ("full disk", "read-only")  # set where this process may mount; what needs that
QUICK = (
    *(("train", "kill"), ("train", "SIGTERM"), ("train", "flipped bits"), ("index-vectors", "cut file")),
    *(("index-vectors", "two at once"), ("embed", "Ctrl-C"), ("embed", "full disk"), ("train", "read-only")),
)


def undisturbed(victim: Victim, ground: Path, *, quick: bool) -> dict:
    """What a command ends with if nothing happens, how long it computes, and how much its folder holds on the way."""
    found, seconds, peak = [], {}, 0
    for anew in (not victim.forks, victim.forks)[: 1 if quick or not victim.forks else 2]:
        # The others start from the run of the first.
        folder = ground if victim.name == "train" and not anew else ground / f"undisturbed-{anew}" / victim.name
        folder.mkdir(parents=True, exist_ok=True)
        victim.prepare(ground, folder)
        command = Command(victim.words(ground, folder), folder, anew=anew)
        while not command.ends_within(0.05):
            seconds[anew] = max(seconds.get(anew, 0.0), command.seconds())
            peak = max(peak, size_of(folder))
        ended = command.end()
        if ended.code:
            raise RuntimeError(f"{victim.name} failed undisturbed: {ended.lines}")
        found.append(victim.outcome(folder))
    if found[0] != found[-1]:
        raise RuntimeError(f"{victim.name} does not end alike if it is started anew")
    return {"seconds": seconds, "peak": peak, "expected": found[0]}


def make_trial(number: int, pair: tuple[str, str], seed: int, ground: Path, normal: dict) -> dict:
    """Disturb a command in a new folder and let it go on; what came of it."""
    (name, fault), began = pair, time.monotonic()
    folder = ground / f"trial{number}"
    folder.mkdir()
    victim = VICTIMS[name]
    victim.prepare(ground, folder)
    trial = Trial(victim, ground, folder, random=random.Random(f"{seed} {number}"), **normal)
    FAULTS[fault](trial)
    disturbed = len(trial.ends)
    equal = go_on(trial)
    wrong = [note for note in trial.notes if note.startswith("wrong")]
    wrong += [line for ended in trial.ends for line in ended.unclear()]
    while mounts_of(folder):
        subprocess.run(["umount", "--lazy", folder], check=True)
    shutil.rmtree(folder)
    noticed = any(end.code or any(line.startswith("warning") for line in end.lines) for end in trial.ends[:disturbed])
    return {
        "number": number,
        "command": name,
        "fault": fault,
        "notes": trial.notes,
        "ends": [f"{end.code} {end.line}".replace(str(ground), "").strip() for end in trial.ends],
        "noticed": noticed,
        "lost": not equal,
        "unclear": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }


def plan(trials: int, seed: int) -> list[tuple[str, str]]:
    """Commands and faults in random order: each pair once, then again those of commands that take a second or two."""
    pairs = [
        (victim.name, fault)
        for victim in VICTIMS.values()
        for fault in FAULTS
        if (fault != "helper killed" or victim.helpers)
        and (fault != "stale lock" or victim.alone)
        and (fault not in ON_MOUNTS or MOUNTS in os.environ)
    ]
    short = [pair for pair in pairs if pair[0] not in ("train-shared", "paper")]
    order, planned = random.Random(seed), []
    while len(planned) < trials:
        some = short if planned else pairs
        planned += order.sample(some, len(some))
    return planned[:trials]


def make_trials(pairs: list[tuple[str, str]], found: dict, keep: Callable[[dict], None], *, quick: bool) -> None:
    """Make what is missing of the trials, and keep each at once."""
    done = {trial["number"] for trial in found["trials"]}
    missing = [(number, pair) for number, pair in enumerate(pairs) if number not in done]
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, drawn_progress() as progress:
        (ground := Path(folder) / "ground").mkdir()
        os.environ.setdefault("PROXYGML_CACHE", f"{folder}/cache")
        os.environ["OMP_NUM_THREADS"] = "1"  # equal to the last bit only with as many threads
        names = [name for name in VICTIMS if name == "train" or name in {pair[0] for _, pair in missing}]
        normal = {}
        for place, name in enumerate(names):
            progress("undisturbed", place, len(names), name)
            normal[name] = undisturbed(VICTIMS[name], ground, quick=quick)
            if name == "train":
                make_ground(ground, paper="paper" in names)
        progress("undisturbed", len(names), len(names), "")
        for place, (number, pair) in enumerate(missing):
            progress("trials", place, len(missing), f"{pair[0]}, {pair[1]}")
            made = make_trial(number, pair, found["seed"], ground, normal[pair[0]])
            made["commit"] = found["made_by"]["commit"]
            wrong = [*made["unclear"], *(["LOST"] if made["lost"] else [])]
            print("; ".join([str(number), *pair, *made["notes"], *made["ends"], *wrong]), flush=True)
            found["trials"].append(made)
            keep(found)
        progress("trials", len(missing), len(missing), "")


def table(found: dict) -> str:
    """What was found, as Markdown: a line for each kind of fault."""
    rows = []
    for fault in FAULTS:
        same = [trial for trial in found["trials"] if trial["fault"] == fault]
        if same:
            counts = (len(same), *(sum(bool(trial[what]) for trial in same) for what in ("noticed", "unclear", "lost")))
            rows.append((fault, *map(str, counts)))
    columns = ("fault", "trials", "stopped or warned", "not said in a line", "results lost")
    return Table(columns, tuple(rows)).to_markdown()


def write_page(found: dict) -> None:
    """Put the table where the page has one."""
    text = PAGE.read_text().split("\n| fault |")[0].rstrip("\n")
    with written_whole(PAGE) as draft:
        draft.write_text(f"{text}\n\n{table(found)}\n{found['summary']}.\n")


def summary(found: dict) -> str:
    trials = found["trials"]
    lost, unclear = (sum(bool(trial[what]) for trial in trials) for what in ("lost", "unclear"))
    kinds, commands = (len({trial[what] for trial in trials}) for what in ("fault", "command"))
    seconds = sum(trial["seconds"] for trial in trials)
    return (
        f"{len(trials)} trials, {kinds} kinds of faults, {commands} commands: {lost} results lost, "
        f"{unclear} ends not said in a line; {seconds:.0f} s"
    )


def begin_where_mounts_are_allowed() -> None:
    """Become a process that may mount, in a namespace of its own, so that nobody else sees what it mounts."""
    alone = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    if MOUNTS in os.environ:
        return
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        print("no mounts here: full disks and read-only folders are left out")
        return
    words = [*alone, sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]]
    os.execvpe("unshare", words, {**os.environ, MOUNTS: "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    begin_where_mounts_are_allowed()
    found = {"made_by": provenance() | {"command": "python -m benchmarks.faults"}, "seed": options.seed, "trials": []}
    if options.quick:
        pairs = [pair for pair in QUICK if pair[1] not in ON_MOUNTS or MOUNTS in os.environ]
        make_trials(pairs, found, lambda _: None, quick=True)
    else:
        if FOUND.exists():
            before = json.loads(FOUND.read_text())
            if before["seed"] == options.seed:
                found["trials"] = [trial for trial in before["trials"] if not (trial["lost"] or trial["unclear"])]

        def keep(found: dict) -> None:
            found["summary"] = summary(found)
            with written_whole(FOUND) as draft:
                draft.write_text(json.dumps(found, indent=1) + "\n")

        make_trials(plan(options.trials, options.seed), found, keep, quick=False)
        write_page(found)
    for trial in found["trials"]:
        if trial["lost"] or trial["unclear"]:
            print(json.dumps(trial, indent=1))
    print(table(found))
    print(summary(found))
    sys.exit(any(trial["lost"] or trial["unclear"] for trial in found["trials"]))


if __name__ == "__main__":
    main()
