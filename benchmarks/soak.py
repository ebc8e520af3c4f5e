"""Memory leak check: 10,000 training steps, and 1,000 requests to the server of `proxygml browse`.

    python -m benchmarks.soak [--quick] [--out FOLDER]

Training includes evaluation on held-out classes, logs and checkpoints. Requests ask for images, neighbors, thumbnails,
confusions, maps and uploads. The slope of resident memory is fitted to the last four fifths of the samples, when caches
are full. Writes results/soak.json and results/soak.png.
"""

import argparse
import io
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.profiling import resident_mb, save
from proxygml.files import atomic_write
from proxygml.training.presets import GLYPHS
from proxygml.training.start import train

STEPS, REQUESTS = 10_000, 1_000
QUICK_STEPS, QUICK_REQUESTS = 120, 40
TINY = {"classes": 60, "image_size": 16, "batch_size": 16, "embedding_dim": 32, "baselines": False, "test": False}
Samples = list[tuple[int, float]]  # steps or requests done, megabytes


class StopTrainingError(Exception):
    """The requested number of steps is done."""


def soak_training(folder: Path, steps: int) -> Samples:
    """Memory over training steps. Leaves a finished run in `folder`."""
    samples: Samples = []
    every = max(1, steps // 200)
    recipe = GLYPHS.changed(TINY | {"epochs": 2})
    train(recipe, folder)  # the run for the server; also loads all libraries

    def watch(what: str, done: int, total: int, note: str) -> None:
        if what == "training" and (done % every == 0 or done == steps):
            samples.append((done, resident_mb()))
            print(f"\rtraining: step {done:,} of {steps:,}, {samples[-1][1]:.0f} MB", end="", flush=True)
            if done >= steps:
                raise StopTrainingError

    try:
        train(recipe.changed({"epochs": steps}), folder.with_name("long"), progress=watch)
    except StopTrainingError:
        print()
    return samples


def soak_server(run: Path, requests: int) -> Samples:
    """Memory of the server over requests; any status but 200 is an error."""
    samples: Samples = []
    every = max(1, requests // 100)
    command = [sys.executable, "-m", "proxygml", "browse", str(run), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"http://\S+", server.stdout.readline())[0]
            while b'"failures":{"state":"done"' not in fetch(f"{address}/page/jobs"):
                time.sleep(0.1)
            images = int(re.search(rb'"images":(\d+)', fetch(f"{address}/page/space"))[1])
            rng = np.random.default_rng(0)
            for done in range(1, requests + 1):
                send_random_request(address, images, rng)
                if done % every == 0 or done == requests:
                    samples.append((done, resident_mb(server.pid)))
                    print(f"\rpage: request {done:,} of {requests:,}, {samples[-1][1]:.0f} MB", end="", flush=True)
            print()
        finally:
            server.terminate()
    return samples


def send_random_request(address: str, images: int, rng: np.random.Generator) -> None:
    image, start = (int(number) for number in rng.integers(images, size=2))
    weights = {
        "": 1,
        "page/space": 1,
        f"page/images/{image}": 3,
        f"v1/search/id?id={image}&count=24": 3,
        f"page/images?start={start}&count=60": 2,
        f"page/images?order=rank&text={image % 10}": 2,
        f"page/thumbnails/{image}?side={rng.choice([96, 224, 512])}": 8,
        "page/confusions": 1,
        "page/map/pca": 1,
        "v1/search/image?count=24": 3,
    }
    path = str(rng.choice(list(weights), p=np.array(list(weights.values())) / sum(weights.values())))
    if not path.startswith("v1/search/image"):
        fetch(f"{address}/{path}")
        return
    photo = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (600, 800, 3), dtype=np.uint8)).save(photo, "JPEG")
    fetch(f"{address}/{path}", photo.getvalue())


def fetch(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": "application/octet-stream"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


def summary(samples: Samples) -> dict:
    """First, last and peak memory, and its growth after the first fifth."""
    done, megabytes = (np.array(values, float) for values in zip(*samples, strict=True))
    settled = done >= done[-1] / 5
    fifth = max(1, len(done) // 5)
    first, last = np.median(megabytes[settled][:fifth]), np.median(megabytes[-fifth:])
    return {
        "done": int(done[-1]),
        "mb_first": round(float(megabytes[0]), 1),
        "mb_last": round(float(megabytes[-1]), 1),
        "mb_peak": round(float(megabytes.max()), 1),
        "mb_per_1000": round(1000 * float(np.polyfit(done[settled], megabytes[settled], 1)[0]), 3),
        "mb_growth": round(float(last - first), 1),
        "samples": [[number, round(megabytes, 1)] for number, megabytes in samples],
    }


def draw(results: dict[str, dict], path: Path) -> None:
    """Plot memory over steps and over requests."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, (name, result) in zip(figure.subplots(1, 2), results.items(), strict=True):
        axis.plot(*zip(*result["samples"], strict=True))
        axis.set(xlabel=name, ylabel="resident memory, MB", ylim=(0, 1.2 * result["mb_peak"]))
        axis.set_title(f"{result['mb_per_1000']:+.2f} MB per 1,000", fontsize="medium")
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps and {QUICK_REQUESTS} requests")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    steps, requests = (QUICK_STEPS, QUICK_REQUESTS) if options.quick else (STEPS, REQUESTS)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        results = {"training steps": summary(soak_training(run, steps))}
        results["page requests"] = summary(soak_server(run, requests))
    for name, result in results.items():
        print(
            f"{result['done']:,} {name}: {result['mb_first']:.0f} MB at first, {result['mb_last']:.0f} MB at last, "
            f"peak {result['mb_peak']:.0f} MB, {result['mb_per_1000']:+.2f} MB per 1,000"
        )
    draw(results, options.out / "soak.png")
    print(save("soak", results, options.out))


if __name__ == "__main__":
    main()
