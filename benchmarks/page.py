"""The page of `proxygml browse` with 100,000 vectors in headless Chromium: frame rate of the map, response times.

    python -m benchmarks.page [--points 100000]

Frames are counted while the mouse drags the map in circles. Draw calls with nothing to draw are ignored. Writes
results/bench/page.json; `python -m benchmarks.report` renders it in docs/performance.md.
"""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from benchmarks.profiling import save

SCREENS = {"1280 x 800": (1280, 800, 1), "1920 x 1080": (1920, 1080, 1), "1280 x 800, HiDPI (2x)": (1280, 800, 2)}
DIMENSIONS, CLASSES = 128, 500
# The time between frames, and the time to draw the points of each frame.
WATCH = """() => {
  window.gaps = []; window.draws = [];
  let last = 0;
  const every = (now) => {
    if (last) gaps.push(now - last);
    last = now;
    window.watching = requestAnimationFrame(every);
  };
  const draw = drawPoints;
  drawPoints = () => { const began = performance.now(); draw(); draws.push(performance.now() - began); };
  window.unwatch = () => { cancelAnimationFrame(watching); drawPoints = draw; return [gaps, draws]; };
  window.watching = requestAnimationFrame(every);
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of dragging per screen")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.npz"
        write_vectors(path, options.points)
        command = [sys.executable, "-m", "proxygml", "browse", path, "--port", "0", "--no-open"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                results = measure(re.search(r"http://\S+", server.stdout.readline())[0], options.seconds)
            finally:
                server.terminate()
    print(json.dumps(results, indent=1))
    print(f"written: {save('page', {'points': options.points} | results)}")


def write_vectors(path: Path, count: int) -> None:
    """Write unit vectors around the centers of some classes."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % CLASSES
    vectors = rng.normal(size=(CLASSES, DIMENSIONS))[labels] + 1.2 * rng.normal(size=(count, DIMENSIONS))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.savez(path, vectors=vectors.astype(np.float32), labels=labels)


def measure(address: str, seconds: float) -> dict:
    """Frame rates on each screen, then response times of the server."""
    screens = {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, ratio) in SCREENS.items():
            size = {"width": width, "height": height}
            page = browser.new_context(viewport=size, device_scale_factor=ratio).new_page()
            page.goto(f"{address}/#view=map")
            until(page, "places !== null && colors !== null && frame === 0")
            page.evaluate(WATCH)
            drag(page, seconds)
            gaps, draws = (np.array(values) for values in page.evaluate("unwatch()"))
            draws = draws[draws > 0.5]
            screens[name] = {
                "frames_per_second": round(1000 * len(gaps) / gaps.sum(), 1),
                "gap_ms": round(float(np.median(gaps)), 1),
                "gap_ms_95": round(float(np.quantile(gaps, 0.95)), 1),
                "points_ms_min": round(float(draws.min()), 1),
                "points_ms": round(float(np.median(draws)), 1),
            }
        asked = """() => {
          const began = performance.now();
          return ask('/v1/search/id?id=7&count=24').then(() => performance.now() - began);
        }"""
        nearest = float(np.median([page.evaluate(asked) for _ in range(20)]))
        began = time.perf_counter()
        page.evaluate("startJob('failures')")
        until(page, "jobs.failures.state === 'done'")
        browser.close()
    return {"screens": screens, "nearest_ms": round(nearest), "failures_s": round(time.perf_counter() - began)}


def drag(page: Page, seconds: float) -> None:
    """Drag the map in circles."""
    box = page.locator("#over").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*middle)
    page.mouse.down()
    began, step = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step += 1
        page.mouse.move(middle[0] + 100 * math.sin(step / 10), middle[1] + 100 * math.cos(step / 10))
    page.mouse.up()


def until(page: Page, expression: str) -> None:
    while not page.evaluate(expression):
        page.wait_for_timeout(50)


if __name__ == "__main__":
    main()
