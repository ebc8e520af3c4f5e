"""Every loss on glyphs: does it learn, and what does a step cost compared with a similar method?

    python -m benchmarks.methods [--only NAME ...] [--quick] [--render]

Each loss trains two epochs of the preset glyphs and is evaluated on unseen classes. Then forward and backward are
timed, all losses in turn, as medians of 40 rounds: the preset's network with 32 images, and the loss alone with 32
embeddings of 512 dimensions, both with 100 classes. Losses in results/methods/glyphs.json are not trained again;
--render only writes its table, results/methods/glyphs.md.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from proxygml.backbones import Embedder, build_trunk
from proxygml.files import atomic_write
from proxygml.losses import METHODS, make
from proxygml.training.build import build_loss, build_model
from proxygml.training.presets import GLYPHS
from proxygml.training.start import train

RESULTS = Path("results/methods/glyphs.json")
CLASSES, BATCH, DIMENSION = 100, 32, 512
SIMILAR = {  # the closest method with comparable work
    **dict.fromkeys(("semihard", "htl"), "triplet"),
    **dict.fromkeys(("liftedstruct", "ms", "margin", "clustering", "hdc"), "contrastive"),
    "damlrrm": "ms",
    "hdml": "n-pair",
    "proxygml": "softtriple",
    **dict.fromkeys(("proxy-nca", "proxy-anchor", "cosface", "am-softmax", "l-softmax", "center"), "norm-softmax"),
    "arcface": "cosface",
    "subcenter-arcface": "arcface",
}


def learn(name: str, epochs: int, classes: int | None) -> dict:
    """Recall@1 on glyphs before and after training."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = GLYPHS.changed({"loss": name, "epochs": epochs, "classes": classes})
        run = train(recipe, Path(folder) / "run")
        return {
            "name": name,
            "recall@1": run.scores["trained"]["recall@1"],
            "untrained": run.scores["untrained"]["recall@1"],
            "made_by": run.scores["made_by"] | {"command": "python -m benchmarks.methods"},
        }


class Step:
    """One forward and backward pass of a network with a loss, on random images in balanced classes."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        recipe = GLYPHS.changed({"loss": name})
        self.network, self.loss = build_model(recipe), build_loss(recipe, CLASSES)
        self.labels = prepare(self.loss, name, self.network, recipe.embedding_dim)
        self.images = torch.randint(0, 256, (BATCH, 3, recipe.image_size, recipe.image_size), dtype=torch.uint8)

    def __call__(self) -> float:
        started = time.perf_counter()
        self.loss(self.network(self.images), self.labels).backward()
        return 1000 * (time.perf_counter() - started)


class LossAlone:
    """One forward and backward pass of a loss on random embeddings in balanced classes."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        network = Embedder(build_trunk("convnet"), DIMENSION, normalize=False, normalize_features=True)
        self.loss = make(name, CLASSES, DIMENSION, {})
        self.labels = prepare(self.loss, name, network, DIMENSION)
        self.head: nn.Module | None = network.head if hasattr(self.loss, "watch") else None
        self.inputs = torch.randn(BATCH, 256 if self.head else DIMENSION)

    def __call__(self) -> float:
        embeddings = self.inputs.clone().requires_grad_()
        if self.head is not None:
            embeddings = self.head(embeddings)
        started = time.perf_counter()
        self.loss(embeddings, self.labels).backward()
        return 1000 * (time.perf_counter() - started)


def prepare(loss: nn.Module, name: str, network: nn.Module, dimension: int) -> torch.Tensor:
    """Call the hooks of a loss that precede the first batch; the labels (B,) of a batch for it."""
    if hasattr(loss, "watch"):
        loss.watch(network)
    if hasattr(loss, "begin_epoch"):
        training_set = torch.randn(CLASSES * 4, dimension), torch.arange(CLASSES).repeat_interleave(4)
        loss.begin_epoch(1, lambda: training_set)
    per_class = 2 if METHODS[name].images_per_class == 2 else 4
    return torch.arange(BATCH // per_class).repeat_interleave(per_class)


def time_steps(step_type: type[Step] | type[LossAlone], names: list[str], rounds: int) -> dict[str, float]:
    """Median milliseconds of each loss; all take turns in every round."""
    steps = {name: step_type(name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(step())
    return {name: statistics.median(measured[2:] or measured) for name, measured in times.items()}


def add_times(results: list[dict], rounds: int) -> list[dict]:
    """The results with the times of a step and of the loss alone."""
    names = [entry["name"] for entry in results]
    steps, alone = time_steps(Step, names, rounds), time_steps(LossAlone, names, rounds)
    return [entry | {"step_ms": steps[entry["name"]], "loss_ms": alone[entry["name"]]} for entry in results]


def table(results: list[dict]) -> str:
    """The results as a Markdown table, in the order of METHODS."""
    by_name = {entry["name"]: entry for entry in results}
    recall = f"Recall@1 (untrained {100 * results[0]['untrained']:.1f})"
    columns = ("loss", recall, "step, ms", "loss alone, ms", "similar method", "ratio (step/loss)")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for entry in (by_name[name] for name in METHODS if name in by_name):
        cells = [entry["name"], f"{100 * entry['recall@1']:.1f}", f"{entry['step_ms']:.1f}", f"{entry['loss_ms']:.1f}"]
        similar = by_name.get(SIMILAR.get(entry["name"], ""))
        ratio = "/".join(f"{entry[key] / similar[key]:.1f}" for key in ("step_ms", "loss_ms")) if similar else ""
        lines.append(f"| {' | '.join([*cells, similar['name'] if similar else '', ratio])} |")
    return "\n".join(lines)


def page(results: list[dict]) -> str:
    """The text of results/methods/glyphs.md."""
    return f"# Every loss after two epochs of glyphs, and its cost\n\n{table(results)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, metavar="NAME", default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="two losses on a few classes; writes nothing")
    parser.add_argument("--render", action="store_true", help="print the table of existing results")
    options = parser.parse_args()
    if options.quick:
        results = [learn(name, 1, 40) for name in ("proxygml", "softtriple")]
        print(table(add_times(results, 3)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if not options.render:
        for name in options.only:
            if name not in {entry["name"] for entry in results}:
                entry = learn(name, 2, None)
                print(f"{name}: {100 * entry['untrained']:.1f} -> {100 * entry['recall@1']:.1f}", flush=True)
                results.append(entry)
                _save(results)
        results = add_times(results, 42)
        _save(results)
    with atomic_write(RESULTS.with_suffix(".md")) as path:
        path.write_text(page(results))
    print(table(results))


def _save(results: list[dict]) -> None:
    with atomic_write(RESULTS) as path:
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
