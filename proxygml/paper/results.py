"""The runs of an experiment on a dataset, in results/NAME/DATASET.json, and statistics over their seeds."""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from scipy import stats

from proxygml import losses
from proxygml.files import (
    CHECKSUM,
    atomic_write,
    locked,
    one_line,
    parse_json,
    require_file,
    verify_checksum,
    with_checksum,
)
from proxygml.training.build import own_rate
from proxygml.training.recipe import Recipe

METRICS = {"R@1": "recall@1", "NMI": "nmi"}  # the paper's two measures
NO_INFLUENCE = frozenset(
    ["data", "device", "workers", "devices", "nodes", "shard", "timeout", "cache", "cache_gigabytes"]
)


def settings_of(recipe: Recipe) -> dict[str, object]:
    """The settings that determine a run's scores, without defaults: a new setting changes no fingerprint."""
    default = asdict(Recipe())
    settings = {
        name: value for name, value in asdict(recipe).items() if name not in NO_INFLUENCE and value != default[name]
    }
    settings["proxy_learning_rate"] = own_rate(recipe)
    if recipe.keep_epoch == "last":  # scores of earlier epochs do not choose the network
        settings.pop("tested_epochs", None)
    if recipe.loss != "proxygml":  # all settings of ProxyGML are in the recipe
        settings["loss_defaults"] = losses.defaults(recipe.loss)
    return settings


@cache  # a plan of the queue compares every job with every run
def fingerprint(recipe: Recipe) -> str:
    """Hash of the settings that determine a run's scores."""
    return hashlib.sha256(json.dumps(settings_of(recipe), sort_keys=True).encode()).hexdigest()[:16]


def matches(run: dict, recipe: Recipe) -> bool:
    """Whether a finished run has this recipe, and scores after each of its tested epochs."""
    if run["fingerprint"] != fingerprint(recipe):
        return False
    return recipe.keep_epoch == "best" or set(recipe.tested_epochs) <= {
        point["epoch"] for point in run.get("curve", ())
    }


Claims = Mapping[str, Mapping[str, str]]  # claim of the paper -> measure -> verdict


class Range(NamedTuple):
    """A mean over seeds, in percent, and half the width of its 95 % interval; that is NaN for a single seed."""

    mean: float
    half_width: float

    def __format__(self, digits: str) -> str:
        if math.isnan(self.mean):
            return "-"
        shown = format(self.mean, digits or ".1f")
        return shown if math.isnan(self.half_width) else f"{shown} ± {format(self.half_width, digits or '.1f')}"

    def __str__(self) -> str:
        return format(self)


@dataclass(frozen=True)
class Results:
    """Runs by row, in the order of the experiment."""

    rows: Mapping[str, list[dict]]

    @classmethod
    def of(cls, runs: Iterable[dict], names: Iterable[str]) -> "Results":
        """Runs of the named rows; rows without runs are left out."""
        runs = sorted(runs, key=itemgetter("seed"))
        by_name = {name: [run for run in runs if run["row"] == name] for name in names}
        return cls({name: same for name, same in by_name.items() if same})

    @property
    def runs(self) -> list[dict]:
        return [run for same in self.rows.values() for run in same]

    def values(self, row: str, metric: str) -> dict[int, float]:
        """Percentages by seed; empty for a row without runs."""
        return {run["seed"]: 100 * run["scores"][metric] for run in self.rows.get(row, ())}

    def range(self, row: str, metric: str) -> Range:
        """Mean and interval over the seeds of a row."""
        return range_of(list(self.values(row, metric).values()))

    def cells(self, row: str, *metrics: str) -> tuple[str, ...]:
        """The same by several measures, as text."""
        return tuple(str(self.range(row, metric)) for metric in metrics)

    def difference(self, row: str, other: str, metric: str) -> Range:
        """Mean difference between two rows, paired by seed."""
        ours, theirs = self.values(row, metric), self.values(other, metric)
        return range_of([ours[seed] - theirs[seed] for seed in ours if seed in theirs])

    def verdict(self, row: str, other: str, metric: str = "recall@1") -> str:
        """Verdict on "row is better than other", with the difference."""
        return judge(self.difference(row, other, metric))

    def verdicts(self, row: str, other: str) -> dict[str, str]:
        """The same by Recall@1 and by NMI."""
        return {column: self.verdict(row, other, metric) for column, metric in METRICS.items()}

    def spread(self, rows: Iterable[str], metric: str) -> dict[int, float]:
        """Best minus worst of these rows, for each seed that all of them have."""
        values = [self.values(row, metric) for row in rows]
        seeds = set.intersection(*map(set, values)) if values else set()
        return {seed: max(one[seed] for one in values) - min(one[seed] for one in values) for seed in sorted(seeds)}


