"""Ablation of the settings of a photo recipe, one change at a time, on held-out training classes.

    python -m benchmarks.ablation --data CUB_200_2011 [--seeds 0 1] [--only NAME ...] [--quick] [--render]

Every run trains on three quarters of the training classes of CUB-200-2011 and is evaluated on the other quarter; the
test classes are not used. Runs in results/ablation/cub.json are not repeated, so you can stop and restart it. --render
only writes the table results/ablation/cub.md from that file; --quick makes two short runs on synthetic photos.
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
from proxygml.files import atomic_write
from proxygml.training.recipe import Recipe
from proxygml.training.start import train

RESULTS = Path("results/ablation/cub.json")
METRICS = ("recall@1", "map_at_r")
COMMAND = "python -m benchmarks.ablation --data CUB_200_2011"

BASELINE = Recipe(  # the paper's loss
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
RATIO_EPSILON = {"ratio": 0.2, "adam_epsilon": 1e-2}
POOLING_CROPS = {"pooling": "average+max", "crop_scale": (0.16, 1.0)}
COMBINED = {"ratio": 1.0, "adam_epsilon": 1e-2, **POOLING_CROPS}
SETTINGS: dict[str, dict[str, object]] = {
    "paper": {},
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
    "ratio 0.2, epsilon 0.01": RATIO_EPSILON,
    "ratio 1, epsilon 0.01": RATIO_EPSILON | {"ratio": 1.0},
    "ratio 0.2, epsilon 0.01, rates doubled": RATIO_EPSILON | {"learning_rate": 4e-4, "head_learning_rate": 2e-3},
    "ratio 0.2, epsilon 0.01, average and max pooling": RATIO_EPSILON | {"pooling": "average+max"},
    "ratio 0.2, epsilon 0.01, crops from 0.16": RATIO_EPSILON | {"crop_scale": (0.16, 1.0)},
    "combined": COMBINED,
    "combined, nothing frozen": COMBINED | {"frozen": ()},
    "combined, frozen to stage 3": COMBINED | {"frozen": ("stem", "1", "2", "3")},
    "combined, batch norm learns": COMBINED | {"freeze_batch_norm": False},
    "combined, 6 epochs": COMBINED | {"epochs": 6},
    "combined, nothing frozen, 6 epochs": COMBINED | {"frozen": (), "epochs": 6},
    "combined, nothing frozen, 12 epochs": COMBINED | {"frozen": (), "epochs": 12},
    "Proxy-Anchor, proxy rate 0.01": {"loss": "proxy-anchor", "proxy_learning_rate": 1e-2},
    "Proxy-Anchor, proxy rate 0.03": {"loss": "proxy-anchor"},
    "Proxy-Anchor, epsilon 0.01": {"loss": "proxy-anchor", "proxy_learning_rate": 1e-2, "adam_epsilon": 1e-2},
    "Proxy-Anchor, same pooling and crops": {"loss": "proxy-anchor", **POOLING_CROPS},
    "Proxy-Anchor, same pooling and crops, nothing frozen, 6 epochs": {
        "loss": "proxy-anchor",
        **POOLING_CROPS,
        "frozen": (),
        "epochs": 6,
    },
}


def train_once(name: str, recipe: Recipe) -> dict:
    """Train on one core; the scores on the held-out classes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = train(recipe, Path(folder) / "run")
        scores = run.scores
        curve = [entry["held_out"]["recall@1"] for entry in run.log]
    metrics = {metric: scores["held_out"][metric] for metric in METRICS}
    changes = {key: value for key, value in vars(recipe).items() if key != "data" and value != getattr(BASELINE, key)}
    cost = {"seconds": scores["seconds"], "made_by": scores["made_by"] | {"command": COMMAND}}
    return {"name": name, "seed": recipe.seed, **metrics, "epochs": curve, **cost, "changes": changes}


def table(runs: list[dict]) -> str:
    """The runs as a Markdown table: means over seeds, and the mean difference to the first row with the same seed."""
    by_name = {name: [run for run in runs if run["name"] == name] for name in SETTINGS}
    first = {run["seed"]: run for run in next(iter(by_name.values()))}
    lines = ["| setting | Recall@1/MAP@R | difference | seeds |", "|---|---|---|---|"]
    for name, repeats in by_name.items():
        if repeats:
            means = [f"{100 * statistics.mean(run[metric] for run in repeats):.1f}" for metric in METRICS]
            paired = [[run[m] - first[run["seed"]][m] for m in METRICS] for run in repeats if run["seed"] in first]
            difference = "/".join(f"{100 * statistics.mean(column):+.1f}" for column in zip(*paired, strict=True))
            lines.append(f"| {name} | {'/'.join(means)} | {difference} | {len(repeats)} |")
    return "\n".join(lines)


def page(runs: list[dict]) -> str:
    """The text of results/ablation/cub.md."""
    return f"# Ablation on held-out classes of CUB-200-2011\n\n{table(runs)}\n"


def train_all(base: Recipe, pending: list[tuple[str, int]], runs: list[dict], results: Path) -> None:
    """Train every pending (name, seed), one per core at a time, and save after each run."""
    with ProcessPoolExecutor(os.cpu_count(), max_tasks_per_child=1) as pool, Progress() as progress:
        task = progress.add_task("runs", total=len(pending))
        futures = [
            pool.submit(train_once, name, base.changed(SETTINGS[name] | {"seed": seed})) for name, seed in pending
        ]
        for future in as_completed(futures):
            runs.append(future.result())
            progress.update(task, advance=1)
            with atomic_write(results) as path:
                path.write_text(json.dumps(runs, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of CUB-200-2011")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=SETTINGS, metavar="NAME", default=list(SETTINGS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            make_photos(Path(folder), 192, (64, 48), classes=96)  # 12 of them held out
            small = {"backbone": "convnet", "weights": None, "frozen": (), "image_size": 32, "epochs": 1}
            runs: list[dict] = []
            base = BASELINE.changed({"dataset": "folder", "data": folder, **small})
            train_all(base, [("paper", 0), ("lambda 0", 0)], runs, Path(folder) / "quick.json")
            print(table(runs))
        return
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = {(run["name"], run["seed"]) for run in runs}
    if not options.render:
        if options.data is None:
            parser.error("--data is required: the folder of CUB-200-2011 (or use --quick or --render)")
        base = BASELINE.changed({"data": str(options.data)})
        pending = [(name, seed) for seed in options.seeds for name in options.only if (name, seed) not in done]
        train_all(base, pending, runs, RESULTS)
    with atomic_write(RESULTS.with_suffix(".md")) as path:
        path.write_text(page(runs))
    print(table(runs))


if __name__ == "__main__":
    main()
