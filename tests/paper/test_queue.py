"""The queue: its order, what it shares between experiments, and that nothing is lost whatever happens to it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import proxygml.paper
from proxygml import files
from proxygml.cli import main
from proxygml.files import UnwritableError
from proxygml.paper import Entry, queue, settings
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import fingerprint, load_runs, save_runs
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from tests.paper.conftest import run_in_this_process

ON = "omniglot-sop"
WORK = Path("runs/quick")
GO_ON = "When that is fixed, the same command goes on"
EPOCHS = 3
ROWS = {  # ratios of an experiment's rows
    "first": {"a": 0.5, "b": 1.0},
    "second": {"b": 1.0, "c": 0.2},  # wants scores after every epoch
    "third": {"b again": 1.0},
}


def experiment(name: str) -> ModuleType:
    def rows(base: Recipe) -> dict[str, Recipe]:
        return {row: base.changed({"ratio": ratio}) for row, ratio in ROWS[name].items()}

    module = ModuleType(f"proxygml.paper.{name}")
    module.EXPERIMENT = Experiment(rows, None, None, every_epoch=name == "second")
    return module


def shrink(patch: pytest.MonkeyPatch) -> None:
    """From now on the queue is of three small experiments, whose runs need no processes."""
    run_in_this_process(patch)
    for name in ROWS:
        patch.setitem(sys.modules, f"proxygml.paper.{name}", experiment(name))
        patch.setitem(proxygml.paper.EXPERIMENTS, name, Entry(f"{name}.EXPERIMENT", "nowhere", name))
    patch.setattr(queue, "TIERS", ((("first", ON),), (("second", ON), ("third", ON))))
    patch.setitem(settings.QUICK, "epochs", EPOCHS)


def write_omniglot(path: Path) -> None:
    """30 made-up characters to train on and 30 others to test on, three drawings of each."""
    random, labels, arrays = np.random.default_rng(0), np.repeat(np.arange(30), 3), {}
    for part in ("background", "evaluation"):
        characters = random.integers(0, 256, (30, 28, 28))
        noise = random.normal(0, 60, (90, 28, 28))
        arrays[f"x_{part}"] = np.clip(characters[labels] + noise, 0, 255).astype(np.uint8)
        arrays |= {f"y_{part}": labels, f"names_{part}": np.array([f"{part}/{number}" for number in range(30)])}
    np.savez(path, **arrays)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data and a small queue."""
    monkeypatch.chdir(tmp_path)
    shrink(monkeypatch)
    write_omniglot(tmp_path / "omniglot28.npz")
    return tmp_path


def run_queue(*options: str) -> None:
    main.main(["paper", "queue", "--quick", "--data", ".", *options])


def results(name: str) -> list[dict]:
    return load_runs(WORK / name / f"{ON}.json")


def rows() -> dict[str, list[str]]:
    return {name: [run["row"] for run in results(name)] for name in ROWS}