def judge(difference: Range) -> str:
    """Verdict on the claim that a difference is positive."""
    if math.isnan(difference.mean):
        return "not run with the same seeds"
    if math.isnan(difference.half_width):
        return f"one seed cannot tell ({difference.mean:+.1f})"
    if abs(difference.mean) <= difference.half_width:
        what = "no significant difference"
    else:
        what = "holds" if difference.mean > 0 else "**does not hold**"
    return f"{what} ({difference.mean:+.1f} ± {difference.half_width:.1f})"


def range_of(values: list[float]) -> Range:
    """Mean and 95 % interval (Student's t)."""
    if len(values) < 2:
        return Range(values[0] if values else math.nan, math.nan)
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return Range(statistics.mean(values), float(stats.t.ppf(0.975, len(values) - 1)) * spread)


def without_paths(command: str) -> str:
    """A command with `--data ROOT` and without --results and --work."""
    path = r"('[^']*'|\S+)"
    return re.sub(rf"--data[ =]{path}", "--data ROOT", re.sub(rf" --(results|work)[ =]{path}", "", command))


def results_file(folder: Path, experiment: str, dataset: str) -> Path:
    return folder / experiment / f"{dataset}.json"


def load_runs(path: Path, *, any_record: bool = False) -> list[dict]:
    """Runs, or trials of settings, that `save_runs` wrote; empty without a file.

    `any_record` also accepts the records that benchmarks keep under results/.
    """
    if not path.exists():
        return []
    try:
        runs = parse_json(require_file(path).read_bytes())
        if not (isinstance(runs, list) and all(_is_record(run, any_record=any_record) for run in runs)):
            raise ValueError("no list of runs")
        if any(CHECKSUM in run for run in runs) and not all(CHECKSUM in run for run in runs):
            raise ValueError(f"a run without {CHECKSUM}")
        return [verify_checksum(run) for run in runs]
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({one_line(error)}): restore it, or move it away to run it all again"
        ) from error


def _is_record(run: object, *, any_record: bool) -> bool:
    """Whether this is a run (row, fingerprint, seed) or a trial (row, of), with numbers as scores."""
    kinds = {"row": str, "of": str, "fingerprint": str, "seed": int, "scores": dict, "made_by": dict, "curve": list}
    if not isinstance(run, dict) or not all(isinstance(run.get(name, kind()), kind) for name, kind in kinds.items()):
        return False
    numbers = all(isinstance(value, (int, float)) for value in run.get("scores", {}).values())
    return any_record or (numbers and "row" in run and ("of" in run or {"fingerprint", "seed"} <= run.keys()))


def save_runs(path: Path, runs: list[dict]) -> None:
    with atomic_write(path) as draft:
        draft.write_text(json.dumps([with_checksum(run) for run in runs], indent=1) + "\n")


def add_runs(path: Path, new: list[dict]) -> None:
    """Add runs to a file under its lock; a run of the same row, seed and recipe is replaced."""
    with locked(path.parent):
        places = {(run["row"], run["seed"], run["fingerprint"]) for run in new}
        kept = [run for run in load_runs(path) if (run["row"], run["seed"], run["fingerprint"]) not in places]
        save_runs(path, [*kept, *new])


def known_runs(folder: Path, dataset: str) -> list[dict]:
    """Finished runs of all experiments on a dataset."""
    return [
        run
        for path in sorted(folder.glob(f"*/{dataset}.json"))
        for run in load_runs(path, any_record=True)
        if {"fingerprint", "scores"} <= run.keys()
    ]
