"""The order of imports, and the cost of `import proxygml`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import proxygml
from proxygml.training.run import Run

PACKAGE = Path(proxygml.__file__).parent

# Packages and modules in the order of the data flow: each imports only earlier ones.
ORDER = [
    *(
        "version",
        "files",
        "optional",
        "memory",
        "display",
        "precision",
        "distributed",
        "losses",
        "optim",
        "data",
        "backbones",
        "evaluation",
    ),
    *(
        "embeddings",
        "features",
        "retrieval",
        "fonts",
        "plots",
        "training",
        "export",
        "model",
        "vectors",
        "tasks",
        "server",
        "paper",
        "cli",
    ),
    "__main__",
]


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return {module.split(".")[1] for module in modules if module.startswith("proxygml.")}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_data_flow(path: Path) -> None:
    module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if module == "__init__":  # lazy public names
        return
    assert module in ORDER, f"{module} is new: add it to ORDER"
    below = imported_modules(path) & set(ORDER[ORDER.index(module) + 1 :])
    assert not below, f"{module} imports {below}"


def test_files_start_with_a_docstring() -> None:
    folders = (PACKAGE, *(PACKAGE.parent / name for name in ("tests", "benchmarks", "examples", "fuzz")))
    texts = {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    assert not [path for path, text in texts.items() if text and not ast.get_docstring(ast.parse(text))]


TORCH = {"torch", "faiss", "matplotlib", "scipy", "sklearn", "safetensors", "lightning_fabric"}
TRAINING = {
    "lightning_fabric",
    "torchmetrics",
    "transformers",
    "pytorch_metric_learning",
    "matplotlib",
    "scipy",
    "sklearn",
}
LISTS = ("--help", "train --help", "losses", "datasets", "paper")
MISTAKES = ("train glyphs --epoch 2", "search idx", "paper modulse", "embed")


def loaded_by(*commands: str) -> set[str]:
    """The packages that a process has loaded after these commands."""
    code = f"""import contextlib, sys
from proxygml.cli.main import main
for command in {commands}:
    with contextlib.suppress(SystemExit):
        main(command.split())
print(*{{name.split(".")[0] for name in sys.modules}}, *{{"torch._dynamo"}} & sys.modules.keys())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_package_import_is_light() -> None:
    code = "import sys, proxygml; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not (TORCH | {"numpy", "PIL", "rich"}) & set(result.stdout.split())


def test_lists_and_usage_errors_load_no_torch() -> None:
    loaded = loaded_by(*LISTS, *MISTAKES)
    assert "tyro" in loaded
    assert not TORCH & loaded


@pytest.mark.slow
def test_search_loads_nothing_that_only_training_needs(trained_run: Run, tmp_path: Path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "photo.png")
    search = f"search {trained_run.folder} --split test --image {tmp_path / 'photo.png'}"
    loaded_by(search)  # embeds the glyphs, which are drawn in fonts of matplotlib
    loaded = loaded_by(search)
    assert {"torch", "faiss"} <= loaded
    assert not (TRAINING | {"torch._dynamo"}) & loaded


def test_public_names_have_docstrings() -> None:
    for name in set(proxygml.__all__) - {"__version__"}:
        assert getattr(proxygml, name).__doc__, name
    assert set(proxygml.__all__) <= set(dir(proxygml))