def refusal(capsys: pytest.CaptureFixture) -> str:
    """What the one line says that the command ends with."""
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in said] == [True], said
    return said[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """What a queue finds that nothing stops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        shrink(patch)
        write_omniglot(Path("omniglot28.npz"))
        run_queue()
        return {name: results(name) for name in ROWS}


class TestThePlan:
    @pytest.mark.slow
    def test_is_the_most_telling_first(self, tmp_path: Path) -> None:
        parts = queue.plan("ROOT", tmp_path)
        assert [part.tier for part in parts] == sorted(part.tier for part in parts)
        head = ["frozen", "modules", "comparison", "ratio", "spread"]
        small = ["frozen", "comparison", "ratio"]
        first = [part.name for part in parts if part.tier == 1]
        heads = [f"{name} on {dataset}" for dataset in ("cars-head", "cub-head") for name in head]
        assert first == heads + [f"{name} on cars-small" for name in small]

    @pytest.mark.slow
    def test_counts_a_run_that_two_experiments_want_once(self, tmp_path: Path) -> None:
        left = {part.name: (len(part.missing), len(part.jobs)) for part in queue.plan("ROOT", tmp_path)}
        assert left["modules on cars-head"] == (40, 40)  # 8 rows, 5 seeds
        # 16 rows without hdc, 3 seeds; those of ProxyGML at 512 are in Table 1 already.
        assert left["comparison on cars-head"] == (42, 45)
        # 8 rows, 3 seeds; r = 0.05, r = 1 and narrowing are in the two tables above.
        assert left["ratio on cars-head"] == (15, 24)
        assert left["comparison on cars-small"] == (48, 48)

    def test_of_a_small_queue(self, here: Path) -> None:
        first, second, third = queue.plan(".", WORK, quick=True)
        assert [(job.row, job.recipe.tested_epochs) for job in first.missing] == [("a", ()), ("b", (1, 2, 3))]
        assert [job.row for job in second.missing] == ["c"]
        assert (third.missing, len(third.jobs)) == ([], 1)

    def test_says_how_long_by_the_runs_that_are_finished(self, here: Path) -> None:
        parts = queue.plan(".", WORK, quick=True)
        assert queue.minutes_left(parts, WORK)[f"first on {ON}"] == 2 * settings.SETTINGS[ON].minutes
        same = {"fingerprint": "x", "seed": 0, "scores": {}}
        kept = [{"row": str(seconds), "seconds": seconds, **same} for seconds in (60.0, 120.0, 600.0)]
        save_runs(WORK / "ratio" / f"{ON}.json", kept)
        assert queue.minutes_left(parts, WORK)[f"first on {ON}"] == pytest.approx(2 * 1.1 * 2)

    def test_is_shown_and_runs_nothing(self, here: Path, capsys: pytest.CaptureFixture) -> None:
        run_queue("--plan")
        said = capsys.readouterr().out
        assert "3 runs left, about 0.1 hours on one core" in said
        assert f"second on {ON}" in said
        assert "1 of 2" in said
        assert not WORK.exists()


@pytest.mark.slow
def test_run_is_made_once_for_all_experiments(whole: dict[str, list[dict]]) -> None:
    assert {name: [run["row"] for run in runs] for name, runs in whole.items()} == {
        "first": ["a", "b"],
        "second": ["b", "c"],
        "third": ["b again"],
    }
    (_, first), (second, _), (third,) = whole.values()
    assert first["curve"] == second["curve"] == third["curve"]  # with their seconds
    assert [point["epoch"] for point in first["curve"]] == [1, 2, 3]
    assert first["settings"]["ratio"] == 1.0
    assert "commit" in first["made_by"]


@pytest.mark.slow
def test_one_run_may_be_asked_for_at_a_time(here: Path, capsys: pytest.CaptureFixture) -> None:
    run_queue("--runs", "1")
    assert rows() == {"first": ["a"], "second": [], "third": []}
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "3 runs left, about 0.1 hours on one core"
    assert said[1].startswith(f"first on {ON}: a, seed 0: recall@1 ")
    assert said[1].endswith("; 2 runs left")


@pytest.mark.slow
def test_runs_option_is_exact(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "TIERS", ((("first", ON), ("third", ON)),))  # the third wants nothing of its own
    run_queue("--runs", "1")
    assert rows() == {"first": ["a"], "second": [], "third": []}


@pytest.mark.slow
def test_a_killed_queue_goes_on(here: Path, whole: dict[str, list[dict]]) -> None:
    command = """
import pytest
from tests.paper.test_queue import run_queue, shrink
shrink(pytest.MonkeyPatch())
run_queue()
"""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([sys.executable, "-c", command], env={**os.environ, "PYTHONPATH": path})
    deadline = time.monotonic() + 240
    while not list(WORK.glob("*/last.pt")):  # the first run has finished an epoch
        assert time.monotonic() < deadline, "no checkpoint after two minutes"
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run_queue()
    for name, runs in whole.items():
        assert [(run["row"], run["scores"]) for run in results(name)] == [(run["row"], run["scores"]) for run in runs]
    assert {path.name for path in WORK.rglob("*") if path.is_file()} == {f"{ON}.json", ".lock"}


def test_two_queues_on_one_folder_are_refused(here: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(files, "LOCK_TIMEOUT", 0)
    with files.locked(WORK), pytest.raises(SystemExit):
        run_queue()
    line = refusal(capsys)
    assert line.startswith(f"error: process {os.getpid()} on ")
    assert line.endswith("is using runs/quick: wait for it, or stop it")
    assert rows() == {"first": [], "second": [], "third": []}


@pytest.mark.slow
def test_missing_data_is_named_before_the_first_run(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/Cars196").mkdir(parents=True)
    for given, message in (
        ([], "the queue needs a folder with Cars196, CUB_200_2011 and omniglot28.npz: --data ROOT"),
        (["--data", "nowhere"], "no Cars196 and no CUB_200_2011 and no omniglot28.npz in nowhere: the queue needs all"),
        (
            ["--data", "data"],
            "no CUB_200_2011 and no omniglot28.npz in data: the queue needs all, see docs/datasets.md",
        ),
    ):
        with pytest.raises(SystemExit):
            main.main(["paper", "queue", *given])
        assert refusal(capsys).startswith(f"error: {message}")
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_folder_that_holds_something_else_is_named(here: Path, capsys: pytest.CaptureFixture) -> None:
    (here / "omniglot28.npz").write_bytes(b"no zip")
    with pytest.raises(SystemExit):
        run_queue()
    line = refusal(capsys)
    assert line.count("cannot read omniglot28.npz as an npz file, fetch it again") == 2  # by both parts that need it
    assert "Traceback" not in line


def test_a_run_of_another_recipe_stays_where_it_is(here: Path, capsys: pytest.CaptureFixture) -> None:
    path = WORK / "second" / f"{ON}.json"
    save_runs(path, [{"row": "c", "seed": 0, "fingerprint": "another", "scores": {"recall@1": 1.0}}])
    before = path.read_bytes()
    with pytest.raises(SystemExit):
        run_queue()
    assert refusal(capsys).startswith(
        f"error: {path} has a run of 'c', seed 0, that another recipe made: move the file"
    )
    assert path.read_bytes() == before
    assert rows() == {"first": [], "second": ["c"], "third": []}


@pytest.mark.slow
def test_full_disk(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def full(path: Path, runs: list[dict]) -> None:
        raise UnwritableError(f"could not write {path}: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("proxygml.paper.results.save_runs", full)
        with pytest.raises(SystemExit):
            run_queue("--runs", "1")
    assert refusal(capsys) == f"error: could not write runs/quick/first/{ON}.json: No space left on device. " + GO_ON
    (folder,) = (path.parent for path in WORK.glob("*/scores.json"))
    log = Run.open(folder).log
    assert len(log) == EPOCHS
    run_queue("--runs", "1")
    (run,) = results("first")
    assert run["seconds"] == round(sum(entry["training_seconds"] for entry in log), 1)


@pytest.mark.slow
def test_failed_run_leaves_the_others(here: Path, capsys: pytest.CaptureFixture) -> None:
    first, *_ = queue.plan(".", WORK, quick=True)
    in_its_way = WORK / fingerprint(first.missing[1].recipe)
    WORK.mkdir(parents=True)
    in_its_way.write_text("a file where the folder of b should be")
    with pytest.raises(SystemExit):
        run_queue()
    assert refusal(capsys).startswith(
        f"error: the queue had failures: first on {ON}: 1 of 2 runs failed, first proxygml"
    )
    assert rows() == {"first": ["a"], "second": ["c"], "third": []}
    in_its_way.unlink()
    run_queue()
    assert rows() == {"first": ["a", "b"], "second": ["c", "b"], "third": ["b again"]}
