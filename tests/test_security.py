"""Files that a stranger may have sent: each holds a pickle that would write a file, and none of them may."""

import ast
import pickle
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import proxygml
from proxygml.backbones.weights import read_tensors
from proxygml.data import cars, glyphs, omniglot, open_image, splits, table
from proxygml.data.cache import Cache
from proxygml.distributed.checkpoints import checksums, load_shards, save_shards
from proxygml.embeddings import Embeddings
from proxygml.model import load as load_model
from proxygml.paper.results import load_runs
from proxygml.retrieval import Index
from proxygml.retrieval.database import Database
from proxygml.training.checkpoints import load_checkpoint
from proxygml.training.run import Run


class Bomb:
    """What runs code of its own when it is unpickled: it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple:
        return open, (self.marker, "w")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it-was-run"


@pytest.fixture
def bomb(marker: Path) -> bytes:
    """A pickle that makes the marker."""
    return pickle.dumps(Bomb(marker))


def saved(write: Callable[[object, Path], None]) -> Callable[[Path, Path], None]:
    """A file with a bomb in it, from `write(what, file)`."""
    return lambda path, marker: write(Bomb(marker), path)


def with_objects(*names: str, **others: np.ndarray) -> Callable[[Path, Path], None]:
    """An .npz with arrays of Python objects; unpickling one of them runs code."""

    def write(path: Path, marker: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, **{name: np.array([Bomb(marker)], object) for name in names}, **others)

    return write


def plain(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(marker)))


ONE = {"vectors": np.ones((1, 2), np.float32), "labels": np.zeros(1, int)}
READERS = {  # name of the file, what writes it, what a user reads it with
    "a checkpoint": ("last.pt", saved(lambda bomb, path: torch.save({"model": bomb}, path)), load_checkpoint),
    "a checkpoint without a zip": ("last.pt", plain, load_checkpoint),
    "weights": ("w.pth", saved(lambda bomb, path: torch.save({"conv.weight": bomb}, path)), read_tensors),
    "weights without a zip": ("w.pth", plain, read_tensors),
    "safetensors": ("w.safetensors", plain, read_tensors),
    "embeddings": ("e.npz", with_objects("vectors", "labels"), Embeddings.load),
    "paths of embeddings": ("e.npz", with_objects("paths", **ONE), Embeddings.load),
    "class names of embeddings": ("e.npz", with_objects("class_names", **ONE), Embeddings.load),
    "the model of embeddings": ("e.npz", with_objects("model", **ONE), Embeddings.load),
    "embeddings that are a pickle": ("e.npz", plain, Embeddings.load),
    "omniglot": ("omniglot28.npz", with_objects("x_background", "y_background"), omniglot.load),
    "annotations of cars": ("cars_annos.mat", plain, lambda path: cars.load(path.parent)),
    "a table": ("list.csv", plain, table.load),
    "a table of parquet": ("list.parquet", plain, table.load),
    "an image": ("photo.jpg", plain, open_image),
    "a recipe": ("recipe.json", plain, lambda path: Run.open(path.parent).recipe),
    "a model folder": ("preprocessing.json", plain, lambda path: load_model(path.parent)),
    "results": ("glyphs.json", plain, load_runs),
    "a database": ("items.sqlite", plain, lambda path: Index.open(path.parent)),
}


@pytest.mark.parametrize("name", READERS)
def test_pickle_is_refused_unread(name: str, tmp_path: Path, marker: Path) -> None:
    file_name, write, read = READERS[name]
    path = tmp_path / file_name
    write(path, marker)
    with pytest.raises((ValueError, OSError)) as caught:
        read(path)
    assert not marker.exists()
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_pickle_of_these_tests_is_a_bomb(bomb: bytes, marker: Path) -> None:
    pickle.loads(bomb).close()
    assert marker.exists()


def test_a_cached_photo_that_is_a_pickle_is_decoded_anew(tmp_path: Path, marker: Path) -> None:
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photo.png")
    cache = Cache(tmp_path, side=8)
    with cache.copy_path(tmp_path / "photo.png").open("wb") as file:
        np.save(file, np.array([Bomb(marker)], object))
    with cache.open(tmp_path / "photo.png") as image:
        assert image.size == (40, 30)
    assert not marker.exists()


def test_cached_glyphs_that_are_pickles_are_drawn_anew(marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.zeros((1, 8, 8), np.uint8), np.array([65]), np.array([0])
    monkeypatch.setattr(glyphs, "_render", lambda size: drawn)
    path = marker.with_name("glyphs.npz")
    monkeypatch.setattr(glyphs, "_cache_path", lambda size: path)
    with_objects("pixels", "code_points", "faces")(path, marker)
    for found, expected in zip(glyphs._read_or_render(8), drawn, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert not marker.exists()


def test_pickle_beside_shards_is_ignored(tmp_path: Path, marker: Path, bomb: bytes) -> None:
    folder = tmp_path / "proxies-0001"
    proxies = {"proxies": torch.arange(12.0).reshape(3, 4)}
    save_shards(folder, proxies, 3)
    (folder / ".metadata").write_bytes(bomb)
    read = {"proxies": torch.zeros(3, 4)}
    written = checksums(folder)
    load_shards(folder, read, 3, written)
    torch.testing.assert_close(read, proxies)
    (shard,) = folder.glob("*.safetensors")
    shard.write_bytes(bomb)
    with pytest.raises(ValueError, match="is damaged") as caught:
        load_shards(folder, read, 3, written)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_an_index_of_faiss_that_is_none_is_made_again(tmp_path: Path, marker: Path, bomb: bytes) -> None:
    rows = Embeddings(np.eye(5), np.arange(5), np.array(list("abcde")))
    index = Index.create(tmp_path / "index", dim=5, kind="hnsw")
    index.add(rows)
    (tmp_path / "index" / "hnsw-5.faiss").write_bytes(bomb)
    with_rows = Index.open(tmp_path / "index").search(np.eye(5)[:1], 1)
    assert with_rows[0][0].path == "a"
    assert not marker.exists()


@pytest.mark.parametrize("width", [3, 5])
def test_another_index_of_faiss_than_ours_is_made_again(tmp_path: Path, width: int) -> None:
    import faiss

    index = Index.create(tmp_path / "index", dim=5, kind="hnsw")
    index.add(Embeddings(np.eye(5), np.arange(5), np.array(list("abcde"))))
    faiss.write_index(faiss.IndexFlatL2(width), str(tmp_path / "index" / "hnsw-5.faiss"))
    assert Index.open(tmp_path / "index").search(np.eye(5)[1:2], 1)[0][0].path == "b"


def test_foreign_database_calls_no_harmful_function(tmp_path: Path) -> None:
    Index.create(tmp_path / "index", dim=2).close()
    database = Database(tmp_path / "index" / "items.sqlite")
    assert database.rows("PRAGMA trusted_schema") == [(0,)]
    assert database.rows("PRAGMA cell_size_check") == [(1,)]


def test_cache_keeps_files_of_others(tmp_path: Path) -> None:
    np.save(tmp_path / "measurements.npy", np.zeros(1000))
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (64, 64)).save(photos / f"{name}.png")
    images = splits.image_list(["a.png", "b.png"], ["a", "b"], root=photos)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about photos that do not fit
        Cache(tmp_path, side=8).fill(images, max_bytes=300)
    assert (tmp_path / "measurements.npy").exists()


def test_image_calls_no_program(tmp_path: Path) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "drawing.eps")
    (tmp_path / "drawing.eps").rename(tmp_path / "photo.jpg")
    with Image.open(tmp_path / "photo.jpg") as opened:  # Pillow alone would give it to Ghostscript
        assert opened.format == "EPS"
    with pytest.raises(OSError, match="cannot identify"):
        open_image(tmp_path / "photo.jpg")


def test_huge_npz_is_refused_unread(tmp_path: Path) -> None:
    import io
    import zipfile

    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**9, 10**6)})
    with zipfile.ZipFile(tmp_path / "e.npz", "w") as archive:
        for name in ("vectors.npy", "labels.npy"):
            archive.writestr(name, header.getvalue() + struct.pack("<f", 0))
    with pytest.raises((ValueError, MemoryError)) as caught:
        Embeddings.load(tmp_path / "e.npz")
    assert "\n" not in str(caught.value)


LOADERS = {  # what may read a pickle -> the keyword that keeps it from that, or None where it may not be called
    "np.load": ("allow_pickle", False),
    "torch.load": ("weights_only", True),
    "pickle.load": None,
    "pickle.loads": None,
    "joblib.load": None,
    "cloudpickle.load": None,
    "yaml.load": None,
    "torch.export.load": None,
    "eval": None,
    "exec": None,
}


def test_no_line_of_the_package_can_load_a_pickle() -> None:
    seen = set()
    folders = (Path(proxygml.__file__).parent, Path(__file__).parents[1] / "benchmarks")
    for path in [path for folder in folders for path in folder.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in LOADERS and ast.unparse(node) != "exec('')":  # which runs nothing
                assert LOADERS[name] is not None, f"{path}, line {node.lineno}: {name}"
                keyword, value = LOADERS[name]
                given = {one.arg: ast.unparse(one.value) for one in node.keywords}
                assert given.get(keyword) == str(value), f"{path}, line {node.lineno}: {name} without {keyword}={value}"
                seen.add(name)
    assert seen == {"np.load", "torch.load"}
