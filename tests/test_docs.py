"""The README, the pages in docs/ and the examples do what they say."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxygml.embeddings import embed
from proxygml.images import Crops
from proxygml.recipes import PRESETS
from proxygml.runs import Run
from proxygml.training import load_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


PYTHON = [(page, code) for page in PAGES for code in blocks(page, "python")]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[f"{p.name}-{n}" for n, (p, _) in enumerate(PYTHON)])
def test_a_block_of_python_runs(page: Path, code: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("exported_files") if page.name == "export.md" else tmp_path
    if page.name == "features.md":
        random = np.random.default_rng(0)
        np.savez(folder / "features.npz", vectors=random.normal(size=(240, 16)), labels=np.arange(240) % 12)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr


def test_plain_onnxruntime_gives_the_embedding_that_pytorch_gives(
    exported_files: Path, trained_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [code for page, code in PYTHON if "onnxruntime.InferenceSession" in code]
    assert "proxygml" not in code
    for name in ("model.onnx", "photo.jpg"):
        (tmp_path / name).write_bytes((exported_files / name).read_bytes())
    said = json.loads((exported_files / "model.onnx.json").read_text())
    (tmp_path / "model.onnx.json").write_text(json.dumps(said | {"crop_share": 0.8}))
    monkeypatch.chdir(tmp_path)
    names: dict[str, np.ndarray] = {}
    exec(code, names)
    crops = Crops(lambda _: Image.open("photo.jpg"), np.zeros(1, int), size=32, test_crop=0.8)
    (expected,) = embed(load_model(trained_run), crops, np.array(["photo.jpg"])).vectors
    np.testing.assert_allclose(names["embeddings"][0], expected, atol=1e-4)


def test_the_readme_shows_the_loss_in_python() -> None:
    assert any("ProxyGMLLoss(" in code for page, code in PYTHON if page.name == "README.md")


SMALLER = {"million_classes.py": ("--classes", "3000", "--links", "50", "--steps", "20")}
LIBRARIES = {  # which examples need, and which may not be there
    "with_lightning.py": "lightning",
    "with_open_metric_learning.py": "oml",
    "with_sentence_transformers.py": "sentence_transformers",
}


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    library = LIBRARIES.get(script.name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed, see docs/libraries.md")
    command = [sys.executable, script, *SMALLER.get(script.name, ())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if script.name.startswith("with_"):
        said = "".join(line for line in done.stdout.splitlines() if line.startswith("Recall@1"))
        before, after = (float(number) for number in re.findall(r"\d\.\d\d", said))
        assert after > before + 0.2, f"{script.name} has not learned: {done.stdout}"


def test_the_notebook_runs_and_holds_no_outputs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run with nbclient and ipykernel")
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "clear the outputs before you commit"
    nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert any("image/png" in output.get("data", ()) for cell in code for output in cell.outputs)
    (found,) = (output.text for output in code[-1].outputs)
    assert found.startswith("Hit(path=")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_and_preset_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    done = subprocess.run([sys.executable, "-m", "proxygml", "--help"], capture_output=True, text=True, check=True)
    commands = re.search(r"\{([a-z,]+)\}", done.stdout).group(1).split(",")
    assert {"train", "embed", "evaluate"} <= set(commands)
    for command in commands:
        assert f"## proxygml {command}" in page, f"docs/cli.md does not document {command}"
    for preset in PRESETS:
        assert f"`{preset}`" in page, f"docs/cli.md does not document the preset {preset}"


def test_every_setting_of_a_recipe_is_documented() -> None:
    from dataclasses import fields

    from proxygml.recipes import Recipe

    page = (ROOT / "docs" / "cli.md").read_text()
    missing = [f.name for f in fields(Recipe) if f"`--{f.name.replace('_', '-')}`" not in page]
    assert not missing, f"docs/cli.md does not document {missing}"


def test_the_commands_that_make_offers_are_the_ones_the_readme_names() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()))
    assert {"run", "test"} <= named <= targets


def test_the_scores_in_the_readme_are_those_in_results() -> None:
    readme = (ROOT / "README.md").read_text()
    scores = json.loads((ROOT / "results" / "glyphs" / "scores.json").read_text())
    metrics = ["recall@1", "recall@2", "recall@4", "recall@8", "map_at_r", "r_precision", "nmi"]
    names = {"raw pixels": "pixels", "untrained network": "untrained", "trained with proxygml": "trained"}
    for name, row in names.items():
        (line,) = [line for line in readme.splitlines() if line.startswith(name)]
        assert line.removeprefix(name).split() == [f"{100 * scores[row][metric]:.1f}" for metric in metrics]
    assert scores["trained"]["recall@1"] >= 0.9


def test_every_loss_and_each_of_its_settings_is_documented() -> None:
    import importlib
    import inspect

    from proxygml.losses import METHODS

    page = (ROOT / "docs" / "methods.md").read_text()
    sections = dict(re.findall(r"### ([a-z-]+)\n(.*?)(?=\n##|\Z)", page, flags=re.DOTALL))
    assert sections.keys() == METHODS.keys()
    for name, method in METHODS.items():
        module, _, maker = method.maker.rpartition(".")
        signature = inspect.signature(getattr(importlib.import_module(f"proxygml.losses.{module}"), maker))
        settings = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        for setting in settings if name != "proxygml" else ():
            assert f"`{setting.name}={setting.default}`" in sections[name], f"{name}: {setting}"
        assert ("**" in sections[name]) == bool(method.doubt), f"{name}: {method.doubt}"


@pytest.mark.parametrize(
    ("command", "results", "page"),
    [
        ("benchmarks.choices", "choices/cub", "paper"),
        ("benchmarks.methods", "methods/glyphs", "methods"),
        ("benchmarks.features", "bench/features", "features"),
        ("benchmarks.faults", "faults", "faults"),
        ("fuzz.__main__", "fuzz", "security"),
    ],
)
def test_a_table_in_the_documents_is_what_its_command_renders_from_results(
    command: str, results: str, page: str
) -> None:
    import importlib

    module = importlib.import_module(command)
    found = json.loads((ROOT / "results" / f"{results}.json").read_text())
    assert module.table(found) in (ROOT / "docs" / f"{page}.md").read_text()


def test_the_scores_on_photos_in_the_readme_are_those_in_results() -> None:
    readme = (ROOT / "README.md").read_text()
    scores = json.loads((ROOT / "results" / "cub-small" / "scores.json").read_text())
    metrics = ["recall@1", "recall@2", "recall@4", "recall@8", "map_at_r", "nmi"]
    for name, row in {"frozen backbone": "untrained", "after training": "trained"}.items():
        shown = " | ".join(f"{100 * scores[row][metric]:.1f}" for metric in metrics)
        assert f"| {name} | {shown} |" in readme
    assert f"in {scores['seconds'] / 60:.0f} minutes" in readme
    assert scores["trained"]["recall@1"] - scores["untrained"]["recall@1"] >= 0.06


def test_the_page_of_results_is_what_results_say() -> None:
    from proxygml.experiments.rendering import report

    assert (ROOT / "docs" / "results.md").read_text() == report(ROOT / "results"), "run: proxygml paper --report"


def test_every_experiment_has_its_command_in_the_page_of_the_paper() -> None:
    from proxygml.experiments import EXPERIMENTS

    page = (ROOT / "docs" / "paper.md").read_text()
    for name in EXPERIMENTS:
        assert f"`proxygml paper {name}`" in page


def test_every_loss_has_learned_something() -> None:
    from proxygml.losses import METHODS

    found = json.loads((ROOT / "results" / "methods" / "glyphs.json").read_text())
    assert [entry["name"] for entry in found if entry["recall@1"] > entry["untrained"]] == [e["name"] for e in found]
    assert {entry["name"] for entry in found} == METHODS.keys()
