"""The benchmarks run, in their quick modes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import faults, million_images, report, scaling, soak
from proxygml import datasets

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("methods --quick", ["| proxygml |", "| softtriple |"]),
        ("loss --quick --only 0", ["definition", "SoftTriple (PML)", "norms and products"]),
        (
            "evaluation --quick --dry --threads 1",
            ["faiss: recall@1 to @1000", "PML: recall@1, MAP@R", "half of them alone"],
        ),
        (
            "search --vectors 10500 --dry",
            ["random, exact: ", "in groups, hnsw: ", "in groups, ivf-pq: "],
        ),
        ("scaling --quick", ["bytes of a step", "10,000"]),
        ("features --quick", ["| ProxyGMLEmbedding |", "| LDA, shrunk |", "LMNN of 32 components"]),
        ("choices --quick", ["as in the paper", "lambda 0", "Recall@1"]),
        (
            "images --photo 96 72 --size 32 --backbone convnet --steps 2 --workers 0",
            ["share of waiting", "files", "cache"],
        ),
    ],
)
def test_a_benchmark_shows_its_table(command: str, shown: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{command}".split()], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for words in shown:
        assert words in done.stdout


@pytest.mark.timeout(1500)  # a dozen commands, one after another, on however loaded a machine
def test_disturbed_commands_say_so_in_a_line_and_end_as_undisturbed_ones() -> None:
    command = [sys.executable, "-m", "benchmarks.faults", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 results lost, 0 ends not said in a line" in done.stdout


def test_no_result_was_lost_in_the_trials_that_were_kept() -> None:
    found = json.loads((ROOT / "results" / "faults.json").read_text())
    assert found["summary"] == faults.summary(found)
    assert not [trial for trial in found["trials"] if trial["lost"] or trial["unclear"]]


def test_the_pages_on_performance_and_scaling_are_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert report.PAGE.read_text() == report.page(), "python -m benchmarks.report writes it"
    assert scaling.PAGE.read_text() == scaling.page(), "python -m benchmarks.report writes it"


def test_a_soak_counts_every_step_and_request_and_memory_stays_within_bounds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["training steps"]["done"] == soak.QUICK_STEPS
    assert found["page requests"]["done"] == soak.QUICK_REQUESTS
    for what in ("training steps", "page requests"):
        assert found[what]["mb_at_most"] < found[what]["mb_at_first"] + 400  # a leak of an image a step would be more
        assert f"{found[what]['done']:,} {what}: " in done.stdout
    assert (tmp_path / "soak.png").exists()


def test_the_slope_of_a_soak_is_that_of_its_settled_part() -> None:
    steps = np.arange(10, 1001, 10)
    leaking = [(int(step), 100 + 0.02 * step + 500 * (step < 150)) for step in steps]  # caches of the first steps went
    assert soak.summary(leaking)["mb_per_thousand"] == pytest.approx(20, abs=1e-3)
    assert soak.summary([(int(step), 100.0) for step in steps])["mb_per_thousand"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("form", ["table", "tar"])
def test_a_list_of_many_images_is_made_as_said_and_training_begins_on_it(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(million_images, "PHOTOS", 200)
    monkeypatch.setattr(million_images, "STEPS", 2)
    (tmp_path / "data").mkdir()
    data = getattr(million_images, {"table": "make_table", "tar": "make_tars"}[form])(tmp_path / "data", 500)
    both = datasets.load(form, data)
    assert sum(map(len, both)) == 500
    assert sum(len(images.class_names) for images in both) == million_images.CLASSES
    million_images.begin(form, str(data), str(tmp_path / "run"), time.time())
    found = json.loads(capsys.readouterr().out)
    assert {"listed_s", "step_1_s", "step_1_cpu_s", "step_1_mb", "step_2_s", "peak_mb"} <= found.keys()
    assert 0 <= found["listed_s"] <= found["step_1_s"] <= found["step_2_s"]
