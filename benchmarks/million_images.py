"""Startup time and memory of training on a million images.

    python -m benchmarks.million_images [--images N] [--form table|tar] [--dry-run]

Writes a CSV table of a million paths (a thousand links to one folder of a thousand small photos in a hundred classes),
or tar files with as many photos. A new process starts training on it and measures the seconds and memory until the
first and the fiftieth step. The same is done with 1 % of the images. Writes results/bench/million_images.json;
`python -m benchmarks.report` renders it in docs/scaling.md.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.profiling import load, peak_resident_mb, resident_mb, save
from proxygml.paper.tables import Table

IMAGES, PHOTOS, CLASSES, STEPS = 1_000_000, 1_000, 100, 50
IMAGES_PER_TAR = 100_000


def make_table(folder: Path, images: int) -> Path:
    """Write a CSV table of so many images."""
    photos = folder / "photos"
    photos.mkdir()
    for number, photo in enumerate(synthetic_photos()):
        (photos / f"{number:03d}.jpg").write_bytes(photo)
    for link in range(-(-images // PHOTOS)):
        (folder / f"part{link:04d}").symlink_to("photos")
    with (folder / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for number in range(images):
            part, photo = divmod(number, PHOTOS)
            writer.writerow([f"part{part:04d}/{photo:03d}.jpg", f"class {photo % CLASSES}"])
    return folder / "list.csv"


def make_tars(folder: Path, images: int) -> Path:
    """Write tar files with images and labels in the layout of WebDataset."""
    photos = synthetic_photos()
    for start in range(0, images, IMAGES_PER_TAR):
        with tarfile.open(folder / f"part{start // IMAGES_PER_TAR:04d}.tar", "w") as archive:
            for number in range(start, min(start + IMAGES_PER_TAR, images)):
                photo = number % PHOTOS
                label = f"class {photo % CLASSES}".encode()
                for ending, contents in ((".jpg", photos[photo]), (".cls", label)):
                    member = tarfile.TarInfo(f"{number:07d}{ending}")
                    member.size = len(contents)
                    archive.addfile(member, io.BytesIO(contents))
    return folder


def synthetic_photos() -> list[bytes]:
    rng, photos = np.random.default_rng(0), []
    for _ in range(PHOTOS):
        file = io.BytesIO()
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((32, 32), Image.Resampling.BICUBIC).save(file, "JPEG")
        photos.append(file.getvalue())
    return photos


def measure(form: str, data: Path, folder: Path) -> dict[str, float]:
    """Start training in a new process; its measurements."""
    command = [sys.executable, "-m", "benchmarks.million_images", "--child", form, str(data), str(folder)]
    done = subprocess.run([*command, str(time.time())], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def start_training(form: str, data: str, folder: str, started: float) -> None:
    """Train for a few steps and print when they finished, relative to `started`; runs in a new process."""
    from proxygml.training.presets import GLYPHS
    from proxygml.training.start import train

    measured: dict[str, float] = {}

    def watch(what: str, done: int, total: int, note: str) -> None:
        if what == "checking training images" and "listed_s" not in measured:
            measured["listed_s"] = round(time.time() - started, 1)
        if what == "training" and done in (1, STEPS):
            measured[f"step_{done}_s"] = round(time.time() - started, 1)
            measured[f"step_{done}_cpu_s"] = round(time.process_time(), 1)
            measured[f"step_{done}_mb"] = round(resident_mb())
            if done == STEPS:
                raise KeyboardInterrupt

    recipe = GLYPHS.changed({"dataset": form, "data": data, "baselines": False})
    try:
        train(recipe, Path(folder), progress=watch)
    except KeyboardInterrupt:
        print(json.dumps(measured | {"peak_mb": round(peak_resident_mb())}))


def table(results: dict) -> Table:
    rows = []
    for form in ("table", "tar"):
        for name, measured in results.get(form, {}).items():
            images, start = name.split(" images, ")
            seconds = [f"{measured[key]:.0f}" for key in ("listed_s", "step_1_s", "step_1_cpu_s", f"step_{STEPS}_s")]
            rows.append((f"{int(images):,}, {form}, {start}", *seconds, str(measured["peak_mb"])))
    columns = ("images", "listed, s", "first step, s", "first step, CPU s", f"step {STEPS}, s", "peak MB")
    return Table(columns, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--form", choices=["table", "tar"], default="table")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        start_training(*options.child[:3], float(options.child[3]))
        return
    results = {}
    for images in (options.images // 100, options.images):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "data").mkdir()
            data = (make_table if options.form == "table" else make_tars)(Path(folder) / "data", images)
            for start in ("first start", "second start"):  # the second one reads caches
                results[f"{images} images, {start}"] = measure(options.form, data, Path(folder) / start)
    print(table({options.form: results}).to_markdown())
    if not options.dry_run:
        previous = load("million_images")
        kept = {form: previous[form] for form in ("table", "tar") if form in previous}
        print(save("million_images", kept | {options.form: results}))


if __name__ == "__main__":
    main()
