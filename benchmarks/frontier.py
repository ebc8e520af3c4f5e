"""What minutes of a CPU buy on photos: frozen networks, fitted heads and fine-tuned networks.

    python -m benchmarks.frontier --data ROOT --work FOLDER [--only cub-photos ...]    run what is missing
    python -m benchmarks.frontier --report       docs/photos.md and the README from results/frontier

ROOT has CUB_200_2011 and Cars196. Rows are scored once, on the test classes: `benchmarks.photo_search` chose the
settings on training classes. The time of a row is that of one thread (CPU time: set OMP_NUM_THREADS=1), from the start
of the command to its pictures. A finished row is a file in results/frontier; an interrupted one starts again.
"""

import argparse
import json
import re
import resource
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure

from proxygml import data
from proxygml.data import ImageList
from proxygml.files import atomic_write
from proxygml.paper.results import range_of
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe
from proxygml.training.run import provenance
from proxygml.training.start import train

RESULTS, PLOT = Path("results/frontier"), Path("docs/pictures/frontier.png")
PAGE, README = Path("docs/photos.md"), Path("README.md")
FOLDERS = {"cub": "CUB_200_2011", "cars": "Cars196"}
NAMES = {"cub": "CUB-200-2011", "cars": "Cars196"}
SEEDS = 3
HEAD_SIZES = (160, 224)
FEW = ((4, 60), (10, 60), (30, 60), (10, 10), (100, 5), (100, 2))  # training classes, at most so many images of each
FEW_TESTED = 40  # unseen classes that these are tested on


@dataclass(frozen=True)
class Row:
    """A run: a preset, and what differs from it."""

    name: str
    preset: str
    dataset: str
    settings: dict = field(default_factory=dict)
    seed: int = 0
    few: tuple[int, int] | None = None  # a sub-sample: training classes, images of each

    @property
    def key(self) -> str:
        return re.sub(r"\W+", "-", f"{self.dataset} {self.name} {f'seed {self.seed}' if self.seed else ''}").strip("-")

    def recipe(self, root: Path) -> Recipe:
        settings = {"dataset": self.dataset, "data": str(root / FOLDERS[self.dataset]), "seed": self.seed}
        settings |= {"skip_broken": self.dataset == "cars", "cache": None}  # our copy of Cars196 lacks 15 photos
        return Recipe.preset(self.preset, **(settings | self.settings))

    @property
    def result(self) -> dict | None:
        """What `run` wrote, if it did."""
        path = RESULTS / f"{self.key}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def run(self, root: Path, work: Path) -> None:
        """Train and write the scores and the time."""
        shutil.rmtree(work / self.key, ignore_errors=True)
        started, before = time.perf_counter(), time.process_time()
        recipe, images = self.recipe(root), None
        if self.few is not None:
            recipe, images = recipe.changed({"data": None}), sub_sample(recipe, *self.few)
        trained = train(recipe, work / self.key, data=images)
        result = {
            "preset": self.preset,
            "settings": self.settings,
            "few": self.few,
            "seed": self.seed,
            "cpu_minutes": (time.process_time() - before) / 60,
            "minutes": (time.perf_counter() - started) / 60,
            "threads": torch.get_num_threads(),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
            "scores": {name: value for name, value in trained.scores.items() if name not in ("made_by", "checksum")},
            "made_by": provenance() | {"command": f"python -m benchmarks.frontier --only {self.key}"},
        }
        with atomic_write(RESULTS / f"{self.key}.json") as path:
            path.write_text(json.dumps(result, indent=1) + "\n")


def sub_sample(recipe: Recipe, classes: int, images: int) -> dict[str, ImageList]:
    """The first training classes with some images each, and unseen classes."""
    trained, tested = data.load(recipe.dataset, recipe.data)
    few = trained.select_classes(range(classes)).limit_class_size(images)
    return {"train": few, "test": tested.select_classes(range(FEW_TESTED))}


def rows() -> Iterator[Row]:
    """All rows, the most important ones first."""
    for seed in range(SEEDS):
        for dataset in FOLDERS:
            yield Row("photos-fast", "photos-fast", dataset, seed=seed)
            yield Row("photos", "photos", dataset, seed=seed)
    for dataset in FOLDERS:
        yield Row("photos-best", "photos-best", dataset)
    for dataset in FOLDERS:
        for size in HEAD_SIZES:
            yield Row(f"head at {size}", "photos-fast", dataset, {"image_size": size, "test_scale": 1.0})
    for classes, images in FEW:
        for dataset in FOLDERS:
            for preset in ("photos-fast", "photos"):
                yield Row(f"{preset} {classes} x {images}", preset, dataset, few=(classes, images))


def score_cells(scores: dict) -> list[str]:
    return ["-" if scores[name] is None else f"{100 * scores[name]:.1f}" for name in ("recall@1", "map_at_r", "nmi")]


def frontier_table(dataset: str) -> Table:
    """Scores on test classes by row; those of several seeds as mean and range."""
    lines = []
    groups: dict[str, list[dict]] = {}
    for row in rows():
        if row.dataset == dataset and row.few is None and row.result is not None:
            groups.setdefault(row.name, []).append(row.result)
    for name, results in groups.items():
        size = Recipe.preset(results[0]["preset"], **results[0]["settings"]).test_side
        frozen = results[0]["scores"]["untrained"]
        lines.append((f"frozen at {size}", "", *score_cells(frozen), ""))
        trained = [result["scores"]["trained"] for result in results]
        mean = {
            metric: sum(each[metric] for each in trained) / len(trained) for metric in ("recall@1", "map_at_r", "nmi")
        }
        recalls = [100 * each["recall@1"] for each in trained]
        spread = f"{min(recalls):.1f} to {max(recalls):.1f}, {len(recalls)} seeds" if len(recalls) > 1 else "1 seed"
        minutes = sum(result["cpu_minutes"] for result in results) / len(results)
        lines.append((name, f"{minutes:.0f}", *score_cells(mean), spread))
    unique = tuple(dict.fromkeys(lines))
    return Table((NAMES[dataset], "minutes", "R@1", "MAP@R", "NMI", "R@1 by seed"), unique)


