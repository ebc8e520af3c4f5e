"""A photo has one vector, whichever way it comes in."""

import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxygml.cli.main import main
from proxygml.data import load
from proxygml.embeddings import Embeddings
from proxygml.model import Model
from proxygml.retrieval import Index
from proxygml.server.images import read_upload
from proxygml.server.opening import open_space
from proxygml.training import build
from proxygml.training.run import Run
from proxygml.vectors import read_all
from tests.data.test_decoding import gradient

NAMES = ("a/photo.jpg", "b/turned.jpg", "c/photo.png", "d/deep.png")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A large JPEG, one turned by its EXIF orientation, and PNGs of 8 and 16 bits, with detail that resizing loses."""
    folder = tmp_path_factory.mktemp("photos")
    noise = np.random.default_rng(0).integers(-60, 60, (751, 1003, 1))
    detailed = Image.fromarray((np.asarray(gradient(1003, 751)) + noise).clip(0, 255).astype(np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    deep = Image.fromarray(np.asarray(detailed.convert("L")).astype(np.uint16) * 200)
    for name, image, options in zip(NAMES, [detailed] * 3 + [deep], [{}, {"exif": turned}, {}, {}], strict=True):
        (folder / name).parent.mkdir()
        image.save(folder / name, **options)
    return folder


@pytest.fixture(scope="module")
def expected(trained_run: Run, photos: Path) -> dict[str, np.ndarray]:
    """The vectors of the photos, by name, as training computes those of test images."""
    return dict(vectors_of(trained_run, "folder", photos))


def vectors_of(run: Run, dataset: str, data: Path) -> Iterator[tuple[str, np.ndarray]]:
    model = build.load_model(run)
    for images in load(dataset, data):
        crops = build.test_crops(run.recipe, images)
        for number, path in enumerate(images.paths):
            yield path, model(build.torch.from_numpy(crops[number][0][None])).detach().numpy()[0]


def assert_equal(expected: dict[str, np.ndarray], vectors: np.ndarray, paths: list[str], atol: float = 1e-5) -> None:
    assert len(paths) == len(expected)
    for path, vector in zip(paths, vectors, strict=True):
        (name,) = [name for name in NAMES if path.endswith(name)]
        np.testing.assert_allclose(vector, expected[name], atol=atol, err_msg=name)


@pytest.mark.slow
def test_embed(expected: dict, trained_run: Run, photos: Path, tmp_path: Path) -> None:
    options = ["--dataset", "folder", "--data", photos, "--split", "all", "--out", tmp_path / "vectors.npz"]
    main([str(word) for word in ["embed", trained_run.folder, *options]])
    embeddings = Embeddings.load(tmp_path / "vectors.npz")
    assert_equal(expected, embeddings.vectors, embeddings.paths.tolist())


def test_encode(expected: dict, trained_run: Run, photos: Path) -> None:
    model, files = Model(trained_run), [photos / name for name in NAMES]
    assert_equal(expected, model.encode(files), list(NAMES))
    assert_equal(expected, model.encode([Image.open(file) for file in files]), list(NAMES))


def test_index_and_upload(expected: dict, trained_run: Run, photos: Path, tmp_path: Path) -> None:
    main([str(w) for w in ["index", "build", photos, "--out", tmp_path / "index", "--run", trained_run.folder]])
    indexed = read_all(Index.open(tmp_path / "index"))
    assert_equal(expected, indexed.vectors, indexed.paths.tolist())
    space = open_space(str(tmp_path / "index"), split="test", data=None, progress=lambda *_: None)
    crops = [space.encoder.crop(read_upload((photos / name).read_bytes())) for name in NAMES]
    assert_equal(expected, space.encoder.encode_crops(crops), list(NAMES))


def test_tar(expected: dict, trained_run: Run, photos: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        for name in NAMES:
            (tmp_path / "label.cls").write_text(name[0])
            archive.add(photos / name, name)
            archive.add(tmp_path / "label.cls", f"{name.partition('.')[0]}.cls")
    names, vectors = zip(*vectors_of(trained_run, "tar", tmp_path / "photos.tar"), strict=True)
    assert_equal(expected, np.stack(vectors), [name.partition("@")[0] for name in names])


def test_exported_script(expected: dict, exported_folder: Path, photos: Path, tmp_path: Path) -> None:
    script = [sys.executable, exported_folder / "embed.py", *NAMES, "--out", tmp_path / "vectors.npz"]
    subprocess.run(script, cwd=photos, check=True)
    embeddings = Embeddings.load(tmp_path / "vectors.npz")
    assert_equal(expected, embeddings.vectors, embeddings.paths.tolist(), atol=1e-4)
