"""Each experiment, small, from its command to its picture; what it says is checked on made-up scores."""

import json
from pathlib import Path

import pytest

from proxygml import losses
from proxygml.cli import main
from proxygml.paper import EXPERIMENTS, ablations, comparison, executors, find, methods, running
from proxygml.paper.executors import Executor
from proxygml.paper.rendering import Section
from proxygml.paper.report import report
from proxygml.paper.results import Results, fingerprint, save_runs
from proxygml.paper.settings import QUICK, SETTINGS, base_recipe
from proxygml.training.presets import PRESETS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the experiments run one after another, so that they share runs."""
    return tmp_path_factory.mktemp("paper")


@pytest.fixture(autouse=True)
def tiny_quick(monkeypatch, in_this_process: None) -> None:
    monkeypatch.setitem(QUICK, "epochs", 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "frozen"])  # which needs pretrained weights
def test_quick_form(name: str, folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    rows = ["proxygml", "semihard"] if name == "cost" else list(find(name).rows(SETTINGS["glyphs"].recipe))
    main.main(["paper", name, "--quick", "--only", *rows])  # the comparison trains every method already
    runs = json.loads((folder / "runs/quick" / name / "glyphs.json").read_text())
    assert {run["row"] for run in runs} == set(rows)
    assert len({run["row"] for run in runs}) == len(runs)
    for ending, begins in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("md", b"| "), ("csv", b""), ("tex", b"\\begin")):
        content = (folder / "runs/quick" / name / f"glyphs.{ending}").read_bytes()
        assert content.startswith(begins)
        assert len(content) > 100
    left_behind = [path.name for path in (folder / "runs/quick").rglob("*") if path.is_file()]
    assert {one for one in left_behind if not one.startswith("glyphs.")} == {".lock"}


@pytest.mark.slow
def test_a_repeated_command_makes_nothing_again(folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    main.main(["paper", "ratio", "--quick"])
    before = {path: path.read_bytes() for path in (folder / "runs/quick/ratio").iterdir()}
    monkeypatch.setattr(executors, "_new_pool", None)  # running anything fails
    main.main(["paper", "ratio", "--quick"])
    main.main(["paper", "ratio", "--quick", "--render"])
    assert {path: path.read_bytes() for path in (folder / "runs/quick/ratio").iterdir()} == before


@pytest.mark.slow
def test_report_is_complete_and_stable(folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("proxygml.paper.report.BRIEF", ())
    main.main(["paper", "ratio", "--quick"])
    text = report(folder / "runs/quick", quick=True)
    assert text == report(folder / "runs/quick", quick=True)
    for name in EXPERIMENTS:
        assert f"\n## {name}\n" in text
    assert "| r = 0.05 is better than r = 1 | one seed cannot tell" in text


@pytest.mark.parametrize("option", ["--report", "--render"])
def test_the_page_of_results_is_written_from_results(option: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("results", "docs"):
        (tmp_path / folder).mkdir()
    main.main(["paper", option])
    assert capsys.readouterr().out == "docs/results.md\n"
    assert (tmp_path / "docs/results.md").read_text() == report(tmp_path / "results")


def test_run_of_another_recipe_is_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs/quick/modules/glyphs.json"
    save_runs(path, [{"row": "8 all three", "seed": 0, "fingerprint": "another", "scores": {"recall@1": 1.0}}])
    before = path.read_bytes()
    with pytest.raises(SystemExit):
        main.main(["paper", "modules", "--quick"])
    (line,) = " ".join(capsys.readouterr().err.split()).split("error: ")[1:]
    assert line.startswith(
        "runs/quick/modules/glyphs.json has a run of '8 all three', seed 0, that another recipe made"
    )
    assert path.read_bytes() == before


class TestRows:
    def test_the_eight_rows_of_table_1_are_all_different(self) -> None:
        rows = ablations.module_rows(PRESETS["paper-cars"][1])
        assert len({fingerprint(recipe) for recipe in rows.values()}) == 8
        full = rows["8 all three"]
        assert (full.positive_mask, full.mask_softmax, full.proxy_weight) == (True, True, 0.3)
        none = rows["1 none"]
        assert (none.positive_mask, none.mask_softmax, none.proxy_weight) == (False, False, 0.0)

    def test_table_2_has_every_loss_and_three_dimensions_of_ours(self) -> None:
        rows = comparison.rows(PRESETS["paper-cub"][1])
        assert {recipe.loss for recipe in rows.values()} == set(losses.METHODS)
        assert [rows[name].embedding_dim for name in comparison.OURS] == [64, 384, 512]

    @pytest.mark.parametrize("dataset", SETTINGS)
    def test_the_other_methods_are_run_as_like_fair_runs_them(self, dataset: str) -> None:
        base = base_recipe(dataset, None if dataset == "glyphs" else "ROOT", quick=False)
        like = "sop" if dataset == "omniglot-sop" else base.dataset  # whose epsilon and proxy rate it has
        for loss in losses.METHODS.keys() - {"proxygml"}:
            assert comparison.alike(base, loss) == base.changed(methods.settings(loss, "fair", like))

    def test_experiments_share_runs(self) -> None:
        base = SETTINGS["glyphs"].recipe
        full = fingerprint(ablations.module_rows(base)["8 all three"])
        assert full == fingerprint(comparison.rows(base)["proxygml"])
        assert full == fingerprint(find("proxies").rows(base)["N 12, r 0.05"])
        assert full == fingerprint(find("lambda").rows(base)["lambda 0.3"])


def made_up(name: str, scores: dict[str, float]) -> Results:
    """Two seeds of every row of an experiment, half of it where nothing is said."""
    rows = find(name).rows(SETTINGS["glyphs"].recipe)
    runs = []
    for row in rows:
        for seed in (0, 1):
            same = dict.fromkeys(("recall@1", "recall@2", "recall@4"), scores.get(row, 0.5) + seed / 128)
            runs.append({"row": row, "seed": seed, "scores": {**same, "nmi": 0.5}})
    return Results.of(runs, rows)


@pytest.mark.slow
def test_a_half_finished_experiment_is_shown_as_far_as_it_is(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    main.main(["paper", "ratio", "--quick"])
    runs = running.load_runs(folder / "runs/quick/ratio/glyphs.json")
    save_runs(tmp_path / "ratio/glyphs.json", [*runs[:3], runs[3] | {"fingerprint": "of another recipe"}])
    text = report(tmp_path, quick=True)
    assert "\n| ratio | glyphs | 3 | 0 | - | 5 | " in text or "\n| ratio | glyphs | 3 | 0 | 0.0 | 5 | " in text
    assert len(Section("ratio", "glyphs", "paper", tmp_path, quick=True).table.rows) == 3


def test_only_some_rows(tmp_path: Path, monkeypatch) -> None:
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        running, "run_missing", lambda name, dataset, jobs, *_, **__: asked.append([job.row for job in jobs])
    )
    where = {"results": tmp_path, "work": tmp_path / "work", "executor": Executor(), "quick": True}
    running.run_experiment("comparison", "glyphs", None, seeds=[0], only=("proxygml", "ms"), progress=print, **where)
    assert asked == [["ms", "proxygml"]]

    rows = find("comparison").recipes(base_recipe("glyphs", None, quick=True), "fair")
    made_by = {"commit": "c", "machine": "m"}
    runs = [
        {"row": row, "seed": seed, "fingerprint": "tuned", "made_by": made_by}
        | {"scores": dict.fromkeys(("recall@1", "recall@2", "recall@4", "nmi"), score + seed / 100)}
        for row, score in (("ms", 0.5), ("proxygml", 0.6))
        for seed in (0, 1)
    ]
    save_runs(tmp_path / "comparison/glyphs-fair.json", runs)
    same = {"row": "ms", "of": fingerprint(rows["ms"]), "seconds": 1800}
    tried = [same | {"settings": {}, "map_at_r": 0.3}, same | {"settings": {"learning_rate": 2.0}, "map_at_r": 0.4}]
    save_runs(tmp_path / "tuning/glyphs.json", [*tried, same | {"of": "another", "map_at_r": 0.9}])
    Section("comparison", "glyphs", "fair", tmp_path, quick=True).render()
    written = (tmp_path / "comparison/glyphs-fair.md").read_text()
    assert "chosen on held-out training classes, in 1.0 hours" in written
    assert "- ms, of 2 trials: learning_rate x 2\n" in written
    monkeypatch.setattr("proxygml.paper.report.BRIEF", ())
    text = report(tmp_path, quick=True)
    assert "| comparison | glyphs, fair protocol | 4 | 0,1 | - | 12 | c |" in text  # 12 rows of the paper have no run
    assert "| ProxyGML is better than ms * at 512 dimensions | holds (+10.0 ± 0.0) | holds (+10.0 ± 0.0) |\n" in text
    assert "| the paper's claims | on its own photos | glyphs, fair protocol |" in text
    assert "| ProxyGML is better than the other methods (Table 2) | open | 1 / 0 / 0 (1 / 0 / 0) |" in text


@pytest.mark.parametrize(("name", "compares"), [("convergence", True), ("comparison", False)])
@pytest.mark.slow
def test_times_of_different_machines_do_not_compare(name: str, compares: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("proxygml.paper.report.BRIEF", ())
    rows = find(name).recipes(base_recipe("glyphs", None, quick=True))
    made_by = {"commit": "c", "machine": "m", "torch": "2.13", "jobs": 2}
    same = {
        "seed": 0,
        "scores": dict.fromkeys(("recall@1", "recall@2", "recall@4", "nmi"), 0.5),
        "curve": [{"epoch": 1, "seconds": 2.0, "recall@1": 0.5}],
        "made_by": made_by,
    }
    runs = [{"row": row, "fingerprint": fingerprint(recipe), **same} for row, recipe in rows.items()]
    save_runs(tmp_path / name / "glyphs.json", runs)
    assert "do not compare" not in report(tmp_path, quick=True)
    made_elsewhere, made_before = made_by | {"machine": "n"}, {"commit": "c", "machine": "m", "torch": "2.13"}
    mixed = [runs[0] | {"made_by": made_elsewhere}, runs[1] | {"made_by": made_before}, *runs[2:]]
    save_runs(tmp_path / name / "glyphs.json", mixed)
    _, remarks = Section(name, "glyphs", "paper", tmp_path, quick=True).render()
    said = "Seconds do not compare: these runs were made in different ways (machine m and n; jobs 2 and unknown)."
    assert (said in remarks) == compares
    assert (f"\n\n{said}\n\n" in report(tmp_path, quick=True)) == compares


@pytest.mark.slow
def test_failed_run_leaves_the_others(tmp_path: Path) -> None:
    base = SETTINGS["glyphs"].recipe.changed({"classes": 20, "epochs": 1, "embedding_dim": 8, "test": False})
    base = base.changed({"held_out": 0.0, "tested_epochs": (1,), "baselines": False, "ratio": 0.5})
    rows = {"overflows": base.changed({"learning_rate": 1e30, "embedding_dim": 9}), "learns": base}
    where = {"results": tmp_path, "work": tmp_path / "work", "executor": Executor(jobs=2), "progress": lambda *_: None}
    with pytest.raises(ValueError, match=r"1 of 2 runs failed, first proxygml with seed 0: .*"):
        running.run_missing("modules", "glyphs", running.jobs_of(rows, [0]), **where)
    (run,) = running.load_runs(tmp_path / "modules/glyphs.json")
    assert (run["row"], run["made_by"]["jobs"]) == ("learns", 2)
    assert running.train_or_fail(rows["overflows"].changed({"seed": 1}), tmp_path / "run")["scores"] == {
        "map_at_r": 0.0
    }


class TestClaims:
    def test_a_module_that_harms_is_said_to(self) -> None:
        claims = find("modules").claims(made_up("modules", {"8 all three": 0.6, "7 S^pos, M": 0.7}), "glyphs")
        without = "all three are better than without the"
        assert claims[f"{without} regularizer"]["R@1"] == "**does not hold** (-10.0 ± 0.0)"
        assert claims[f"{without} mask softmax"]["R@1"] == "holds (+10.0 ± 0.0)"
        assert claims[f"{without} mask softmax"]["NMI"] == "no significant difference (+0.0 ± 0.0)"

    def test_the_best_number_of_proxies_is_named(self) -> None:
        claims = ablations.proxies_claims(made_up("proxies", {"N 4, r 0.5": 0.9, "N 12, r 1": 0.8}), "glyphs")
        assert claims["at r = 0.5, N = 12 is best"]["R@1"].startswith("N 4, r 0.5 is: **does not hold** (-40.0")
        assert claims["at r = 1, N = 12 is best"]["R@1"] == "holds (highest mean)"

    def test_claim_on_sop(self) -> None:
        results = made_up("comparison", {"ms": 0.6, "htl": 0.4})
        cars, sop = (comparison.claims(results, dataset) for dataset in ("cars", "sop"))
        better = "ProxyGML is better than {} * at 512 dimensions"
        assert cars[better.format("ms")]["R@1"] == "**does not hold** (-10.0 ± 0.0)"
        assert sop["ProxyGML is comparable to ms *"]["R@1"] == "difference -10.0 ± 0.0"
        assert sop["ProxyGML is comparable to softtriple *"]["R@1"] == "difference 0.0 ± 0.0"
        assert len(sop) == len(cars) == 11
        assert sop[better.format("htl")] == cars[better.format("htl")]
        assert sop[better.format("htl")]["R@1"] == "holds (+10.0 ± 0.0)"
        assert comparison.claims(results, "omniglot-sop") == sop

    def test_a_claim_of_table_2_compares_equal_dimensions(self) -> None:
        results = made_up("comparison", {"proxygml, 64": 0.6, "proxygml, 384": 0.7, "proxygml": 0.8, "proxy-nca": 0.9})
        claims = comparison.claims(results, "cars")
        expected = {"semihard *": (64, +10), "proxy-nca": (64, -30), "hdc *": (384, +20), "ms *": (512, +30)}
        for name, (dimension, difference) in expected.items():
            said = claims[f"ProxyGML is better than {name} at {dimension} dimensions"]["R@1"]
            assert f"({difference:+.1f} ±" in said

    def test_stability_over_n(self) -> None:
        # Of r = 0.05 the scores lie 10 points apart, of r = 0.5 30, of r = 1 as far as of r = 0.05; two seeds each.
        scores = {"N 1, r 0.05": 0.6, "N 1, r 0.5": 0.8, "N 20, r 1": 0.4}
        results = made_up("proxies", scores)
        spread = results.spread([ablations.row_name(number, 0.5) for number in ablations.NUMBERS], "recall@1")
        assert spread == {0: pytest.approx(30), 1: pytest.approx(30)}
        claims = ablations.proxies_claims(results, "cars-head")
        assert claims["r = 0.05 is more stable over N than r = 0.5"]["R@1"] == "holds (+20.0 ± 0.0)"
        assert claims["r = 0.05 is more stable over N than r = 1"]["R@1"].startswith("no significant difference")

    def test_table_2_keeps_ours_and_quoted_apart(self) -> None:
        results = made_up("comparison", {"ms": 0.75})
        table = comparison.table(results, "cars")
        assert table.columns[:2] == ("method", "NMI")
        row = next(row for row in table.rows if row[0].startswith("semihard"))
        assert row[1:] == ("50.0 ± 0.0", *["50.4 ± 5.0"] * 3, "53.4", "51.5", "63.8", "73.5", "64")
        assert [name.startswith("quoted") for name in table.columns] == [False] * 5 + [True] * 5


def test_unknown_experiment_or_dataset(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["tables"], "expected an experiment, got 'tables'"),
        (["modules", "--dataset", "imagenet"], "expected a dataset, got 'imagenet'"),
        (["modules", "--dataset", "cars"], "cars needs its folder: --data ROOT"),
        (["modules", "--seeds", "0"], "expected at least one seed, got 0"),
        (["modules", "--only", "4 L^p", "9"], "expected rows among '1 none', '2 S^pos', "),
        (["modules", "--jobs", "-1"], "expected at least one job, got -1"),
        (["modules", "--dataset", "imagenet", "--render"], "expected a dataset, got 'imagenet'"),
        (["frozen"], "frozen needs a pretrained network, which glyphs does not start from"),
        (["comparison", "--protocol", "fair", "--only", "proxygml, r = 1"], "got 'proxygml, r = 1'"),
        (["modules", "--render"], "in results/modules/glyphs.json: make them with proxygml paper modules"),
        (["convergence", "--protocol", "fair"], "convergence does not compare final scores"),
        (["--report"], "no results/ and docs/ here"),
    ):
        with pytest.raises(SystemExit):
            main.main(["paper", *arguments])
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main.main(["paper", "modules", "--dataset", "omniglot", "--data", "nowhere"])
    assert capsys.readouterr().err.startswith("error: no images_background")  # once, before any run


def test_cascade_needs_the_whole_network() -> None:
    whole, head = (
        find("comparison").recipes(base_recipe(f"cub-{what}", "photos", quick=False)) for what in ("small", "head")
    )
    assert whole.keys() - head.keys() == {"hdc"}
