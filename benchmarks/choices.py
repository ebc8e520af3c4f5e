"""Which setting of a photo recipe matters: one change at a time, judged on held-out training classes.

    python -m benchmarks.choices --data CUB_200_2011 [--seeds 0 1] [--only NAME ...] [--quick] [--render]

Every run trains on three quarters of the training classes of CUB-200-2011 and is scored on the other quarter; the test
classes are never looked at. Runs that results/choices/cub.json holds already are not made again, so it can be stopped
and started at will. --render prints the table from that file, as docs/paper.md has it; --quick makes two short runs on
made-up photos.
"""

import argparse
import json
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from rich.progress import Progress

from benchmarks.images import make_photos
from proxygml.files import written_whole
from proxygml.recipes import Recipe
from proxygml.training import train

RESULTS = Path("results/choices/cub.json")
METRICS = ("recall@1", "map_at_r")
COMMAND = "python -m benchmarks.choices --data CUB_200_2011"

START = Recipe(  # the loss as in the paper; what surrounds it as the hand trial had it
    dataset="cub",
    backbone="efficientnet-lite0",
    weights="pretrained",
    frozen=("stem", "1", "2"),
    image_size=128,
    crop_scale=(0.25, 1.0),
    epochs=3,
    learning_rate=2e-4,
    head_learning_rate=1e-3,
    adam_epsilon=1e-8,
    schedule="cosine",
    freeze_batch_norm=True,
    held_out=0.25,
    test=False,
    recall_at=(1, 2, 4, 8),
)
BOTH = {"ratio": 0.2, "adam_epsilon": 1e-2}
SEEN = {"pooling": "average+max", "crop_scale": (0.16, 1.0)}
TOGETHER = {"ratio": 1.0, "adam_epsilon": 1e-2, **SEEN}
CHOICES: dict[str, dict[str, object]] = {
    "as in the paper": {},
    "epsilon 0.01": {"adam_epsilon": 1e-2},
    "proxy rate 0.003": {"proxy_learning_rate": 3e-3},
    "proxy rate 0.3": {"proxy_learning_rate": 3e-1},
    "scale 0.5": {"scale": 0.5},
    "scale 2": {"scale": 2.0},
    "scale 3": {"scale": 3.0},
    "N 4, scale 3": {"proxies_per_class": 4, "scale": 3.0},
    "N 1, scale 12": {"proxies_per_class": 1, "scale": 12.0},
    "ratio 0.2": {"ratio": 0.2},
    "ratio 1": {"ratio": 1.0},
    "lambda 0": {"proxy_weight": 0.0},
    "ratio 0.2, scale 0.5": {"ratio": 0.2, "scale": 0.5},
    "ratio 0.2, epsilon 0.01": BOTH,
    "ratio 1, epsilon 0.01": BOTH | {"ratio": 1.0},
    "both, rates doubled": BOTH | {"learning_rate": 4e-4, "head_learning_rate": 2e-3},
    "both, average and max pooling": BOTH | {"pooling": "average+max"},
    "both, crops from 0.16": BOTH | {"crop_scale": (0.16, 1.0)},
    "together": TOGETHER,
    "together, nothing frozen": TOGETHER | {"frozen": ()},
    "together, frozen to stage 3": TOGETHER | {"frozen": ("stem", "1", "2", "3")},
    "together, batch norm learns": TOGETHER | {"freeze_batch_norm": False},
    "together, 6 epochs": TOGETHER | {"epochs": 6},
    "together, nothing frozen, 6 epochs": TOGETHER | {"frozen": (), "epochs": 6},
    "together, nothing frozen, 12 epochs": TOGETHER | {"frozen": (), "epochs": 12},
    "Proxy-Anchor, proxy rate 0.01": {"loss": "proxy-anchor", "proxy_learning_rate": 1e-2},
    "Proxy-Anchor, proxy rate 0.03": {"loss": "proxy-anchor"},
    "Proxy-Anchor, epsilon 0.01": {"loss": "proxy-anchor", "proxy_learning_rate": 1e-2, "adam_epsilon": 1e-2},
    "Proxy-Anchor, pooling and crops alike": {"loss": "proxy-anchor", **SEEN},
    "Proxy-Anchor, the same, nothing frozen, 6 epochs": {"loss": "proxy-anchor", **SEEN, "frozen": (), "epochs": 6},
}


def one_run(name: str, recipe: Recipe) -> dict:
    """Train once on one core; what the held-out classes say."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = train(recipe, Path(folder) / "run")
        scores = run.scores
        curve = [entry["held_out"]["recall@1"] for entry in run.log]
    found = {metric: scores["held_out"][metric] for metric in METRICS}
    changes = {key: value for key, value in vars(recipe).items() if key != "data" and value != getattr(START, key)}
    measured = {"seconds": scores["seconds"], "made_by": scores["made_by"] | {"command": COMMAND}}
    return {"name": name, "seed": recipe.seed, **found, "epochs": curve, **measured, "changes": changes}


def table(runs: list[dict]) -> str:
    """The runs as Markdown, in the order of CHOICES: means over seeds, and the mean difference to the first choice.

    Differences are between runs of the same seed.
    """
    by_name = {name: [run for run in runs if run["name"] == name] for name in CHOICES}
    first = {run["seed"]: run for run in next(iter(by_name.values()))}
    lines = ["| choice | Recall@1 | MAP@R | difference | seeds |", "|---|---|---|---|---|"]
    for name, same in by_name.items():
        if same:
            means = {metric: 100 * statistics.mean(run[metric] for run in same) for metric in METRICS}
            paired = [[run[m] - first[run["seed"]][m] for m in METRICS] for run in same if run["seed"] in first]
            by = " / ".join(f"{100 * statistics.mean(column):+.1f}" for column in zip(*paired, strict=True))
            lines.append(f"| {name} | {means['recall@1']:.1f} | {means['map_at_r']:.1f} | {by} | {len(same)} |")
    return "\n".join(lines)


def make_runs(start: Recipe, wanted: list[tuple[str, int]], runs: list[dict], results: Path) -> None:
    """Add a run for every (name, seed) that is wanted, as many at a time as there are cores, and keep each at once."""
    with ProcessPoolExecutor(os.cpu_count(), max_tasks_per_child=1) as pool, Progress() as progress:
        task = progress.add_task("runs", total=len(wanted))
        futures = [pool.submit(one_run, name, start.changed(CHOICES[name] | {"seed": seed})) for name, seed in wanted]
        for future in as_completed(futures):
            runs.append(future.result())
            progress.update(task, advance=1)
            with written_whole(results) as path:
                path.write_text(json.dumps(runs, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of CUB-200-2011")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=CHOICES, metavar="NAME", default=list(CHOICES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            make_photos(Path(folder), 96, (64, 48), classes=16)
            small = {"backbone": "convnet", "weights": None, "frozen": (), "image_size": 32, "epochs": 1}
            runs: list[dict] = []
            start = START.changed({"dataset": "folder", "data": folder, **small})
            make_runs(start, [("as in the paper", 0), ("lambda 0", 0)], runs, Path(folder) / "quick.json")
            print(table(runs))
        return
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = {(run["name"], run["seed"]) for run in runs}
    if not options.render:
        if options.data is None:
            parser.error("name the folder of CUB-200-2011 with --data, or try --quick or --render")
        start = START.changed({"data": str(options.data)})
        wanted = [(name, seed) for seed in options.seeds for name in options.only if (name, seed) not in done]
        make_runs(start, wanted, runs, RESULTS)
    print(table(runs))


if __name__ == "__main__":
    main()