def few_table(dataset: str) -> Table:
    """Recall@1 and MAP@R of the frozen network and of presets that were trained on sub-samples."""
    lines = []
    results = {(row.few, row.preset): row.result for row in rows() if row.dataset == dataset and row.few}
    for few in FEW:
        both = [results[few, preset] for preset in ("photos-fast", "photos")]
        if None in both:
            continue
        cells = ["/".join(score_cells(both[0]["scores"]["untrained"])[:2])]
        for scores in (result["scores"] for result in both):
            gain, low, high = (100 * value for value in scores["gain"])
            cells += ["/".join(score_cells(scores["trained"])[:2]), f"{gain:+.1f} ({low:.1f} to {high:.1f})"]
        lines.append((f"{few[0]} x {few[1]}", *cells))
    header = (f"{NAMES[dataset]}: classes x photos", "frozen", "photos-fast", "gain in R@1", "photos", "gain in R@1")
    return Table(header, tuple(lines))


def search_table() -> Table:
    """What `benchmarks.photo_search` found on held-out training classes, at the largest test size of each run."""
    path, lines = RESULTS / "search.json", []
    for name, run in (json.loads(path.read_text()) if path.exists() else {}).items():
        size = max(run["frozen"], key=int)
        states = (run["frozen"], run["start"], run["epochs"][-1][2], run["flips"])
        cells = [" / ".join(f"{value:.1f}" for value in state[size]) for state in states]
        lines.append((f"{name}, tested at {size}", *cells, f"{run['training_minutes']:.1f}"))
    header = ("R@1 / MAP@R on held-out training classes", "frozen", "head fitted", "two epochs", "and flips", "minutes")
    return Table(header, tuple(lines))


def plot() -> None:
    """Recall@1 on unseen classes against minutes, by dataset."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axis, dataset in zip(figure.subplots(1, 2), FOLDERS, strict=True):
        for row in rows():
            if row.dataset != dataset or row.few or row.result is None or row.seed:
                continue
            minutes, recall = row.result["cpu_minutes"], 100 * row.result["scores"]["trained"]["recall@1"]
            axis.scatter(minutes, recall, s=60 if row.name == row.preset else 20, color="#1a6fb0")
            axis.annotate(row.name, (minutes, recall), (5, -10), textcoords="offset points", fontsize="small")
            if row.name == row.preset:
                frozen = 100 * row.result["scores"]["untrained"]["recall@1"]
                axis.axhline(frozen, color="#999999", linewidth=0.8, linestyle=":")
        axis.set(title=NAMES[dataset], xlabel="minutes on one core", ylabel="Recall@1 on unseen classes, %")
        axis.margins(0.25, 0.15)
        axis.set_xlim(left=0)
    with atomic_write(PLOT) as path:
        figure.savefig(path, dpi=110)


def tables() -> str:
    """The tables as they stand in the document."""
    made = [*map(frontier_table, FOLDERS), *map(few_table, FOLDERS), search_table()]
    return "\n".join(table.to_markdown() for table in made if table.rows)


def update_readme(text: str) -> str:
    """The README with the scores of the preset photos in its table, as means over seeds."""
    lines = []
    for dataset, name in NAMES.items():
        runs = [row.result for row in rows() if (row.name, row.dataset) == ("photos", dataset) and row.result]
        frozen = score_cells(runs[0]["scores"]["untrained"])
        trained = [range_of([100 * run["scores"]["trained"][each] for run in runs]) for each in ("recall@1", "nmi")]
        minutes = sum(run["cpu_minutes"] for run in runs) / len(runs)
        side = Recipe.preset("photos").test_side
        lines.append(f"| {name}, {side} px | nothing | frozen network | {frozen[0]} | {frozen[-1]} |\n")
        what = f"all layers, {minutes:.0f} minutes of one core"
        lines.append(f"| | {what} | [preset `photos`](docs/photos.md) | {trained[0]} | {trained[1]} |\n")
    begin, end = text.index(f"| {NAMES['cub']}, "), text.index("| Cars196, 144 px")
    return text[:begin] + "".join(lines) + text[end:]


def write_page() -> None:
    """Replace the tables between the two marks in the document and in the README, and the plot."""
    with atomic_write(README) as path:
        path.write_text(update_readme(README.read_text()))
    text = PAGE.read_text()
    begin, end = "<!-- results -->\n", "<!-- end of results -->"
    before, after = text.split(begin)[0], text.split(end)[1]
    with atomic_write(PAGE) as path:
        path.write_text(f"{before}{begin}{tables()}\n{end}{after}")
    plot()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CUB_200_2011 and Cars196")
    parser.add_argument("--work", type=Path, help="folder for the runs")
    parser.add_argument("--only", nargs="+", help="rows to run, by the names of their result files")
    parser.add_argument("--plan", action="store_true", help="list the rows that are missing")
    parser.add_argument("--report", action="store_true", help="write the document instead")
    options = parser.parse_args()
    if options.report:
        write_page()
        return
    for row in rows():
        if (options.only is None or row.key in options.only) and row.result is None:
            print(row.key)
            if not options.plan:
                row.run(options.data, options.work)


if __name__ == "__main__":
    main()
