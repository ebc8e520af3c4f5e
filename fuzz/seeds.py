"""Valid inputs of every reader, which the fuzzer mutates."""

import io
import json
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from proxygml.embeddings import Embeddings
from proxygml.retrieval import Index
from proxygml.training.checkpoints import save_weights
from proxygml.training.presets import GLYPHS
from proxygml.training.recipe import Recipe

BETWEEN = b"\n\0\n"  # the files of an input that is several files


def unpacked(whole: bytes, *members: str) -> list[bytes]:
    """Both forms of an archive that readers.archive takes."""
    with zipfile.ZipFile(io.BytesIO(whole)) as packed:
        return [b"R" + whole, b"M" + BETWEEN.join(packed.read(member) for member in members)]


def cub() -> list[bytes]:
    names = {1: "001.Albatross", 100: "100.Pelican", 101: "101.Pewee", 200: "200.Yellowthroat"}
    images = [(7, 1), (2, 100), (3, 101), (40, 200), (5, 1), (6, 101)]
    return [
        BETWEEN.join(
            [
                "".join(f"{number} {names[c]}/{number}.jpg\n" for number, c in images).encode(),
                "".join(f"{number} {c}\n" for number, c in images).encode(),
                "".join(f"{number} {name}\n" for number, name in names.items()).encode(),
            ]
        )
    ]


def cars() -> list[bytes]:
    from scipy.io import savemat

    inputs = []
    for compressed in (False, True):
        parts = []
        for rows in ([("1.jpg", 1), ("2.jpg", 99)], [("3.jpg", 98), ("4.jpg", 196)]):
            annotations = np.empty((1, len(rows)), dtype=[("class", object), ("fname", object)])
            for column, (name, number) in enumerate(rows):
                annotations[0, column] = (np.array([[number]], np.uint8), np.array([name]))
            file = io.BytesIO()
            savemat(file, {"annotations": annotations}, do_compression=compressed)
            parts.append(file.getvalue())
        inputs.append(BETWEEN.join(parts))
    return inputs


def sop() -> list[bytes]:
    lists = []
    for first in (1, 3):
        rows = [f"{i} {first + i // 2} 1 bicycle_final/{first}_{i}.JPG\n" for i in range(4)]
        lists.append(("image_id class_id super_class_id path\n" + "".join(rows)).encode())
    return [BETWEEN.join(lists)]


def tables() -> list[bytes]:
    rows = "path,label,split\n" + "".join(f'a/{i}.jpg,"owl, {i % 3}",{("train", "test")[i % 2]}\n' for i in range(6))
    return [rows.encode(), b"\xef\xbb\xbflabel,path\n" + b"".join(b"%d,%d.png\n" % (i % 3, i) for i in range(6))]


def parquet() -> list[bytes]:
    import pyarrow
    from pyarrow import parquet as format

    table = pyarrow.table({"path": [f"{i}.jpg" for i in range(6)], "label": [i % 3 for i in range(6)]})
    inputs = []
    for compression in ("none", "snappy"):
        file = io.BytesIO()
        format.write_table(table, file, compression=compression)
        inputs.append(file.getvalue())
    return inputs


def trees() -> list[bytes]:
    return ["\n".join(f"{kind}/{i}.jpg" for kind in ("owl", "tit/blue", "train", "é") for i in range(2)).encode()]


def tars() -> list[bytes]:
    inputs = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form) as packed:
            for number in range(4):
                label = [("cls", b"owl%d" % (number % 2)), ("json", json.dumps({"label": number % 2}).encode())]
                for ending, contents in [("png", picture("PNG")), label[number % 2]]:
                    member = tarfile.TarInfo(f"some/{number:04d}é.{ending}")
                    member.size = len(contents)
                    packed.addfile(member, io.BytesIO(contents))
        inputs.append(file.getvalue())
    return inputs


ARRAYS = ("vectors.npy", "labels.npy", "paths.npy", "class_names.npy", "model.npy")
PACKED = tuple(f"{kind}_{part}.npy" for part in ("background", "evaluation") for kind in ("x", "y", "names"))


def npz(arrays: dict[str, object], *, compress: bool = False) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(file, **arrays)
    return file.getvalue()


def some_embeddings() -> Embeddings:
    vectors = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    return Embeddings(vectors, np.array([0, 1, 1, 0]), np.array(["a", "b", "c", "d"]), np.array(["owl", "tit"]), "x")


def embeddings() -> list[bytes]:
    arrays = vars(some_embeddings())
    named = npz({"vectors": np.eye(3), "labels": np.array(["owl", "tit", "owl"])}, compress=True)
    return [*unpacked(npz(arrays), *ARRAYS), b"R" + npz(arrays, compress=True), b"R" + named]


