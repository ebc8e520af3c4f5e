"""Requests per second and latency of `proxygml serve` beside 8 clients, compared with the library in a loop.

    OMP_WAIT_POLICY=passive python -m benchmarks.serve [--seconds 5] [--rounds 5] [--dry-run]

By vector: the 10 nearest of 100,000 items (128 dimensions, clusters of fifty) in an exact index. By image: JPEG photos
of 500 x 375 pixels are embedded by a small network at 128 pixels, EfficientNet-Lite0, and by the usual one, ResNet-50
at 224 (random weights), also compared with the network alone on batches of 8. Each client waits for its response before
its next request. Server, clients and loop share the machine; contenders take turns, and ratios are between those of a
turn. Both use as many threads, all cores or one: on a loaded machine, threads that wait actively for others make the
loop with two several times slower. CPU time per answer (of the loop, or of the server) depends less on other load.
Writes results/bench/serve.json, which docs/service.md shows.
"""

import argparse
import http.client
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import faiss
import numpy as np
import torch
from PIL import Image, ImageFilter

from benchmarks.profiling import quartiles, save
from benchmarks.search import WIDTH, synthetic_vectors
from proxygml.embeddings import Embeddings
from proxygml.model import Model
from proxygml.paper.tables import Table
from proxygml.retrieval import Index
from proxygml.training import build
from proxygml.training.presets import PRESETS
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run

ITEMS, CLIENTS, COUNT, PHOTO_SIZE = 100_000, 8, 10, (500, 375)
NETWORKS = {"EfficientNet-Lite0": PRESETS["photos"][1], "ResNet-50": PRESETS["resnet50"][1]}
Request = tuple[str, bytes, str]  # path, body, content type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each contender in a round")
    parser.add_argument("--rounds", type=int, default=5, help="two or more")
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=NETWORKS, help="measure only these")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            f"{name}, {threads} thread{'s' * (threads > 1)}": case
            for name, measured in (
                ("by vector", by_vector(Path(folder), options)),
                *((name, by_image(Path(folder) / name, NETWORKS[name], options)) for name in options.networks),
            )
            for threads, case in measured.items()
        }
    table = serve_table(cases)
    print(table.to_markdown())
    if not options.dry_run:
        results = {"items": options.items, "width": WIDTH, "clients": CLIENTS, "rounds": options.rounds}
        results |= {"wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"), "cases": cases}
        print(f"written: {save('serve', results)}")


