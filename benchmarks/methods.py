"""Every loss on glyphs: does it learn, and what does its step cost beside its closest relative's?

    python -m benchmarks.methods [--only NAME ...] [--quick] [--render]

Each loss trains two epochs of the preset glyphs and is scored on unseen classes. Then steps are timed, forward and
backward, all losses in turn, medians of 40 rounds: of the preset's small network with 32 images, and of the loss alone
with 32 embeddings of 512 numbers; 100 classes both. Losses that results/methods/glyphs.json holds are not trained
again; --render prints its table as Markdown.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from proxygml.backbones import build
from proxygml.files import written_whole
from proxygml.ingredients import build_loss, build_model
from proxygml.losses import METHODS, make
from proxygml.recipes import GLYPHS
from proxygml.training import train

RESULTS = Path("results/methods/glyphs.json")
CLASSES, BATCH, DIMENSION = 100, 32, 512
RELATIVES = {  # the nearest method that does comparable work
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
    """Train on glyphs; Recall@1 before and after."""
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
        self.labels = prepared(self.loss, name, self.network, recipe.embedding_dim)
        self.images = torch.randint(0, 256, (BATCH, 3, recipe.image_size, recipe.image_size), dtype=torch.uint8)

    def __call__(self) -> float:
        started = time.perf_counter()
        self.loss(self.network(self.images), self.labels).backward()
        return 1000 * (time.perf_counter() - started)


class LossAlone:
    """One forward and backward pass of a loss on random embeddings in balanced classes."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        network = build("convnet", embedding_dim=DIMENSION, normalise=False, normalise_features=True)
        self.loss = make(name, CLASSES, DIMENSION, {})
        self.labels = prepared(self.loss, name, network, DIMENSION)
        self.head: nn.Module | None = network.head if hasattr(self.loss, "watch") else None
        self.inputs = torch.randn(BATCH, 256 if self.head else DIMENSION)

    def __call__(self) -> float:
        embeddings = self.inputs.clone().requires_grad_()
        if self.head is not None:
            embeddings = self.head(embeddings)
        started = time.perf_counter()
        self.loss(embeddings, self.labels).backward()
        return 1000 * (time.perf_counter() - started)


def prepared(loss: nn.Module, name: str, network: nn.Module, dimension: int) -> torch.Tensor:
    """Gives a loss what it wants before its first batch; the labels (B,) of a batch."""
    if hasattr(loss, "watch"):
        loss.watch(network)
    if hasattr(loss, "begin_epoch"):
        everything = torch.randn(CLASSES * 4, dimension), torch.arange(CLASSES).repeat_interleave(4)
        loss.begin_epoch(1, lambda: everything)
    per_class = 2 if METHODS[name].images_per_class == 2 else 4
    return torch.arange(BATCH // per_class).repeat_interleave(per_class)


def in_turn(kind: type[Step] | type[LossAlone], names: list[str], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, all in turn in every round."""
    steps = {name: kind(name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(step())
    return {name: statistics.median(measured[2:] or measured) for name, measured in times.items()}


def timed(found: list[dict], rounds: int) -> list[dict]:
    """The results with the times of a step and of the loss alone."""
    names = [entry["name"] for entry in found]
    steps, alone = in_turn(Step, names, rounds), in_turn(LossAlone, names, rounds)
    return [entry | {"step_ms": steps[entry["name"]], "loss_ms": alone[entry["name"]]} for entry in found]


def table(found: list[dict]) -> str:
    """The results as Markdown, in the order of METHODS."""
    by_name = {entry["name"]: entry for entry in found}
    columns = (
        "loss",
        "Recall@1 before",
        "after",
        "step, ms",
        "loss alone, ms",
        "relative",
        "step, ratio",
        "loss, ratio",
    )
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, method in METHODS.items():
        if name in by_name:
            entry, relative = by_name[name], RELATIVES.get(name, "")
            cells = [name + (" *" if method.doubt else "")]
            cells += [f"{100 * entry[key]:.1f}" for key in ("untrained", "recall@1")]
            cells += [f"{entry[key]:.1f}" for key in ("step_ms", "loss_ms")]
            keys = ("step_ms", "loss_ms") if relative in by_name else ()
            cells += [relative, *(f"{entry[key] / by_name[relative][key]:.1f}" for key in keys), *["", ""][len(keys) :]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, metavar="NAME", default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="a few classes and two losses, and keep nothing")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.quick:
        found = [learn(name, 1, 20) for name in ("proxygml", "softtriple")]
        print(table(timed(found, 3)))
        return
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if not options.render:
        for name in options.only:
            if name not in {entry["name"] for entry in found}:
                found.append(learn(name, 2, None))
                print(f"{name}: {100 * found[-1]['untrained']:.1f} -> {100 * found[-1]['recall@1']:.1f}", flush=True)
                _keep(found)
        found = timed(found, 42)
        _keep(found)
    print(table(found))


def _keep(found: list[dict]) -> None:
    with written_whole(RESULTS) as path:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
