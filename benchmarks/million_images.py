"""How soon training begins on a million listed images, and what memory that takes.

    python -m benchmarks.million_images [--images N] [--form table|tar] [--dry]

Makes a CSV list of so many paths, below a thousand links to one folder of a thousand small photos of a hundred classes
(or tar files of as many photos), and begins to train on it in a process of its own: seconds from its start to the first
step and to the fiftieth, and its memory then. The same on 1 % of the images beside it. Writes
results/bench/million_images.json, of which `python -m benchmarks.report` makes a table in docs/scaling.md.
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

from benchmarks.measuring import RESULTS, load, resident_megabytes, save
from proxygml.experiments.tables import Table

IMAGES, PHOTOS, CLASSES, STEPS = 1_000_000, 1_000, 100, 50
IN_A_TAR = 100_000  # images


def make_table(folder: Path, images: int) -> Path:
    """A list of so many images, the classes of half of which are for testing."""
    photos = folder / "photos"
    photos.mkdir()
    for number, photo in enumerate(made_photos()):
        (photos / f"{number:03d}.jpg").write_bytes(photo)
    for link in range(-(-images // PHOTOS)):
        (folder / f"part{link:04d}").symlink_to("photos")
    with (folder / "list.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        for number in range(images):
            part, photo = divmod(number, PHOTOS)
            rows.writerow([f"part{part:04d}/{photo:03d}.jpg", f"class {photo % CLASSES}"])
    return folder / "list.csv"


def make_tars(folder: Path, images: int) -> Path:
    """Tar files with so many images and their classes, as WebDataset writes them."""
    photos = list(made_photos())
    for start in range(0, images, IN_A_TAR):
        with tarfile.open(folder / f"part{start // IN_A_TAR:04d}.tar", "w") as archive:
            for number in range(start, min(start + IN_A_TAR, images)):
                photo = number % PHOTOS
                label = f"class {photo % CLASSES}".encode()
                for ending, contents in ((".jpg", photos[photo]), (".cls", label)):
                    member = tarfile.TarInfo(f"{number:07d}{ending}")
                    member.size = len(contents)
                    archive.addfile(member, io.BytesIO(contents))
    return folder


def made_photos() -> list[bytes]:
    random, photos = np.random.default_rng(0), []
    for _ in range(PHOTOS):
        file = io.BytesIO()
        coarse = Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((32, 32), Image.Resampling.BICUBIC).save(file, "JPEG")
        photos.append(file.getvalue())
    return photos


def measure(form: str, data: Path, folder: Path) -> dict[str, float]:
    """What a process that begins to train finds of itself."""
    command = [sys.executable, "-m", "benchmarks.million_images", "--begin", form, str(data), str(folder)]
    began = time.time()
    done = subprocess.run([*command, str(began)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def begin(form: str, data: str, folder: str, began: float) -> None:
    """In a process of its own: train for some steps and say when they came."""
    from proxygml.recipes import GLYPHS
    from proxygml.training import train

    found: dict[str, float] = {}

    def watch(what: str, done: int, total: int, note: str) -> None:
        if what == "checking training images" and "listed_s" not in found:
            found["listed_s"] = round(time.time() - began, 1)
        if what == "training" and done in (1, STEPS):
            found[f"step_{done}_s"] = round(time.time() - began, 1)
            found[f"step_{done}_cpu_s"] = round(time.process_time(), 1)  # of this process, whatever else goes on
            found[f"step_{done}_mb"] = round(resident_megabytes())
            if done == STEPS:
                raise KeyboardInterrupt

    recipe = GLYPHS.changed({"dataset": form, "data": data, "baselines": False})
    try:
        train(recipe, Path(folder), progress=watch)
    except KeyboardInterrupt:
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        print(json.dumps(found | {"peak_mb": round(int(peak.split()[1]) / 1024)}))


def table(found: dict) -> Table:
    rows = []
    for form in ("table", "tar"):
        for what, one in found.get(form, {}).items():
            images, turn = what.split(" images, ")
            seconds = [f"{one[key]:.0f}" for key in ("listed_s", "step_1_s", "step_1_cpu_s", f"step_{STEPS}_s")]
            rows.append((f"{int(images):,}, {form}, {turn}", *seconds, str(one["peak_mb"])))
    columns = ("images", "listed, s", "first step, s", "the same, s of a processor", f"step {STEPS}, s", "MB at most")
    return Table(columns, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--form", choices=["table", "tar"], default="table")
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--begin", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.begin:
        begin(*options.begin[:3], float(options.begin[3]))
        return
    found = {}
    for images in (options.images // 100, options.images):
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "data").mkdir()
            began = time.perf_counter()
            data = (make_table if options.form == "table" else make_tars)(Path(place) / "data", images)
            print(f"{images:,} images in a {options.form}, made in {time.perf_counter() - began:.0f} s", flush=True)
            for turn in ("first start", "second start"):  # what a first one keeps serves the next
                found[f"{images} images, {turn}"] = one = measure(options.form, data, Path(place) / turn)
                print(
                    f"  {turn}: listed after {one['listed_s']:.1f} s, first step after {one['step_1_s']:.1f} s "
                    f"({one['step_1_cpu_s']:.1f} of a processor), step {STEPS} after {one[f'step_{STEPS}_s']:.1f} s; "
                    f"at most {one['peak_mb']:.0f} MB",
                    flush=True,
                )
    if not options.dry:
        before = load("million_images") if (RESULTS / "million_images.json").exists() else {}
        kept = {form: before[form] for form in ("table", "tar") if form in before}
        print(save("million_images", kept | {options.form: found}))


if __name__ == "__main__":
    main()
