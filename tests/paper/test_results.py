"""What runs say together: means, intervals and differences, and how they are kept in results/."""

import json
import math
import os
from pathlib import Path

import pytest
from scipy import stats

from proxygml.paper.results import (
    Range,
    Results,
    fingerprint,
    known_runs,
    load_runs,
    results_file,
    save_runs,
    without_paths,
)
from proxygml.training.presets import GLYPHS


def run(row: str, seed: int, recall: float, nmi: float = 0.5) -> dict:
    return {"row": row, "seed": seed, "scores": {"recall@1": recall, "nmi": nmi}}


@pytest.fixture
def results() -> Results:
    better = [run("better", seed, 0.8 + 0.01 * seed) for seed in range(3)]
    worse = [run("worse", seed, 0.7 + 0.01 * seed) for seed in range(3)]
    return Results.of([*worse, *better, run("alone", 0, 0.9)], ["better", "worse", "absent", "alone"])


def test_order_of_rows(results: Results) -> None:
    assert list(results.rows) == ["better", "worse", "alone"]


def test_the_interval_is_students(results: Results) -> None:
    mean, half_width = results.range("better", "recall@1")
    low, high = stats.ttest_1samp([80, 81, 82], 0).confidence_interval(0.95)
    assert (mean, half_width) == (pytest.approx(81), pytest.approx((high - low) / 2))
    assert str(results.range("better", "recall@1")) == "81.0 ± 2.5"


def test_one_seed_has_no_interval(results: Results) -> None:
    assert str(results.range("alone", "recall@1")) == "90.0"
    assert math.isnan(results.range("alone", "recall@1").half_width)
    assert results.verdict("alone", "better").startswith("one seed cannot tell")


def test_differences_are_paired_by_seed(results: Results) -> None:
    assert results.difference("better", "worse", "recall@1") == Range(pytest.approx(10), pytest.approx(0, abs=1e-9))
    assert results.verdict("better", "worse") == "holds (+10.0 ± 0.0)"
    assert results.verdict("worse", "better") == "**does not hold** (-10.0 ± 0.0)"


def test_interval_with_zero_is_not_significant() -> None:
    runs = [run("one", 0, 0.8), run("one", 1, 0.7), run("other", 0, 0.7), run("other", 1, 0.79)]
    assert Results.of(runs, ["one", "other"]).verdict("one", "other").startswith("no significant difference")


def test_fingerprint_follows_what_changes_scores() -> None:
    same = GLYPHS.changed({"data": "elsewhere", "workers": 3, "device": "cpu"})
    assert fingerprint(GLYPHS) == fingerprint(same)
    assert fingerprint(GLYPHS) != fingerprint(GLYPHS.changed({"seed": 1}))
    assert fingerprint(GLYPHS) != fingerprint(GLYPHS.changed({"ratio": 0.5}))


def test_the_fingerprint_follows_what_a_loss_brings_itself(monkeypatch) -> None:
    recipe = GLYPHS.changed({"loss": "softtriple"})
    assert fingerprint(recipe) == fingerprint(recipe.changed({"proxy_learning_rate": 3e-4}))
    before = fingerprint(recipe)
    monkeypatch.setattr("proxygml.losses.pml.softtriple", lambda a, b, *, la=21.0: None)
    assert fingerprint.__wrapped__(recipe) != before  # not the cached one


def test_runs_are_found_by_fingerprint(tmp_path: Path) -> None:
    save_runs(results_file(tmp_path, "modules", "glyphs"), [run("a", 0, 0.5) | {"fingerprint": "one"}])
    save_runs(results_file(tmp_path, "ratio", "glyphs"), [run("b", 0, 0.6) | {"fingerprint": "two"}])
    save_runs(results_file(tmp_path, "ratio", "omniglot"), [run("c", 0, 0.7) | {"fingerprint": "three"}])
    assert {run["fingerprint"] for run in known_runs(tmp_path, "glyphs")} == {"one", "two"}


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "glyphs.json")
    with pytest.raises(ValueError, match=r"glyphs\.json is damaged .*is a pipe or device.*restore it, or move it away"):
        load_runs(tmp_path / "glyphs.json")


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = results_file(tmp_path, "modules", "glyphs")
    save_runs(path, [run("a", 0, 0.5)])
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"glyphs\.json is damaged .*restore it"):
        load_runs(path)
    assert load_runs(tmp_path / "absent.json") == []


def test_an_altered_score_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "glyphs.json"
    runs = [run(row, 0, recall) | {"fingerprint": row} for row, recall in (("a", 0.75), ("b", 0.5))]
    save_runs(path, runs)
    assert load_runs(path) == runs
    content = path.read_text()
    for altered in (content.replace("0.75", "0.74"), content.replace('"checksum"', '"checksun"', 1)):
        path.write_text(altered)
        with pytest.raises(ValueError, match=r"glyphs\.json is damaged .*restore it, or move it away"):
            load_runs(path)
    path.write_text(json.dumps(runs))  # as earlier versions wrote it
    assert load_runs(path) == runs


def test_commands_keep_no_machine_paths() -> None:
    command = "proxygml paper queue --data '/a folder/b' --results /r --work=/w --jobs 2"
    assert without_paths(command) == "proxygml paper queue --data ROOT --jobs 2"
