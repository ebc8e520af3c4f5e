"""Fixtures for the server: a space of colors, its client, a served run, and a browser."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from proxygml.data import decoding
from proxygml.display import no_progress
from proxygml.embeddings import Embeddings
from proxygml.server.connections import Server, listen
from proxygml.server.opening import open_space
from proxygml.server.server import create_app
from proxygml.server.space import Space
from proxygml.training.run import Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with red, green and blue photos, four each, and vectors.npz with two misplaced photos.

    The vectors of a class lie on an arc; red 3 lies among the green, green 3 among the blue.
    """
    angles, names = [], []
    for number, color in enumerate(["red", "green", "blue"]):
        for place in range(4):
            path = tmp_path / "photos" / color / f"{place}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            shade = [30, 30, 30]
            shade[number] = 140 + 25 * place
            Image.new("RGB", (300, 200), tuple(shade)).save(path)
            moved = number + 1 if place == 3 and number < 2 else number
            angles.append(moved + (0.05 if moved != number else 0.1 * place))
            names.append(f"{color}/{place}.jpg")
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)  # (12, 2)
    rows = Embeddings(vectors, np.repeat([0, 1, 2], 4), np.array(names), np.array(["red", "green", "blue"]))
    rows.save(tmp_path / "vectors.npz")
    return tmp_path


class StrongestColor:
    """Embeds images by their strongest color channel, as an angle."""

    def crop(self, image: Image.Image) -> np.ndarray:
        return np.asarray(image.convert("RGB"), float).mean(axis=(0, 1))  # (3,)

    def encode_crops(self, crops: Sequence[np.ndarray]) -> np.ndarray:
        angles = np.argmax(crops, axis=1)
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@pytest.fixture
def colors(photos: Path) -> Space:
    """A space of the photos; uploads are embedded by their strongest color channel."""
    loaded = Embeddings.load(photos / "vectors.npz")

    def open_image(number: int) -> Image.Image:
        return decoding.open_image(photos / "photos" / str(loaded.paths[number]))

    return Space("colors", loaded, open_image=open_image, encoder=StrongestColor())


@pytest.fixture
def client(colors: Space) -> Iterator[TestClient]:
    """A client of the colors, after the first jobs are done."""
    with TestClient(create_app(colors), base_url="http://127.0.0.1:8765") as opened:
        for job in opened.app.state.responses.jobs.values():
            job.wait()
        yield opened


@contextmanager
def served(location: Path, *, split: str = "all", token: str | None = None) -> Iterator[str]:
    """The address of the page of a run or an .npz, served by a thread."""
    space, ready = open_space(str(location), split=split, data=None, progress=no_progress), threading.Event()
    with listen("127.0.0.1", 0) as listening:
        server = Server(create_app(space, token=token, local=token is None), ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        assert ready.wait(60)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def served_run(trained_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page of a run's training images."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(trained_run.folder, folder)
    with served(folder, split="train") as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    """Debian's Chromium, driven by Playwright; no other event loop may run in this process meanwhile."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