def by_vector(folder: Path, options: argparse.Namespace) -> dict[int, dict]:
    items = options.items
    vectors, queries = synthetic_vectors(clustered=True, vectors=items)
    index = Index.create(folder / "index", dim=WIDTH, kind="exact")
    index.add(Embeddings(vectors, np.arange(items) // 50, np.array([f"{i}.jpg" for i in range(items)])))
    bodies = [json.dumps({"vector": query.tolist()}).encode() for query in queries]
    requests = [(f"/v1/search/vector?count={COUNT}", body, "application/json") for body in bodies]
    expected = [hit.path for hit in index.search(queries[:1], COUNT)[0]]
    rows = cycle(range(len(queries)))

    def search_one() -> None:
        row = next(rows)
        index.search(queries[row : row + 1], COUNT)

    def check(answer: bytes) -> None:
        assert [hit["path"] for hit in json.loads(answer)["hits"]] == expected

    return compare({"library": (search_one, 1)}, folder / "index", requests, check, options)


def by_image(folder: Path, recipe: Recipe, options: argparse.Namespace) -> dict[int, dict]:
    recipe = recipe.changed({"weights": None, "head_start": "uniform"})
    run = Run.create(folder / "run", recipe)
    run.save_best({"model": build.build_model(recipe).state_dict(), "loss": {}, "epoch": 1, "class_names": []})
    model = Model(run, device="cpu")
    Index.create(folder / "images", dim=recipe.embedding_dim, model=model.model_id).save_model(run.folder)
    photos = [jpeg(seed) for seed in range(16)]
    files = cycle(photos)
    crops = torch.randint(0, 256, (CLIENTS, 3, recipe.image_size, recipe.image_size), dtype=torch.uint8)
    network = model.network.eval()

    def embed_one() -> np.ndarray:
        return model.encode([Image.open(io.BytesIO(next(files)))])

    def forward() -> None:
        with torch.no_grad():
            network(crops)

    requests = [("/v1/embed", photo, "image/jpeg") for photo in photos]
    expected = embed_one()[0]

    def check(answer: bytes) -> None:
        np.testing.assert_allclose(json.loads(answer)["vector"], expected, atol=1e-5)

    loops = {"library": (embed_one, 1), "network alone": (forward, CLIENTS)}
    return compare(loops, folder / "images", requests, check, options)


def jpeg(seed: int) -> bytes:
    """A smooth random photo."""
    small = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    contents = io.BytesIO()
    large = Image.fromarray(small).resize(PHOTO_SIZE, Image.Resampling.BICUBIC)
    large.filter(ImageFilter.GaussianBlur(1)).save(contents, "JPEG", quality=90)
    return contents.getvalue()


@contextmanager
def served(index: Path, threads: int) -> Iterator[tuple[int, int]]:
    """The port and the process of `proxygml serve` for an index."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "proxygml", "serve", str(index), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            yield int(re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())[1]), server.pid
        finally:
            server.terminate()


def compare(
    loops: dict[str, tuple[Callable[[], object], int]],
    index: Path,
    requests: Sequence[Request],
    check: Callable[[bytes], None],
    options: argparse.Namespace,
) -> dict[int, dict]:
    """The measurements with all cores and with one thread. Each loop is a function and its answers per call."""
    cases = {}
    for threads in (os.cpu_count() or 1, 1):
        torch.set_num_threads(threads)
        faiss.omp_set_num_threads(threads)
        with served(index, threads) as (port, pid):
            check(ask(port, requests[:1], until=lambda sent: sent == 1)[1][0])
            cases[threads] = take_turns(loops, port, pid, requests, options)
    return cases


def take_turns(
    loops: dict[str, tuple[Callable[[], object], int]],
    port: int,
    pid: int,
    requests: Sequence[Request],
    options: argparse.Namespace,
) -> dict:
    """Answers per second and CPU milliseconds per answer of each loop and of the service, and its latency."""
    rates: dict[str, list[float]] = {name: [] for name in (*loops, "service")}
    cpu: dict[str, list[float]] = {name: [] for name in rates}
    latencies: list[float] = []
    for turn in range(options.rounds + 1):  # the first one is a warm-up
        seconds = options.seconds if turn else 1
        for name, (call, answers) in loops.items():
            calls, began, used = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - began < seconds:
                call()
                calls += 1
            rates[name].append(answers * calls / (time.perf_counter() - began))
            cpu[name].append(1000 * (time.process_time() - used) / (answers * calls))
        began, used = time.perf_counter(), cpu_seconds(pid)
        deadline = began + seconds
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [
                pool.submit(ask, port, requests[number:], until=lambda _: time.perf_counter() > deadline)  # noqa: B023
                for number in range(CLIENTS)
            ]
            times = [each for client in clients for each in client.result()[0]]
        rates["service"].append(len(times) / (time.perf_counter() - began))
        cpu["service"].append(1000 * (cpu_seconds(pid) - used) / len(times))
        if turn:
            latencies += times
    del rates["library"][0], rates["service"][0]
    ratio = quartiles([ours / theirs for ours, theirs in zip(rates["service"], rates["library"], strict=True)])
    median, high = (round(1000 * value, 1) for value in np.quantile(latencies, [0.5, 0.95]))
    return {
        "per_second": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "cpu_ms": {name: round(statistics.median(values), 2) for name, values in cpu.items()},
        "ratio": ratio,
        "latency_ms": {"p50": median, "p95": high},
    }


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(port: int, requests: Sequence[Request], until: Callable[[int], bool]) -> tuple[list[float], list[bytes]]:
    """Seconds and contents of the responses, one after the other on a connection; any status but 200 is an error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seconds: list[float] = []
    contents: list[bytes] = []
    for path, body, kind in cycle(requests):
        if until(len(seconds)):
            break
        began = time.perf_counter()
        connection.request("POST", path, body, {"Content-Type": kind})
        response = connection.getresponse()
        contents.append(response.read())
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {contents[-1].decode()}")
        seconds.append(time.perf_counter() - began)
    connection.close()
    return seconds, contents


def serve_table(cases: dict) -> Table:
    """Answers per second, ratios with their quartiles, CPU time per answer, and latencies."""
    rows = []
    for name, case in cases.items():
        rates, cpu, (low, middle, high) = case["per_second"], case["cpu_ms"], case["ratio"]
        latency = case["latency_ms"]
        rows.append(
            (
                name,
                f"{rates['library']:,.0f}",
                f"{rates['service']:,.0f}",
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                *(f"{cpu[each]:.1f}" if each in cpu else "-" for each in ("library", "network alone", "service")),
                *(f"{latency[each]:.0f}" for each in ("p50", "p95")),
            )
        )
    columns = ("", "library, 1/s", "service, 1/s", "service : library", "CPU ms: library", "network", "service")
    return Table((*columns, "median, ms", "p95, ms"), tuple(rows))


if __name__ == "__main__":
    main()
