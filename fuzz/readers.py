"""The readers of untrusted files, and the errors they may raise."""

import os
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as safetensors

from fuzz import seeds
from fuzz.seeds import BETWEEN
from proxygml.backbones.weights import read_tensors
from proxygml.data import ImageList, load
from proxygml.data.cache import shrink
from proxygml.data.check import find_problems
from proxygml.data.images import Augmentation, Crops
from proxygml.embeddings import Embeddings
from proxygml.paper.results import Results, known_runs, load_runs
from proxygml.retrieval import Index
from proxygml.retrieval.contents import erase
from proxygml.training.checkpoints import load_checkpoint
from proxygml.training.run import Run

LONGEST = 2000  # characters of a message that a person can still read


@dataclass(frozen=True)
class Reader:
    """`write` puts an input into files of a folder, `read` reads them; `seeds` are inputs that it takes."""

    seeds: Callable[[], list[bytes]]
    write: Callable[[bytes, Path], None]
    read: Callable[[Path], object]


def complaint(reader: Reader, given: bytes, folder: Path) -> str | None:
    """What is wrong with how a reader fails; None where it reads the input, or refuses it as the command line promises.

    That shows what a ValueError or an OSError says in one line. Their subclasses that a parser raises, such as
    UnicodeDecodeError, do not say which file it was.
    """
    reader.write(given, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(folder)
    except Exception as error:
        said = str(error)
        if type(error) is not ValueError and not isinstance(error, OSError):
            return f"{type(error).__name__}: {said[:LONGEST]}"
        if not said or "\n" in said or len(said) > LONGEST:
            return f"no clear line, {len(said)} characters: {said[:200]!r}"
    return None


# Inputs to files


def files(*names: str) -> Callable[[bytes, Path], None]:
    """An input that is the contents of some files, one after another."""

    def write(given: bytes, folder: Path) -> None:
        parts = given.split(BETWEEN, len(names) - 1)
        for name, contents in zip(names, parts + [b""] * (len(names) - len(parts)), strict=True):
            put(folder / name, contents)

    return write


def put(path: Path, contents: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)


def archive(name: str, *members: str) -> Callable[[bytes, Path], None]:
    """A zip archive: as it is after an R, its members one after another after any other byte.

    Bytes that are altered inside a whole archive are found by their checksum; in a member they reach the reader.
    """

    def write(given: bytes, folder: Path) -> None:
        if given[:1] == b"R":
            put(folder / name, given[1:])
            return
        with zipfile.ZipFile(folder / name, "w") as packed:
            for member, contents in zip(members, given[1:].split(BETWEEN, len(members) - 1), strict=False):
                packed.writestr(member, contents)

    return write


def write_image(given: bytes, folder: Path) -> None:
    """An image file; after a C, a PNG with corrected checksums."""
    put(folder / "image", checked_png(given[1:]) if given[:1] == b"C" else given[1:])


def checked_png(png: bytes) -> bytes:
    parts, place = [png[:8]], 8
    while place + 8 <= len(png):
        (size,) = struct.unpack(">I", png[place : place + 4])
        body = png[place + 4 : place + 8 + size]
        parts += [png[place : place + 4], body, struct.pack(">I", zlib.crc32(body))]
        place += 12 + size
    return b"".join(parts)


def write_tree(given: bytes, folder: Path) -> None:
    """A folder of empty files, a path on each line; what would leave the folder is passed over."""
    shutil.rmtree(folder / "tree", ignore_errors=True)
    (folder / "tree").mkdir()
    for line in given.split(b"\n")[:200]:
        parts = [part[:200] for part in line.split(b"/") if part not in (b"", b".", b"..") and b"\0" not in part][:10]
        path = folder.joinpath("tree", *(part.decode("utf-8", "surrogateescape") for part in parts))
        if parts and not path.exists() and not any(parent.is_file() for parent in path.parents):
            put(path, b"")


def write_sent(given: bytes, folder: Path) -> None:
    """A folder that a stranger sent: files after an F, links to a user's file or folder after an L, pipes after a P."""
    for name in ("sent", "mine"):
        shutil.rmtree(folder / name, ignore_errors=True)
    put(folder / "mine" / "letter.txt", b"Dear Anna")
    (folder / "sent").mkdir()
    for entry in given.split(BETWEEN)[:20]:
        name, _, contents = entry[1:].partition(b"\n")
        parts = [part[:200] for part in name.split(b"/") if part not in (b"", b".", b"..") and b"\0" not in part][:3]
        path = folder.joinpath("sent", *(part.decode("utf-8", "surrogateescape") for part in parts))
        if not parts or os.path.lexists(path) or any(os.path.lexists(p) and not p.is_dir() for p in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry[:1] == b"L":
            path.symlink_to(folder / "mine" / ("letter.txt" if contents else ""))
        elif entry[:1] == b"P":
            os.mkfifo(path)
        else:
            path.write_bytes(contents)


# Readers


def read_images(images: ImageList) -> None:
    """Look for problems as training does; what passes must not fail afterwards."""
    usable = np.setdiff1d(np.arange(len(images)), [each.index for each in find_problems(images)])
    try:
        for place in usable[:3].tolist():
            Crops(images.open, images.labels, size=16)[place]
            Crops(images.open, images.labels, size=16, augmentation=Augmentation())[place]
            with images.open(place) as image:
                shrink(image, 8)
    except Exception as error:
        raise AssertionError(f"an image that passed the check: {type(error).__name__}: {error}") from error


def read_dataset(name: str, place: str, *, images: bool = False) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        for part in load(name, folder / place):
            if images:
                read_images(part)

    return read


def read_results(folder: Path) -> None:
    runs = load_runs(folder / "modules" / "glyphs.json")
    Results.of([run for run in runs if "of" not in run], [run["row"] for run in runs])
    known_runs(folder, "glyphs")


def read_run(folder: Path) -> None:
    run = Run(folder)
    assert all(isinstance(entry, dict) for entry in run.log)
    return run.scores


def read_index(folder: Path) -> None:
    index = Index.open(folder)
    try:
        for block in index.blocks():
            index.search(block.vectors, 2)
        assert len(index.class_names) <= 10**6
    finally:
        index.close()


def read_sent(read: Callable[[Path], object]) -> Callable[[Path], None]:
    """Read a folder that a stranger sent; nothing outside of it may change."""

    def check(folder: Path) -> None:
        try:
            read(folder / "sent")
        finally:
            mine = {path.name: path.read_bytes() for path in (folder / "mine").iterdir()}
            assert mine == {"letter.txt": b"Dear Anna"}, "a file of the user was changed"

    return check


def read_sent_run(folder: Path) -> None:
    run = Run.open(folder)
    errors = []
    for part in ("recipe", "log", "scores", "model_id", "load_best", "load_last"):
        try:
            value = getattr(run, part)
            value() if callable(value) else value
        except (ValueError, OSError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def extend_sent_index(folder: Path) -> None:
    """Search, extend and erase an index."""
    read_index(folder)
    index = Index.open(folder)
    try:
        index.add(replace(seeds.some_embeddings(), paths=np.array(["e", "f", "g", "h"])))
        index.remove(["a"])
    finally:
        index.close()
    erase(folder)


READERS: dict[str, Reader] = {
    "cub": Reader(seeds.cub, files("images.txt", "image_class_labels.txt", "classes.txt"), read_dataset("cub", ".")),
    "cars": Reader(
        seeds.cars, files("cars_train_annos.mat", "cars_test_annos_withlabels.mat"), read_dataset("cars", ".")
    ),
    "sop": Reader(seeds.sop, files("Ebay_train.txt", "Ebay_test.txt"), read_dataset("sop", ".")),
    "omniglot": Reader(
        seeds.omniglot, archive("omniglot28.npz", *seeds.PACKED), read_dataset("omniglot", "omniglot28.npz")
    ),
    "table": Reader(seeds.tables, files("table.csv"), read_dataset("table", "table.csv")),
    "parquet": Reader(seeds.parquet, files("table.parquet"), read_dataset("table", "table.parquet")),
    "folder": Reader(seeds.trees, write_tree, read_dataset("folder", "tree")),
    "tar": Reader(seeds.tars, files("part.tar"), read_dataset("tar", "part.tar", images=True)),
    "image": Reader(
        seeds.pictures, write_image, lambda folder: read_images(ImageList(["image"], np.zeros(1), ("any",), folder))
    ),
    "embeddings": Reader(
        seeds.embeddings, archive("vectors.npz", *seeds.ARRAYS), lambda folder: Embeddings.load(folder / "vectors.npz")
    ),
    "checkpoint": Reader(
        seeds.checkpoints, archive("last.pt", *seeds.records()), lambda folder: load_checkpoint(folder / "last.pt")
    ),
    "network": Reader(lambda: [seeds.network()], files("model.safetensors"), lambda folder: Run(folder).load_best()),
    "weights": Reader(
        seeds.weights, archive("weights.pth", *seeds.records()), lambda folder: read_tensors(folder / "weights.pth")
    ),
    "safetensors": Reader(
        lambda: [safetensors({"weight": torch.ones(2, 3)})],
        files("weights.safetensors"),
        lambda folder: read_tensors(folder / "weights.safetensors"),
    ),
    "recipe": Reader(seeds.recipes, files("recipe.json"), lambda folder: Run(folder).recipe),
    "run": Reader(seeds.runs, files("scores.json", "log.jsonl"), read_run),
    "results": Reader(seeds.results, files("modules/glyphs.json"), read_results),
    "index": Reader(seeds.indices, files("items.sqlite"), read_index),
    "run-folder": Reader(seeds.run_folders, write_sent, read_sent(read_sent_run)),
    "index-folder": Reader(seeds.index_folders, write_sent, read_sent(extend_sent_index)),
}
