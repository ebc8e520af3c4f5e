"""Code blocks and examples run, links work, every option and public name is documented."""

import importlib
import importlib.util
import inspect
import json
import re
import runpy
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.preprocessing import FunctionTransformer

import proxygml
from proxygml.cli.main import main
from proxygml.display import no_progress
from proxygml.losses import METHODS
from proxygml.paper import EXPERIMENTS
from proxygml.paper.report import report, update_readme
from proxygml.server.connections import Server, address, listen
from proxygml.server.opening import open_items
from proxygml.server.server import create_app
from proxygml.training.presets import PRESETS
from proxygml.training.run import Run

ROOT = Path(__file__).parents[1]
TOKEN = "a-token-of-our-own"
RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (page, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
]
COMMANDS = [
    "train",
    "embed",
    "evaluate",
    "export",
    "fit",
    "transform",
    "search",
    "classify",
    "calibrate",
    "cluster",
    "audit",
    "browse",
    "serve",
    "datasets",
    "losses",
]
COMMANDS += ["paper", "doctor"]
COMMANDS += [f"index {action}" for action in ("build", "add", "remove", "relocate", "info")]


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text()


def help_of(command: str, capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


@pytest.fixture
def service(trained_run: Run, tmp_path: Path) -> Iterator[str]:
    """The address of `proxygml serve` for an index of a run."""
    main(["index", "build", str(trained_run.folder), "--split", "test", "--out", str(tmp_path / "index")])
    items, ready = open_items(str(tmp_path / "index"), progress=no_progress), threading.Event()
    with listen("127.0.0.1", 0) as listening:
        server = Server(create_app(items, token=TOKEN), ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        assert ready.wait(30)
        yield address(listening)
        server.should_exit = True
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[f"{p.name}-{n}" for n, (p, _) in enumerate(BLOCKS)])
def test_code_block_runs(
    page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path
    if page.name == "export.md":
        (folder / "small").symlink_to(request.getfixturevalue("exported_folder"))
        for name in ("photo.jpg", "other.jpg", "PHOTOS/owl/1.jpg"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (50, 40)).save(folder / name)
    if page.name == "reference.md":
        (folder / "runs").mkdir()
        (folder / "runs" / "small").symlink_to(request.getfixturevalue("trained_run").folder)
    if page.name == "service.md":
        Image.new("RGB", (50, 40), "red").save(folder / "photo.jpg")
        code = code.replace("http://127.0.0.1:8766", request.getfixturevalue("service"))
        monkeypatch.setenv("PROXYGML_TOKEN", TOKEN)
    if page.name == "features.md":
        rng = np.random.default_rng(0)
        np.savez(folder / "features.npz", vectors=rng.normal(size=(240, 16)), labels=np.arange(240) % 12)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    exec(compile(code, page.name, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_features_block_prints_the_scores_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    stored = ROOT.parent / "shared" / "data" / "cub_efficientnet_lite0.npz"
    if not stored.exists():
        pytest.skip(f"no {stored}")
    (code,) = [code for page, code in BLOCKS if page.name == "features.md" and "evaluate(" in code]
    (tmp_path / "features.npz").symlink_to(stored)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(proxygml, "ProxyGMLEmbedding", lambda **_: FunctionTransformer())  # raw features twice
    exec(code, {})
    assert capsys.readouterr().out.splitlines()[0] == "features: Recall@1 48.4 %"
    assert "| raw features | 48.4 |" in text_of("features")


SMALL = {"million_classes.py": ("--classes", "3000", "--links", "50", "--steps", "20")}
LIBRARIES = {  # optional libraries that examples need
    "with_lightning.py": "lightning",
    "with_open_metric_learning.py": "oml",
    "with_sentence_transformers.py": "sentence_transformers",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_runs(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    library = LIBRARIES.get(script.name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed, see docs/libraries.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *SMALL.get(script.name, ())])
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # of other libraries
        runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    if script.name.startswith("with_"):
        lines = "".join(line for line in printed.splitlines() if line.startswith("Recall@1"))
        before, after = (float(number) for number in re.findall(r"\d\.\d\d", lines))
        assert after > before + 0.2, f"{script.name} did not learn: {printed}"


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="notebooks need nbclient and ipykernel")
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "clear the outputs before you commit"
    nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert any("image/png" in output.get("data", ()) for cell in cells for output in cell.outputs)
    (hits,) = (output.text for output in cells[-1].outputs)
    assert hits.startswith("Hit(path=")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_is_documented(capsys: pytest.CaptureFixture) -> None:
    commands = re.search(r"\{([a-z,]+)\}", help_of("", capsys)).group(1).split(",")
    assert sorted(commands) == sorted({command.split()[0] for command in COMMANDS})
    for command in commands:
        assert f"## proxygml {command}" in text_of("cli")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command: str, capsys: pytest.CaptureFixture) -> None:
    (section,) = re.findall(rf"## proxygml {command.split()[0]}\n(.*?)(?=\n## |\Z)", text_of("cli"), flags=re.DOTALL)
    options = set(re.findall(r"^│ (?:-\w INT, )?--([a-z-]+)", help_of(command, capsys), flags=re.MULTILINE))
    documented = set(re.findall(r"--(?:no-)?([a-z-]+)", section))
    assert options - {"help"} <= documented


def test_every_preset_is_documented() -> None:
    assert not [preset for preset in PRESETS if f"`{preset}`" not in text_of("cli")]


def test_every_public_name_is_in_the_reference() -> None:
    reference = set(re.findall(r"^::: (\S+)", text_of("reference"), flags=re.MULTILINE))
    assert {f"proxygml.{name}" for name in proxygml.__all__ if name != "__version__"} <= reference


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(), flags=re.MULTILINE)) <= targets, page.name


def test_every_loss_and_its_settings_are_documented() -> None:
    sections = dict(re.findall(r"### ([a-z-]+)\n(.*?)(?=\n##|\Z)", text_of("methods"), flags=re.DOTALL))
    assert sections.keys() == METHODS.keys()
    for name, method in METHODS.items():
        module, _, maker = method.maker.rpartition(".")
        signature = inspect.signature(getattr(importlib.import_module(f"proxygml.losses.{module}"), maker))
        settings = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        for setting in settings if name != "proxygml" else ():
            assert f"`{setting.name}={setting.default}`" in sections[name], f"{name}: {setting}"
        assert ("**" in sections[name]) == bool(method.caveat), f"{name}: {method.caveat}"


def test_every_experiment_is_documented() -> None:
    assert not [name for name in EXPERIMENTS if f"`proxygml paper {name}`" not in text_of("paper")]


@pytest.mark.parametrize(
    ("module", "results"),
    [
        ("benchmarks.ablation", "ablation/cub"),
        ("benchmarks.methods", "methods/glyphs"),
        ("benchmarks.faults.__main__", "faults"),
        ("fuzz.__main__", "fuzz"),
    ],
)
def test_generated_page_is_current(module: str, results: str) -> None:
    rows = json.loads((RESULTS / f"{results}.json").read_text())
    assert importlib.import_module(module).page(rows) == (RESULTS / f"{results}.md").read_text()


def test_tables_in_documents_are_current() -> None:
    names = ("bench/features", "faults", "bench/tasks", "bench/audit", "bench/nested", "bench/ranking")
    stored = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names]
    features, faults, tasks, audit, nested, ranking = stored
    assert importlib.import_module("benchmarks.features").table(features) in text_of("features")
    assert faults["summary"] in text_of("faults")
    for part, (_, table) in importlib.import_module("benchmarks.tasks").PARTS.items():
        assert table(tasks[part]) in text_of("tasks")
    for table in ("lists_table", "mended_table"):
        assert getattr(importlib.import_module("benchmarks.audit"), table)(audit) in text_of("tasks")
    assert importlib.import_module("benchmarks.nested").table(nested) in text_of("search")
    for table, part in (("gain_table", "gain"), ("cost_table", "cost")):
        assert getattr(importlib.import_module("benchmarks.ranking"), table)(ranking[part]) in text_of("search")


