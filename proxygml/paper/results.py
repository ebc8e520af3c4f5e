"""The runs of an experiment on a dataset, in results/NAME/DATASET.json, and statistics over their seeds."""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from scipy import stats

from proxygml import losses
from proxygml.files import CHECKSUM, atomic_write, locked, one_line, parse_json, verify_checksum, with_checksum
from proxygml.training.build import own_rate
from proxygml.training.recipe import Recipe

NO_INFLUENCE = (  # on the scores of a run
    *("data", "device", "workers", "devices", "nodes", "shard", "timeout"),
    *("cache", "cache_gigabytes"),
)


def settings_of(recipe: Recipe) -> dict[str, object]:
    """What decides the scores of a run; defaults are left out, so that new settings may come."""
    default = asdict(Recipe())
    settings = {
        name: value for name, value in asdict(recipe).items() if name not in NO_INFLUENCE and value != default[name]
    }
    settings["proxy_learning_rate"] = own_rate(recipe)
    if recipe.keep_epoch == "last":  # scores in between are only looked at
        settings.pop("tested_epochs", None)
    if recipe.loss != "proxygml":  # whose settings are the recipe's own
        settings["loss_defaults"] = losses.defaults(recipe.loss)
    return settings


def fingerprint(recipe: Recipe) -> str:
    """The same for recipes that give the same scores."""
    return hashlib.sha256(json.dumps(settings_of(recipe), sort_keys=True).encode()).hexdigest()[:16]


def matches(run: dict, recipe: Recipe) -> bool:
    """Whether a finished run is of this recipe, with scores after every epoch that it asks for."""
    if run["fingerprint"] != fingerprint(recipe):
        return False
    return recipe.keep_epoch == "best" or set(recipe.tested_epochs) <= {
        point["epoch"] for point in run.get("curve", ())
    }


Claims = Mapping[str, Mapping[str, str]]  # what the paper says, and by each measure whether that holds


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
        """The runs of these rows, rows without any left out."""
        runs = list(runs)
        by_name = {name: sorted((run for run in runs if run["row"] == name), key=_seed) for name in names}
        return cls({name: same for name, same in by_name.items() if same})

    def values(self, row: str, metric: str) -> dict[int, float]:
        """Percentages by seed; none of a row that was not run."""
        return {run["seed"]: 100 * run["scores"][metric] for run in self.rows.get(row, ())}

    def range(self, row: str, metric: str) -> Range:
        """Mean and interval over the seeds of a row."""
        return range_of(list(self.values(row, metric).values()))

    def difference(self, row: str, other: str, metric: str) -> Range:
        """By how much a row is above another, paired by seed."""
        ours, theirs = self.values(row, metric), self.values(other, metric)
        return range_of([ours[seed] - theirs[seed] for seed in ours if seed in theirs])

    def best(self, metric: str) -> str:
        """The row with the highest mean."""
        return max(self.rows, key=lambda row: self.range(row, metric).mean)

    def verdict(self, row: str, other: str, metric: str = "recall@1") -> str:
        """Whether a row is above another, in words, with the difference that says so."""
        difference = self.difference(row, other, metric)
        return judge(difference)

    def verdicts(self, row: str, other: str) -> dict[str, str]:
        """The same by both of the paper's measures: retrieval and clustering."""
        return {"R@1": self.verdict(row, other, "recall@1"), "NMI": self.verdict(row, other, "nmi")}

    def spread(self, rows: Iterable[str], metric: str) -> dict[int, float]:
        """By seed, how far the best and the worst of these rows are apart; of seeds with which all were run."""
        values = [self.values(row, metric) for row in rows]
        seeds = set.intersection(*map(set, values)) if values else set()
        return {seed: max(one[seed] for one in values) - min(one[seed] for one in values) for seed in sorted(seeds)}


def judge(difference: Range) -> str:
    """Whether something is above something else, in words, with the difference that says so."""
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
    """Mean and 95 % interval of values, by Student's t."""
    if len(values) < 2:
        return Range(values[0] if values else math.nan, math.nan)
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return Range(statistics.mean(values), float(stats.t.ppf(0.975, len(values) - 1)) * spread)


def _seed(run: dict) -> int:
    return run["seed"]


def without_paths(command: str) -> str:
    """A command with `--data ROOT` and without --results and --work: paths of one machine help nobody."""
    path = r"('[^']*'|\S+)"
    return re.sub(rf"--data[ =]{path}", "--data ROOT", re.sub(rf" --(results|work)[ =]{path}", "", command))


def results_file(folder: Path, experiment: str, dataset: str) -> Path:
    return folder / experiment / f"{dataset}.json"


def load_runs(path: Path) -> list[dict]:
    """The runs, or trials of settings, that `save_runs` wrote; none where there is no file."""
    return _read(path, _is_run)


def _read(path: Path, expected: Callable[[object], bool]) -> list[dict]:
    if not path.exists():
        return []
    try:
        runs = parse_json(path.read_bytes())
        if not (isinstance(runs, list) and all(map(expected, runs))):
            raise ValueError("no list of runs")
        if any(CHECKSUM in run for run in runs) and not all(CHECKSUM in run for run in runs):
            raise ValueError(f"a run without {CHECKSUM}")
        return [verify_checksum(run) for run in runs]
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({one_line(error)}): restore it, or move it away to run it all again"
        ) from error


def _is_run(run: object) -> bool:
    """Whether a run says what it is of, and all that it says is of the right kind."""
    if not isinstance(run, dict) or not _is_record(run) or "row" not in run:
        return False
    numbers = all(isinstance(value, (int, float)) for value in run.get("scores", {}).values())
    return numbers and ("of" in run or {"fingerprint", "seed"} <= run.keys())  # `of` a row, where settings are tried


def _is_record(run: object) -> bool:
    """Whether it may stand beside runs: benchmarks keep records of their own there."""
    kinds = {"row": str, "of": str, "fingerprint": str, "seed": int, "scores": dict, "made_by": dict, "curve": list}
    return isinstance(run, dict) and all(isinstance(run.get(name, kind()), kind) for name, kind in kinds.items())


def save_runs(path: Path, runs: list[dict]) -> None:
    with atomic_write(path) as draft:
        draft.write_text(json.dumps([with_checksum(run) for run in runs], indent=1) + "\n")


def add_runs(path: Path, new: list[dict]) -> None:
    """Add runs to a file that other processes may be adding to; a run of the same row, seed and recipe is replaced."""
    with locked(path.parent):
        places = {(run["row"], run["seed"], run["fingerprint"]) for run in new}
        kept = [run for run in load_runs(path) if (run["row"], run["seed"], run["fingerprint"]) not in places]
        save_runs(path, [*kept, *new])


def known_runs(folder: Path, dataset: str) -> list[dict]:
    """Finished runs of all experiments on a dataset."""
    return [
        run
        for path in sorted(folder.glob(f"*/{dataset}.json"))
        for run in _read(path, _is_record)
        if {"fingerprint", "scores"} <= run.keys()
    ]
