"""What folding batch normalization and keeping freed memory pay in training and embedding on a CPU.

    python -m benchmarks.photo_speed [--rounds 3] [--threads 2]

EfficientNet-Lite0 trains as in the preset `photos`, and embeds, in processes that take turns: "before" with batch
normalization of its own, memory returned to the system after every batch, and batches of 128 to embed; "now" as the
package does. Images are noise in memory. Writes results/bench/photo_speed.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

from benchmarks.profiling import print_table, save
from proxygml.backbones import Embedder, build_trunk, efficientnet_lite
from proxygml.data.images import FeatureCrops
from proxygml.embeddings import embed
from proxygml.losses.proxygml.module import ProxyGMLLoss
from proxygml.memory import keep_freed_memory

SIZES, BATCH, STEPS = (128, 160, 224), 32, 6


def measure(variant: str, threads: int) -> dict[str, float]:
    """Images per second by activity, in this process."""
    torch.set_num_threads(threads)
    if variant == "before":
        efficientnet_lite.conv_bn = lambda conv, bn, x: bn(conv(x))
    else:
        keep_freed_memory()
    rates = {}
    rng = np.random.default_rng(0)
    for size in SIZES:
        pixels = rng.integers(0, 256, (8 * BATCH, 1, 3, size, size), dtype=np.uint8)
        model = Embedder(build_trunk("efficientnet-lite0"), 512, pooling="average+max").eval()
        loss = ProxyGMLLoss(100, 512, ratio=1.0)
        optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], eps=1e-2, fused=True)
        images, labels = torch.from_numpy(pixels[:BATCH, 0]), torch.arange(BATCH)
        times = []
        for _ in range(STEPS + 2):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss(model(images), labels).backward()
            optimizer.step()
            times.append(time.perf_counter() - started)
        rates[f"training at {size}"] = BATCH / statistics.median(times[2:])
        if variant == "before":  # `embed` itself keeps memory
            times = []
            with torch.no_grad():
                for part in torch.from_numpy(pixels[:, 0]).repeat(2, 1, 1, 1).split(128):
                    started = time.perf_counter()
                    model(part)
                    times.append(time.perf_counter() - started)
            rates[f"embedding at {size}"] = 128 / statistics.median(times[1:])
        else:
            crops = FeatureCrops(pixels, np.zeros(len(pixels), np.int64))
            times = []
            for _ in range(3):
                started = time.perf_counter()
                embed(model, crops, np.zeros(len(pixels), str))
                times.append(time.perf_counter() - started)
            rates[f"embedding at {size}"] = len(pixels) / statistics.median(times)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--variant", choices=("before", "now"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.threads)))
        return
    command = [sys.executable, "-m", "benchmarks.photo_speed", "--threads", str(options.threads), "--variant"]
    rounds = [
        {
            variant: json.loads(subprocess.run([*command, variant], check=True, capture_output=True, text=True).stdout)
            for variant in ("before", "now")
        }
        for _ in range(options.rounds)
    ]
    cases = {}
    for name in rounds[0]["now"]:
        before, now = ([each[variant][name] for each in rounds] for variant in ("before", "now"))
        ratios = sorted(ours / theirs for ours, theirs in zip(now, before, strict=True))
        cases[name] = {
            "before": round(statistics.median(before), 1),
            "now": round(statistics.median(now), 1),
            "ratio": [round(value, 2) for value in (ratios[0], statistics.median(ratios), ratios[-1])],
        }
    rows = [
        (name, f"{case['before']:.0f}", f"{case['now']:.0f}", "{1:.2f} ({0:.2f} to {2:.2f})".format(*case["ratio"]))
        for name, case in cases.items()
    ]
    print_table("EfficientNet-Lite0, images/s", ("activity", "before", "now", "ratio"), rows)
    print(f"written: {save('photo_speed', {'cases': cases})}")


if __name__ == "__main__":
    main()
