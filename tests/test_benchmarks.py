"""The benchmarks run in their quick modes, and the documents contain their results."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import million_images, report, scaling, serve, soak
from benchmarks.profiling import load as load_results
from benchmarks.profiling import time_interleaved
from proxygml.data import load

ROOT = Path(__file__).parents[1]
SMALLER = {"evaluation": {"IMAGES": 20_000, "CLASSES": 3_000}, "search": {"QUERIES": 100, "WIDTH": 32}}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("methods --quick", ["| proxygml |", "| softtriple |"]),
        ("loss --quick --only 0", ["definition", "SoftTriple (PML)", "norms and products"]),
        (
            "evaluation --quick --dry-run --threads 1",
            ["faiss: recall@1 to @1000", "PML: recall@1, MAP@R", "half of them only"],
        ),
        pytest.param(
            "serve --seconds 0.2 --rounds 2 --items 500 --networks EfficientNet-Lite0 --dry-run",
            ["| by vector, 1 thread |", "| EfficientNet-Lite0, 1 thread |"],
            marks=pytest.mark.slow,
        ),
        pytest.param("startup --turns 1 --dry-run", ["import torch", "search RUN --image"], marks=pytest.mark.slow),
        (
            "search --vectors 10500 --dry-run",
            ["random, exact: ", "clustered, hnsw: ", "clustered, ivf-pq: "],
        ),
        ("scaling --quick", ["bytes per step", "10,000"]),
        ("features --quick", ["| ProxyGMLEmbedding |", "| LDA, shrunk |", "LMNN of 32 components"]),
        pytest.param(
            "tasks --quick", ["| synthetic, features |", "| synthetic, ProxyGMLEmbedding |"], marks=pytest.mark.slow
        ),
        pytest.param(
            "ranking --quick",
            ["| rerank 100, k1 ", "| all three |", "| means for augment, once |"],
            marks=pytest.mark.slow,
        ),
        pytest.param("audit --quick", ["| synthetic, 2 % | audit |", "| synthetic, 10 % |"], marks=pytest.mark.slow),
        ("ablation --quick", ["| paper |", "| lambda 0 |", "Recall@1"]),
        (
            "images --photo 96 72 --size 32 --backbone convnet --steps 2 --workers 0",
            ["waiting for images", "files", "cache"],
        ),
    ],
)
def test_benchmark_prints_table(
    command: str, expected: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *arguments = command.split()
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module = importlib.import_module(f"benchmarks.{name}")
    if hasattr(module, "time_interleaved"):
        monkeypatch.setattr(module, "time_interleaved", lambda calls, *_, **__: time_interleaved(calls, 0, 2, 2))
    for constant, value in SMALLER.get(name, {}).items():
        monkeypatch.setattr(module, constant, value)
    module.main()
    output = capfd.readouterr().out
    for text in expected:
        assert text in output


@pytest.mark.timeout(1500)  # a dozen commands in sequence, on a loaded machine
@pytest.mark.slow
def test_commands_recover_from_faults() -> None:
    command = [sys.executable, "-m", "benchmarks.faults", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 results lost, 0 unclear messages" in done.stdout


def test_pages_match_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert report.PAGE.read_text() == report.page(), "run: python -m benchmarks.report"
    assert scaling.PAGE.read_text() == scaling.page(), "run: python -m benchmarks.report"
    table = serve.serve_table(load_results("serve")["cases"]).to_markdown()
    assert table in Path("docs/service.md").read_text(), f"paste into it:\n{table}"


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", "--quick", "--out", str(tmp_path)])
    soak.main()
    results = json.loads((tmp_path / "soak.json").read_text())
    assert results["training steps"]["done"] == soak.QUICK_STEPS
    assert results["page requests"]["done"] == soak.QUICK_REQUESTS
    for name in ("training steps", "page requests"):
        assert results[name]["mb_peak"] < results[name]["mb_first"] + 400  # leaking an image per step takes more
    assert (tmp_path / "soak.png").exists()


def test_leak_is_fitted_after_warm_up() -> None:
    steps = np.arange(10, 1001, 10)
    leaking = [(int(step), 100 + 0.02 * step + 500 * (step < 150)) for step in steps]  # caches of the first steps
    assert soak.summary(leaking)["mb_per_1000"] == pytest.approx(20, abs=1e-3)
    assert soak.summary([(int(step), 100.0) for step in steps])["mb_per_1000"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("form", ["table", "tar"])
def test_training_starts_on_many_images(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(million_images, "PHOTOS", 200)
    monkeypatch.setattr(million_images, "STEPS", 2)
    (tmp_path / "data").mkdir()
    data = getattr(million_images, {"table": "make_table", "tar": "make_tars"}[form])(tmp_path / "data", 500)
    splits = load(form, data)
    assert sum(map(len, splits)) == 500
    assert sum(len(images.class_names) for images in splits) == million_images.CLASSES
    million_images.start_training(form, str(data), str(tmp_path / "run"), time.time())
    measured = json.loads(capsys.readouterr().out)
    assert {"listed_s", "step_1_s", "step_1_cpu_s", "step_1_mb", "step_2_s", "peak_mb"} <= measured.keys()
    assert 0 <= measured["listed_s"] <= measured["step_1_s"] <= measured["step_2_s"]
