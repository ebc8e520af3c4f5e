"""Memory over a long run: 10,000 training steps, and 1,000 requests to the page of `proxygml browse`.

    python -m benchmarks.soak [--quick] [--out FOLDER]

Training is whole: epochs are judged on held-out classes, logged and kept as checkpoints. The page is asked for images,
their nearest, small pictures, confusions, maps and uploads. Resident memory is noted all along; the slope is that of a
line through its last four fifths, once caches are filled. Writes results/soak.json and results/soak.png.
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

from benchmarks.measuring import resident_megabytes, save
from proxygml.files import written_whole
from proxygml.recipes import GLYPHS
from proxygml.training import train

STEPS, REQUESTS = 10_000, 1_000
QUICK_STEPS, QUICK_REQUESTS = 120, 40
TINY = {"classes": 60, "image_size": 16, "batch_size": 16, "embedding_dim": 32, "baselines": False, "test": False}
Noted = list[tuple[int, float]]  # steps or requests done, megabytes


class EnoughError(Exception):
    """As many steps as were wanted are done."""


def soak_training(folder: Path, steps: int) -> Noted:
    """Train for so many steps, and a finished run in `folder`."""
    noted: Noted = []
    every = max(1, steps // 200)
    recipe = GLYPHS.changed(TINY | {"epochs": 2})
    train(recipe, folder)  # what the page is to show; libraries are loaded and warm

    def watch(what: str, done: int, total: int, note: str) -> None:
        if what == "training" and (done % every == 0 or done == steps):
            noted.append((done, resident_megabytes()))
            print(f"\rtraining: step {done:,} of {steps:,}, {noted[-1][1]:.0f} MB", end="", flush=True)
            if done >= steps:
                raise EnoughError

    try:
        train(recipe.changed({"epochs": steps}), folder.with_name("long"), progress=watch)  # more than enough epochs
    except EnoughError:
        print()
    return noted


def soak_page(run: Path, requests: int) -> Noted:
    """Ask the page of a run so many times; every answer has to be a good one."""
    noted: Noted = []
    every = max(1, requests // 100)
    command = [sys.executable, "-m", "proxygml", "browse", str(run), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"http://\S+", server.stdout.readline())[0]
            while b'"failures":{"state":"done"' not in ask(f"{address}/api/jobs"):
                time.sleep(0.1)
            images = int(re.search(rb'"images":(\d+)', ask(f"{address}/api/space"))[1])
            random = np.random.default_rng(0)
            for done in range(1, requests + 1):
                one_of_all_kinds(address, images, random)
                if done % every == 0 or done == requests:
                    noted.append((done, resident_megabytes(server.pid)))
                    print(f"\rpage: request {done:,} of {requests:,}, {noted[-1][1]:.0f} MB", end="", flush=True)
            print()
        finally:
            server.terminate()
    return noted


def one_of_all_kinds(address: str, images: int, random: np.random.Generator) -> None:
    """A request as the page sends them, at random."""
    image, start = (int(number) for number in random.integers(images, size=2))
    kinds = {
        "": 1,
        "api/space": 1,
        f"api/images/{image}?count=24": 6,
        f"api/images?start={start}&count=60": 2,
        f"api/images?order=rank&text={image % 10}": 2,
        f"thumbnails/{image}?side={random.choice([96, 224, 512])}": 8,
        "api/confusions": 1,
        "api/map/pca": 1,
        "api/uploads?count=24": 3,
    }
    path = str(random.choice(list(kinds), p=np.array(list(kinds.values())) / sum(kinds.values())))
    if not path.startswith("api/uploads"):
        ask(f"{address}/{path}")
        return
    photo = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (600, 800, 3), dtype=np.uint8)).save(photo, "JPEG")
    ask(f"{address}/{path}", photo.getvalue())


def ask(address: str, sent: bytes | None = None) -> bytes:
    """What the page answers; anything but 200 is an error."""
    request = urllib.request.Request(address, sent, {"Content-Type": "application/octet-stream"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def summary(noted: Noted) -> dict:
    """How much memory there was, and how it went on after a fifth of the way."""
    done, megabytes = (np.array(values, float) for values in zip(*noted, strict=True))
    settled = done >= done[-1] / 5
    fifth = max(1, len(done) // 5)
    first, last = np.median(megabytes[settled][:fifth]), np.median(megabytes[-fifth:])
    return {
        "done": int(done[-1]),
        "mb_at_first": round(float(megabytes[0]), 1),
        "mb_at_last": round(float(megabytes[-1]), 1),
        "mb_at_most": round(float(megabytes.max()), 1),
        "mb_per_thousand": round(1000 * float(np.polyfit(done[settled], megabytes[settled], 1)[0]), 3),
        "mb_from_second_fifth_to_last": round(float(last - first), 1),
        "noted": [[int(number), round(amount, 1)] for number, amount in noted],
    }


def draw(found: dict[str, dict], path: Path) -> None:
    """Memory over steps and over requests."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, (what, one) in zip(figure.subplots(1, 2), found.items(), strict=True):
        axis.plot(*zip(*one["noted"], strict=True))
        axis.set(xlabel=what, ylabel="resident memory, MB", ylim=(0, 1.2 * one["mb_at_most"]))
        axis.set_title(f"{one['mb_per_thousand']:+.2f} MB in 1,000", fontsize="medium")
    with written_whole(path) as draft:
        figure.savefig(draft, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps and {QUICK_REQUESTS} requests")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    steps, requests = (QUICK_STEPS, QUICK_REQUESTS) if options.quick else (STEPS, REQUESTS)
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        found = {"training steps": summary(soak_training(run, steps))}
        found["page requests"] = summary(soak_page(run, requests))
    for what, one in found.items():
        print(
            f"{one['done']:,} {what}: {one['mb_at_first']:.0f} MB at first, {one['mb_at_last']:.0f} at last, "
            f"{one['mb_at_most']:.0f} at most; {one['mb_per_thousand']:+.2f} MB in 1,000"
        )
    draw(found, options.out / "soak.png")
    print(save("soak", found, options.out))


if __name__ == "__main__":
    main()