def test_scores_of_photo_presets_are_current() -> None:
    frontier = importlib.import_module("benchmarks.frontier")
    readme = (ROOT / "README.md").read_text()
    assert frontier.tables() in text_of("photos"), "run: python -m benchmarks.frontier --report"
    assert readme == frontier.update_readme(readme), "run: python -m benchmarks.frontier --report"


@pytest.mark.slow
def test_results_page_is_current() -> None:
    readme = (ROOT / "README.md").read_text()
    assert text_of("results") == report(RESULTS), "run: proxygml paper --report"
    assert readme == update_readme(readme, RESULTS), "run: proxygml paper --report"


def test_scores_in_text_match_results() -> None:
    readme, tutorial = (ROOT / "README.md").read_text(), text_of("tutorial")
    glyphs = json.loads((RESULTS / "glyphs" / "scores.json").read_text())
    metrics = ["recall@1", "recall@2", "recall@4", "recall@8", "map_at_r", "r_precision", "nmi"]
    rows = {"raw pixels": "pixels", "untrained network": "untrained", "trained with proxygml": "trained"}
    for name, row in rows.items():
        (line,) = re.findall(rf"^{name} (.*)$", tutorial, flags=re.MULTILINE)
        gain = f"{100 * (glyphs[row]['recall@1'] - glyphs['untrained']['recall@1']):+.1f}".replace("+0.0", "")
        if row == "trained":
            gain += " ({:+.1f} to {:+.1f})".format(*(100 * end for end in glyphs["gain"][1:]))
        assert line.split() == [*(f"{100 * glyphs[row][metric]:.1f}" for metric in metrics), *gain.split()]
        if row in ("untrained", "trained"):
            assert f"{100 * glyphs[row]['recall@1']:.1f} %" in readme
