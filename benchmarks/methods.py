"""Every loss on glyphs: does it learn, and what does its step cost beside its closest relative's?

    python -m benchmarks.methods [--only NAME ...] [--quick] [--render]

Each loss trains two epochs of the preset glyphs and is scored on unseen classes; the loss alone is then timed, forward
and backward, at 32 embeddings of 512 numbers and 100 classes, all losses in turn, medians of 40 rounds. Losses that
results/methods/glyphs.json holds are not run again; --render prints its table as Markdown.
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
    """Train on glyphs; Recall@1 before and after, and seconds for a step of the whole network."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = GLYPHS.changed({"loss": name, "epochs": epochs, "classes": classes})
        run = train(recipe, Path(folder) / "run")
        steps = [recipe.batch_size / entry["images_per_second"] for entry in run.log]
        return {
            "name": name,
            "recall@1": run.scores["trained"]["recall@1"],
            "untrained": run.scores["untrained"]["recall@1"],
            "step_ms": 1000 * statistics.median(steps),
            "made_by": run.scores["made_by"] | {"command": "python -m benchmarks.methods"},
        }


class Step:
    """One forward and backward pass of a loss on random embeddings in balanced classes."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        network = build("convnet", embedding_dim=DIMENSION, normalise=False, normalise_features=True)
        self.loss = make(name, CLASSES, DIMENSION, {})
        self.head: nn.Module | None = None
        if hasattr(self.loss, "watch"):
            self.loss.watch(network)
            self.head = network.head
        if hasattr(self.loss, "begin_epoch"):
            everything = torch.randn(CLASSES * 4, DIMENSION), torch.arange(CLASSES).repeat_interleave(4)
            self.loss.begin_epoch(1, lambda: everything)
        per_class = 2 if METHODS[name].images_per_class == 2 else 4
        self.labels = torch.arange(BATCH // per_class).repeat_interleave(per_class)
        self.inputs = torch.randn(BATCH, 256 if self.head else DIMENSION)

    def __call__(self) -> float:
        embeddings = self.inputs.clone().requires_grad_()
        if self.head is not None:
            embeddings = self.head(embeddings)
        started = time.perf_counter()
        self.loss(embeddings, self.labels).backward()
        return 1000 * (time.perf_counter() - started)


def time_losses(names: list[str], rounds: int) -> dict[str, float]:
    """Milliseconds of each loss alone, all in turn in every round."""
    steps = {name: Step(name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(step())
    return {name: statistics.median(measured[2:] or measured) for name, measured in times.items()}


def table(found: list[dict]) -> str:
    """The results as Markdown, in the order of METHODS."""
    by_name = {entry["name"]: entry for entry in found}
    lines = ["| loss | Recall@1 before | after | step, ms | loss alone, ms | relative | ratio |", "|" + "---|" * 7]
    for name in METHODS:
        if name in by_name:
            entry = by_name[name]
            relative = RELATIVES.get(name, "")
            ratio = f"{entry['loss_ms'] / by_name[relative]['loss_ms']:.1f}" if relative in by_name else ""
            lines.append(
                f"| {name} | {100 * entry['untrained']:.1f} | {100 * entry['recall@1']:.1f} | {entry['step_ms']:.0f} "
                f"| {entry['loss_ms']:.1f} | {relative} | {ratio} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, metavar="NAME", default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="a few classes and two losses, and keep nothing")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.quick:
        found = [learn(name, 1, 20) for name in ("proxygml", "softtriple")]
        alone = time_losses(["proxygml", "softtriple"], 3)
        print(table([entry | {"loss_ms": alone[entry["name"]]} for entry in found]))
        return
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if not options.render:
        for name in options.only:
            if name not in {entry["name"] for entry in found}:
                found.append(learn(name, 2, None) | {"loss_ms": None})
                print(f"{name}: {100 * found[-1]['untrained']:.1f} -> {100 * found[-1]['recall@1']:.1f}", flush=True)
                _keep(found)
        alone = time_losses([entry["name"] for entry in found], 42)
        found = [entry | {"loss_ms": alone[entry["name"]]} for entry in found]
        _keep(found)
    print(table(found))


def _keep(found: list[dict]) -> None:
    with written_whole(RESULTS) as path:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
