"""Checks of a machine for `proxygml doctor`: devices, weights, training steps, several processes, speed."""

import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from proxygml.backbones import BACKBONES, build_trunk
from proxygml.backbones.weights import check_hash, load_weights
from proxygml.data import ImageList
from proxygml.files import one_line
from proxygml.training import build
from proxygml.training.fabric import start_fabric
from proxygml.training.loop import TrainingLoop
from proxygml.training.presets import GLYPHS, PRESETS
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from proxygml.training.start import resume

TOLERANCE = {"32-true": 0.01, "bf16-mixed": 0.1, "16-mixed": 0.1}  # by precision, of a first loss of about 2
SECONDS = 2.0  # of each measurement of speed
SMALL = GLYPHS.changed({"classes": 8, "epochs": 1, "ratio": 0.5, "baselines": False, "test": False, "held_out": 0.0})
RESNET = PRESETS["resnet50"][1].changed({"weights": None, "ratio": 0.5, "workers": 0})


class NotAvailableError(Exception):
    """A check that does not apply to this machine; the message says what it needs."""


def run_checks() -> Iterator[tuple[str, str, str]]:
    """Name, status (ok, not available or failed) and detail of every check."""
    for name, check, remedy in checks():
        try:
            yield name, "ok", check()
        except (NotAvailableError, FileNotFoundError, ModuleNotFoundError) as error:
            yield name, "not available", one_line(error, max_length=600)
        except Exception as error:
            if os.environ.get("PROXYGML_TRACEBACK"):
                raise
            yield name, "failed", f"{type(error).__name__}: {one_line(error)}: {remedy}"


def checks() -> Iterator[tuple[str, Callable[[], str], str]]:
    """Name of every check, a function that returns a detail or raises an error, and a remedy for the error."""
    yield "devices", describe_devices, "update the driver of the GPU"
    for backbone in BACKBONES:
        if backbone != "convnet":  # has no published weights
            yield f"weights of {backbone}", partial(find_weights, backbone), "download the file again"
    for device in devices():
        for precision in TOLERANCE:
            remedy = "use --precision 32-true" if precision != "32-true" else "update the driver, or use --device cpu"
            yield f"training on {device}, {precision}", partial(train_steps, device, precision), remedy
        yield f"two processes on {device}", partial(compare_processes, device), "use --devices 1"
    yield "loader", describe_loader, "free some space for temporary files"
    for device in devices():
        for precision in list(TOLERANCE)[: None if device == "cuda" else 1]:
            speed = partial(describe_speed, device, precision)
            yield f"resnet50 on {device}, {precision}", speed, "use a smaller --batch-size or --backbone"


