"""The commands that are interrupted: their inputs, arguments and expected results."""

import hashlib
import io
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.faults.processes import run

TRAIN = (
    *("glyphs", "--classes", "10", "--epochs", "3", "--proxies-per-class", "2", "--ratio", "0.5"),
    *("--held-out", "0.2", "--no-baselines"),
)
PAPER, RESULTS = ["paper", "lambda", "--quick", "--jobs", "1"], Path("runs/quick/lambda/glyphs.json")
# Not reproducible: times, and checksums of files that store equal tensors in another order.
VARYING = {"seconds", "training_seconds", "images_per_second", "peak_memory_mb", "made_by", "shard_checksums"}
PHOTOS = 1100  # more than one block of an index
SHARDS = 100


@dataclass(frozen=True)
class Workload:
    """A command that works in its own folder; `shared` is a folder with common inputs."""

    name: str
    prepare: Callable[[Path, Path], None]  # shared, folder
    arguments: Callable[[Path, Path], list[object]]  # shared, folder -> arguments, which may resume
    result: Callable[[Path], object]  # folder -> reproducible part of the result
    damageable: str  # glob patterns of files in the folder
    workers: bool = False  # whether it starts worker processes
    locks: bool = True  # whether it refuses a second command in the same folder
    forks: bool = True  # whether it can run in a fork


def make_shared_inputs(shared: Path, *, paper: bool) -> None:
    """Write photos, vectors and, for `paper`, the runs of an experiment."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(PHOTOS):
        photo = shared / "photos" / f"class{number % 7}" / f"{number}.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(photo)
    vectors = rng.normal(size=(1500, 16)).astype(np.float32)
    np.savez(shared / "own.npz", vectors=vectors, labels=np.arange(1500) % 30)
    for shard in range(SHARDS):
        (shared / "shards").mkdir(exist_ok=True)
        with tarfile.open(shared / "shards" / f"{shard:03d}.tar", "w") as archive:
            for number in range(4):
                kind = f"class {(4 * shard + number) % 20}"
                photo = next((shared / "photos").glob(f"*/{4 * shard + number}.png")).read_bytes()
                for name, content in ((f"{number}.png", photo), (f"{number}.cls", kind.encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    if paper and (ended := run(PAPER, shared)).code:
        raise RuntimeError(f"proxygml {' '.join(PAPER)} failed: {ended.lines}")


def _nothing(shared: Path, folder: Path) -> None:
    pass


def _copy_run(shared: Path, folder: Path) -> None:
    shutil.copytree(shared / "run", folder / "run", ignore=shutil.ignore_patterns("*.png"))


def _copy_vectors(shared: Path, folder: Path) -> None:
    shutil.copy(shared / "own.npz", folder)


def _copy_results(shared: Path, folder: Path) -> None:
    """All runs of an experiment but two."""
    from proxygml.paper.results import load_runs, save_runs

    save_runs(folder / RESULTS, load_runs(shared / RESULTS)[:-2])


def _train(*options: str, data: str | None = None) -> Callable[[Path, Path], list[object]]:
    def arguments(shared: Path, folder: Path) -> list[object]:
        out = folder / "run"
        more = options if data is None else [*options, "--data", shared / data]
        started = (out / "recipe.json").exists()
        return ["train", "--resume", out] if started else ["train", *TRAIN, *more, "--out", out]

    return arguments


def _train_result(folder: Path) -> object:
    from safetensors.torch import load_file

    from proxygml.training.run import Run

    run = Run.open(folder / "run")
    shards = sorted(run.shards(len(run.log)).glob("*.safetensors"))
    return [digest(part) for part in (run.load_last(), run.load_best(), run.scores, run.log, *map(load_file, shards))]


def _embed_result(folder: Path) -> object:
    with np.load(folder / "vectors.npz", allow_pickle=False) as arrays:
        return {name: digest(arrays[name]) for name in sorted(arrays)}


def _index_result(folder: Path) -> object:
    from proxygml.retrieval import Index

    index = Index.open(folder / "index")
    rows = {}
    for block in index.blocks():
        for vector, label, path in zip(block.vectors, block.labels, block.paths, strict=True):
            rows[str(path)] = (block.class_name(label), digest(vector))
    queries = np.eye(index.dim, dtype=np.float32)[:8]
    hits = [[Path(hit.path).name for hit in hits] for hits in index.search(queries, 5)]
    metadata = {name: value.replace(str(folder), "") for name, value in index.metadata.items() if name != "network"}
    index.close()
    return [digest(sorted(rows.items())), hits, metadata]


def _paper_result(folder: Path) -> object:
    from proxygml.paper.results import load_runs

    runs = sorted(load_runs(folder / RESULTS), key=lambda run: (run["row"], run["seed"]))
    return [[run["row"], run["seed"], digest(run)] for run in runs]


def digest(value: object) -> str:
    """Hash of nested tensors, arrays and plain values, without the entries in VARYING."""
    sha = hashlib.sha256()

    def update(value: object) -> None:
        if isinstance(value, dict):
            for name in sorted(value.keys() - VARYING, key=str):
                sha.update(repr(name).encode())
                update(value[name])
        elif isinstance(value, (list, tuple)):
            sha.update(f"{len(value)} items".encode())
            for item in value:
                update(item)
        elif hasattr(value, "numpy") or isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value if isinstance(value, np.ndarray) else value.numpy())
            sha.update(f"{array.dtype}{array.shape}".encode())
            sha.update(array.tobytes())
        else:
            sha.update(repr(value).encode())

    update(value)
    return sha.hexdigest()[:16]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("train", _nothing, _train("--workers", "2"), _train_result, "run/*.pt run/scores.json", workers=True),
        Workload(
            "train-sharded",
            _nothing,
            _train("--devices", "2", "--shard", "--timeout", "60"),
            _train_result,
            "run/*.pt run/proxies-*/*.safetensors",
            workers=True,
            forks=False,  # it starts the same command again
        ),
        Workload(
            "train-tar",
            _nothing,
            _train("--dataset", "tar", "--image-size", "16", "--workers", "2", data="shards"),
            _train_result,
            "run/*.pt run/scores.json",
            workers=True,
        ),
        Workload(
            "embed",
            _copy_run,
            lambda shared, folder: ["embed", folder / "run", "--out", folder / "vectors.npz"],
            _embed_result,
            "run/model.safetensors",
            workers=True,
            locks=False,
        ),
        Workload(
            "index-photos",
            _copy_run,
            lambda shared, folder: [
                *("index", "build", shared / "photos", "--out", folder / "index", "--run", folder / "run"),
            ],
            _index_result,
            "index/items.sqlite index/model/model.safetensors",
        ),
        Workload(
            "index-vectors",
            _copy_vectors,
            lambda shared, folder: [
                *("index", "build", folder / "own.npz", "--out", folder / "index", "--kind", "hnsw"),
            ],
            _index_result,
            "own.npz index/items.sqlite index/*.faiss",
        ),
        Workload(
            "paper",
            _copy_results,
            lambda shared, folder: PAPER,
            _paper_result,
            "runs/quick/lambda/glyphs.json runs/quick/*/*.pt",
            workers=True,
        ),
    )
}
