"""The benchmarks run, in their quick modes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import faults, report, scaling

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("methods --quick", ["| proxygml |", "| softtriple |"]),
        ("loss --quick --only 0", ["dense equations", "SoftTriple (PML)", "products alone"]),
        ("evaluation --quick --dry", ["faiss: recall@1 to @1000", "PML: recall@1, MAP@R", "half of them alone"]),
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
    assert len(found["trials"]) >= 100
    assert {trial["fault"] for trial in found["trials"]} == faults.FAULTS.keys()
    assert not [trial for trial in found["trials"] if trial["lost"] or trial["unclear"]]


def test_the_pages_on_performance_and_scaling_are_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert report.PAGE.read_text() == report.page(), "python -m benchmarks.report writes it"
    assert scaling.PAGE.read_text() == scaling.page(), "python -m benchmarks.report writes it"
