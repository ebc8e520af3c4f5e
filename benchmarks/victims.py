"""The commands that benchmarks.faults disturbs: what each starts from, how it is given, and what it has to end with."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.started import run

SMALL = (
    *("glyphs", "--classes", "10", "--epochs", "3", "--proxies-per-class", "2", "--ratio", "0.5"),
    *("--held-out", "0.2", "--no-baselines"),
)
PAPER, RESULTS = ["paper", "lambda", "--quick", "--jobs", "1"], Path("runs/quick/lambda/glyphs.json")
# What differs from run to run: times, and the checksums of files in which equal tensors have another order.
VARYING = {"seconds", "training_seconds", "images_per_second", "peak_memory_mb", "made_by", "shard_checksums"}
PHOTOS = 1100  # more than an index takes in at a time


@dataclass(frozen=True)
class Victim:
    """A command on a folder of its own; `ground` holds what several start from."""

    name: str
    prepare: Callable[[Path, Path], None]  # ground, folder
    words: Callable[[Path, Path], list[object]]  # ground, folder -> its arguments, as they are given now
    outcome: Callable[[Path], object]  # folder -> what counts of its result
    damageable: str  # files in the folder, as a pattern of their paths
    helpers: bool = False  # whether it has processes of its own
    alone: bool = True  # whether a second one in the same folder is refused
    forks: bool = True  # whether it can do without being started anew


def make_ground(ground: Path, *, paper: bool) -> None:
    """What commands start from beside a trained run: photos, vectors, and if wanted the runs of an experiment."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(PHOTOS):
        photo = ground / "photos" / f"class{number % 7}" / f"{number}.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(photo)
    vectors = random.normal(size=(1500, 16)).astype(np.float32)
    np.savez(ground / "own.npz", vectors=vectors, labels=np.arange(1500) % 30)
    if paper and (ended := run(PAPER, ground)).code:
        raise RuntimeError(f"what paper starts from could not be made: {ended.lines}")


def _nothing(ground: Path, folder: Path) -> None:
    pass


def _with_run(ground: Path, folder: Path) -> None:
    shutil.copytree(ground / "run", folder / "run", ignore=shutil.ignore_patterns("*.png"))


def _with_vectors(ground: Path, folder: Path) -> None:
    shutil.copy(ground / "own.npz", folder)


def _with_results(ground: Path, folder: Path) -> None:
    """All but two runs of an experiment."""
    from proxygml.experiments.found import load_runs, save_runs

    save_runs(folder / RESULTS, load_runs(ground / RESULTS)[:-2])


def _train(*more: str) -> Callable[[Path, Path], list[object]]:
    def words(ground: Path, folder: Path) -> list[object]:
        place = folder / "run"
        begun = (place / "recipe.json").exists()
        return ["train", "--resume", place] if begun else ["train", *SMALL, *more, "--out", place]

    return words


def _of_train(folder: Path) -> object:
    from safetensors.torch import load_file

    from proxygml.runs import Run

    run = Run.open(folder / "run")
    files = sorted(run.shards(len(run.log)).glob("*.safetensors"))
    return [digest(part) for part in (run.load_last(), run.load_best(), run.scores, run.log, *map(load_file, files))]


def _of_embed(folder: Path) -> object:
    with np.load(folder / "vectors.npz", allow_pickle=False) as arrays:
        return {name: digest(arrays[name]) for name in sorted(arrays)}


def _of_index(folder: Path) -> object:
    from proxygml.index import Index

    index = Index.open(folder / "gallery")
    rows = {}
    for block in index.blocks():
        for vector, label, path in zip(block.vectors, block.labels, block.paths, strict=True):
            rows[str(path)] = (block.class_name(label), digest(vector))
    asked = np.eye(index.width, dtype=np.float32)[:8]
    found = [[Path(hit.path).name for hit in hits] for hits in index.search(asked, 5)]
    about = {name: value for name, value in index.about.items() if name != "network"}
    index.close()
    return [digest(sorted(rows.items())), found, {**about, "gallery": Path(about["gallery"]).name}]


def _of_paper(folder: Path) -> object:
    from proxygml.experiments.found import load_runs

    runs = sorted(load_runs(folder / RESULTS), key=lambda run: (run["arm"], run["seed"]))
    return [[run["arm"], run["seed"], digest(run)] for run in runs]


def digest(value: object) -> str:
    """The same for equal tensors, arrays and plain values, whatever time it took to make them."""
    found = hashlib.sha256()

    def take(part: object) -> None:
        if isinstance(part, dict):
            for name in sorted(part.keys() - VARYING, key=str):
                found.update(repr(name).encode())
                take(part[name])
        elif isinstance(part, (list, tuple)):
            found.update(f"{len(part)} items".encode())
            for one in part:
                take(one)
        elif hasattr(part, "numpy") or isinstance(part, np.ndarray):
            array = np.ascontiguousarray(part if isinstance(part, np.ndarray) else part.numpy())
            found.update(f"{array.dtype}{array.shape}".encode())
            found.update(array.tobytes())
        else:
            found.update(repr(part).encode())

    take(value)
    return found.hexdigest()[:16]


VICTIMS = {
    victim.name: victim
    for victim in (
        Victim("train", _nothing, _train("--workers", "2"), _of_train, "run/*.pt run/scores.json", helpers=True),
        Victim(
            "train-shared",
            _nothing,
            _train("--devices", "2", "--shard", "--timeout", "60"),
            _of_train,
            "run/*.pt run/proxies-*/*.safetensors",
            helpers=True,
            forks=False,  # it starts the same command again itself
        ),
        Victim(
            "embed",
            _with_run,
            lambda ground, folder: ["embed", folder / "run", "--out", folder / "vectors.npz"],
            _of_embed,
            "run/best.pt",
            helpers=True,
            alone=False,
        ),
        Victim(
            "index-photos",
            _with_run,
            lambda ground, folder: [
                *("index", "build", ground / "photos", "--out", folder / "gallery", "--run", folder / "run"),
            ],
            _of_index,
            "gallery/items.sqlite gallery/model/best.pt",
        ),
        Victim(
            "index-vectors",
            _with_vectors,
            lambda ground, folder: [
                *("index", "build", folder / "own.npz", "--out", folder / "gallery", "--kind", "hnsw"),
            ],
            _of_index,
            "own.npz gallery/items.sqlite gallery/*.faiss",
        ),
        Victim(
            "paper",
            _with_results,
            lambda ground, folder: PAPER,
            _of_paper,
            "runs/quick/lambda/glyphs.json runs/quick/*/*.pt",
            helpers=True,
        ),
    )
}