def devices() -> list[str]:
    available = {"cpu": True, "mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    return [name for name, there in available.items() if there]


def describe_devices() -> str:
    if not torch.cuda.is_available() and shutil.which("nvidia-smi"):
        raise NotAvailableError(f"there is nvidia-smi, but torch {torch.__version__} finds no GPU: see pytorch.org")
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GB, CUDA {torch.version.cuda}" for gpu in gpus]
    cpu = f"{platform.machine()}, {os.cpu_count()} cores, torch with {torch.get_num_threads()} of them"
    return "; ".join([", ".join(devices()), cpu, *names])


def find_weights(backbone: str) -> str:
    trunk = build_trunk(backbone)
    path = trunk.pretrained_file()
    load_weights(trunk, path)
    return f"{path}, SHA-256 {check_hash(path)[:16]}..."


def start_training(recipe: Recipe, images: ImageList) -> tuple[TrainingLoop, Tensor, Tensor]:
    """A training loop and a batch: images (B, 3, H, W), labels (B,)."""
    fabric = start_fabric(recipe)
    model, loss = build.build_model(recipe), build.build_loss(recipe, len(images.class_names))
    loop = TrainingLoop(recipe, fabric, model, loss, images)
    loop.model.train()
    crops = build.training_crops(recipe, images, epoch=0)
    batch = default_collate([crops[index] for index in range(recipe.batch_size)])
    return loop, batch[0], batch[1]


@cache
def losses(device: str, precision: str) -> list[float]:
    """The losses of one batch before each of six steps; a GradScaler may skip the first ones."""
    recipe = SMALL.changed({"device": device, "precision": precision})
    loop, images, labels = start_training(recipe, build.load_images(recipe)[0])
    return [loop.train_step(images, labels)[0].item() for _ in range(6)]


def train_steps(device: str, precision: str) -> str:
    """The first loss must be that of float32 on the CPU, the last one lower."""
    if precision == "16-mixed" and device == "cpu":
        raise NotAvailableError("float16 needs a GPU: use --precision bf16-mixed")
    if precision == "bf16-mixed" and device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotAvailableError("bfloat16 needs compute capability 8.0: use --precision 16-mixed")
    (first, *_, last), expected = losses(device, precision), losses("cpu", "32-true")[0]
    if not abs(first - expected) < TOLERANCE[precision]:
        raise ArithmeticError(f"expected loss {expected:.4f} as in float32 on the CPU, got {first:.4f}")
    if not last < first:
        raise ArithmeticError(f"expected a loss below {first:.4f} after five steps, got {last:.4f}")
    return f"loss {first:.4f}, {last:.4f} after five steps"


def compare_processes(device: str) -> str:
    """Train an epoch in one process and in two; the weights must move alike."""
    if device == "mps" or (device == "cuda" and torch.cuda.device_count() < 2):
        raise NotAvailableError("this needs two GPUs")
    recipe = SMALL.changed({"device": device, "optimizer": "sgd", "learning_rate": 0.01, "timeout": 60.0})
    start_fabric(recipe)  # sets the seed
    start = dict(build.build_model(recipe).named_parameters())
    with tempfile.TemporaryDirectory() as folder:
        runs = [Run.create(Path(folder, str(number)), recipe.changed({"devices": number})) for number in (1, 2)]
        resume(runs[0].folder, progress=False)
        run_command("train", "--resume", str(runs[1].folder))
        one, two = (run.load_best()["model"] for run in runs)
    moved = math.hypot(*((one[name] - start[name]).norm().item() for name in start))
    difference = math.hypot(*((one[name] - two[name]).norm().item() for name in start)) / moved
    if not difference < 0.1:
        raise ArithmeticError(f"expected weights that move as in one process, got a difference of {difference:.0%}")
    return f"weights move as in one process within {difference:.1%}"


def run_command(*arguments: str) -> None:
    """Run a command of proxygml, which ends with this process."""
    command = [sys.executable, "-m", "proxygml", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, errors = process.communicate(timeout=180)
        finally:
            process.terminate()
    if process.returncode:
        raise ChildProcessError(errors.strip().split("\n")[-1] or f"exit code {process.returncode}")


def photos(folder: Path) -> ImageList:
    """64 times one photo of the size of CUB's, with smooth areas and noise, in 8 classes."""
    size = (500, 375)
    smooth, noise = Image.effect_noise((32, 24), 100).resize(size), Image.effect_noise(size, 20)
    Image.blend(smooth, noise, 0.3).convert("RGB").save(folder / "photo.jpg", quality=90)
    return ImageList(["photo.jpg"] * 64, np.arange(64) % 8, tuple("abcdefgh"), root=folder)


def images_per_second(step: Callable[[], object], images: int) -> float:
    """The speed of a step, without its first run."""
    step()
    started, steps = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < SECONDS:
        step()
        steps += 1
    return steps * images / seconds


@cache
def loader_speed() -> float:
    """Images per second that one process decodes and crops."""
    with tempfile.TemporaryDirectory() as folder:
        crops = build.training_crops(RESNET, photos(Path(folder)), epoch=0)
        return images_per_second(lambda: [crops[index] for index in range(8)], 8)


def describe_loader() -> str:
    return f"one worker crops {loader_speed():.3g} images/s of 500 x 375 pixels to 224 x 224"


def describe_speed(device: str, precision: str) -> str:
    """Speed of training a ResNet-50, and whether the loader keeps up with it."""
    changes = {"device": device, "precision": precision} | ({"batch_size": 4} if device == "cpu" else {})
    recipe, cores = RESNET.changed(changes), os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        loop, images, labels = start_training(recipe, photos(Path(folder)))
    network = images_per_second(lambda: loop.train_step(images, labels)[0].item(), recipe.batch_size)
    workers = math.ceil(network / loader_speed())
    limit = f"the network is the limit, with --workers {workers} or more"
    if workers > cores:
        limit = f"the loader is the limit: {workers} workers would keep up, there are {cores} cores; see --cache"
    return f"training takes {network:.3g} images/s; {limit}"