def omniglot() -> list[bytes]:
    arrays = {}
    for part in ("background", "evaluation"):
        arrays |= {f"x_{part}": np.zeros((4, 3, 3), np.uint8), f"y_{part}": np.array([0, 1, 0, 1])}
        arrays[f"names_{part}"] = np.array(["a/1", "a/2"])
    return unpacked(npz(arrays), *PACKED)


@cache
def state() -> dict:
    weights = {"model": {"weight": torch.ones(2, 3), "count": torch.tensor(3)}, "loss": {"proxies": torch.ones(2, 1)}}
    return weights | {"epoch": 1, "class_names": ["a", "b"]}


def checkpoint() -> bytes:
    file = io.BytesIO()
    torch.save(state(), file)
    return file.getvalue()


def network() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save_weights(state(), path := Path(folder, "model.safetensors"))
        return path.read_bytes()


def records() -> tuple[str, ...]:
    """The members of a checkpoint."""
    with zipfile.ZipFile(io.BytesIO(checkpoint())) as packed:
        return tuple(sorted(packed.namelist(), key=lambda name: not name.endswith(".pkl")))


def checkpoints() -> list[bytes]:
    return unpacked(checkpoint(), *records())


def weights() -> list[bytes]:
    legacy = io.BytesIO()
    torch.save({"state_dict": {"module.weight": torch.ones(2, 3)}}, legacy, _use_new_zipfile_serialization=False)
    return [*checkpoints(), b"R" + legacy.getvalue()]


def recipes() -> list[bytes]:
    return [
        Recipe().to_json().encode(),
        GLYPHS.changed({"loss_settings": ("alpha=2", "ratios=1,0.5")}).to_json().encode(),
    ]


@cache
def picture(format: str, mode: str = "RGB", **options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format, **options)
    return file.getvalue()


def pictures() -> list[bytes]:
    turned = Image.Exif()
    turned[0x0112], turned[0x010E] = 6, "a photo"
    formats = [picture(format) for format in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF")]
    formats += [picture("PNG", mode) for mode in ("L", "LA", "P", "RGBA", "1", "I;16")]
    formats += [picture("TIFF", mode) for mode in ("F", "CMYK", "LAB", "I")]
    file = turned.tobytes()
    formats += [picture("JPEG", exif=file), picture("TIFF", exif=file), picture("PNG", exif=file)]
    formats += [picture("TIFF", compression="tiff_lzw"), picture("JPEG", "CMYK", progressive=True)]
    return [b"R" + each for each in formats] + [b"C" + formats[0]]


OTHERS = [b"L.file\nx", b"L.folder\n", b"P.pipe\n"]  # what nobody reads, until the fuzzer gives it another name


def run_folders() -> list[bytes]:
    scores, log = runs()[0].split(BETWEEN)
    held = {b"recipe.json": recipes()[0], b"scores.json": scores, b"log.jsonl": log, b"model.safetensors": network()}
    held |= {b"last.pt": checkpoint()}
    whole = [b"F%s\n%s" % entry for entry in held.items()]
    return [BETWEEN.join([*whole, *more]) for more in ([], OTHERS)]


@cache
def index_folders() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        index = Index.create(Path(folder) / "index", dim=3, kind="hnsw", model="x")
        index.add(some_embeddings())
        index.search(np.eye(3), 1)
        index.close()
        held = {path.name.encode(): path.read_bytes() for path in sorted((Path(folder) / "index").iterdir())}
    whole = [b"F%s\n%s" % entry for entry in held.items() if not entry[0].startswith(b".")]
    return [BETWEEN.join([*whole, *more]) for more in ([], OTHERS)]


def results() -> list[bytes]:
    made_by = {"commit": None, "machine": "x86_64"}
    run = {"scores": {"recall@1": 0.5, "nmi": 0.25}, "best_epoch": 1, "curve": [{"epoch": 1}], "seconds": 0.5}
    named = [run | {"made_by": made_by, "row": "a", "seed": seed, "fingerprint": f"{seed}"} for seed in range(2)]
    trial = {"row": "a", "of": "mark", "settings": {"ratio": 0.5}, "map_at_r": 0.1, "seconds": 1.0}
    return [json.dumps(named, indent=1).encode(), json.dumps([trial]).encode()]


def runs() -> list[bytes]:
    entry = {"epoch": 1, "loss": 1.5, "held_out": {"recall@1": 0.5}, "seconds": 1.0}
    scores = {"trained": {"recall@1": 0.5, "nmi": None}, "best_epoch": 1, "seconds": 1.0}
    return [BETWEEN.join([json.dumps(scores).encode(), (json.dumps(entry) + "\n").encode() * 2])]


@cache
def indices() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        index = Index.create(Path(folder) / "index", dim=3, model="x")
        index.add(some_embeddings())
        index.close()
        return [(Path(folder) / "index" / "items.sqlite").read_bytes()]
