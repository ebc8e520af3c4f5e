"""Runs on a cluster, with stand-ins for the commands of SLURM, and runs in processes of this machine."""

import os
import time
from pathlib import Path

import pytest
import torch

from proxygml.cli import main
from proxygml.paper.executors import Executor, finished, on_slurm
from proxygml.paper.settings import SETTINGS
from proxygml.training.recipe import Recipe

pytestmark = pytest.mark.slow

STAND_INS = {  # for a cluster of one machine, on which the jobs of an array run one after another
    "sbatch": """
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
export SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
(sleep 1; for i in $(seq 0 $last); do SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$i bash "$1"; done) > /dev/null 2>&1 &
echo Submitted batch job 7""",
    "srun": """
while [[ $1 == --* ]]; do if [[ $1 == --unbuffered ]]; then shift; else shift 2; fi; done
exec "$@" """,
    "sacct": """
echo 'JobID|State|NodeList'
for i in 0 1 2; do echo "7_$i|RUNNING|here"; done""",
    "scancel": """
echo "$@" >> "$CANCELLED" """,
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for SLURM's commands; the file in which they keep what was canceled."""
    (tmp_path / "bin").mkdir()
    for name, script in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CANCELLED", str(tmp_path / "canceled"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path / "canceled"


def score(recipe: Recipe, folder: Path) -> dict:
    if recipe.seed == 1:
        raise ValueError("this seed is refused")
    return {"product": recipe.seed * recipe.epochs, "folder": str(folder)}


def seeds(count: int) -> dict[str, Recipe]:
    return {f"run {seed}": SETTINGS["glyphs"].recipe.changed({"seed": seed}) for seed in range(count)}


def test_slurm_jobs_return_results_or_errors(slurm: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    recipes, outcomes = seeds(3), {}
    runs = finished(recipes, score, work=tmp_path / "work", executor=Executor("slurm"), progress=lambda *_: None)
    with pytest.raises(ValueError, match="1 of 3 runs failed, first proxygml with seed 1: this seed is refused"):
        outcomes.update(runs)
    assert {name: run["product"] for name, run in outcomes.items()} == {
        "run 0": 0,
        "run 2": 2 * recipes["run 2"].epochs,
    }
    assert outcomes["run 2"]["folder"] == str((tmp_path / "work/run 2").resolve())
    assert outcomes["run 2"]["made_by"]["executor"] == "slurm"
    assert not slurm.exists()


def test_slurm_jobs_are_canceled_when_the_command_is_stopped(slurm: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    with pytest.raises(KeyboardInterrupt), on_slurm(score, seeds(3), tmp_path / "work"):
        raise KeyboardInterrupt
    assert slurm.read_text().split() == ["7_0", "7_1", "7_2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cost", "--executor", "slurm"], "cost is measured on one machine: leave out --executor slurm"),
        (["lambda", "--executor", "slurm", "--jobs", "2"], "--jobs is for this machine: slurm starts as many runs"),
        (["lambda", "--executor", "slurm"], "SLURM is not available here"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main.main(["paper", "--quick", *arguments])
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("error: ")
    assert message in said


def test_a_run_whose_process_ends_is_named(tmp_path: Path) -> None:
    runs = finished(seeds(1), end, work=tmp_path, executor=Executor(jobs=1), progress=lambda *_: None)
    with pytest.raises(
        ValueError, match=r"1 of 1 runs failed, first proxygml with seed 0: it ended without a result \("
    ):
        list(runs)


def end(recipe: Recipe, folder: Path) -> dict:
    os._exit(1)


def gpu_of(recipe: Recipe, folder: Path) -> dict:
    """The GPU of a run, once the other process has begun one too."""
    folder.mkdir(parents=True)
    while len(list(folder.parent.iterdir())) < 2:
        time.sleep(0.01)
    return {"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "recipe": [recipe.precision, recipe.workers]}


def test_parallel_runs_have_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Executor().parallel == 2
    executor = Executor(precision="bf16-mixed", workers=3)
    runs = dict(finished(seeds(2), gpu_of, work=tmp_path, executor=executor, progress=lambda *_: None))
    assert sorted(run["gpu"] for run in runs.values()) == ["3", "5"]
    for run in runs.values():
        assert run["recipe"] == ["bf16-mixed", 3]
        assert (run["made_by"]["jobs"], run["made_by"]["precision"]) == (2, "bf16-mixed")
