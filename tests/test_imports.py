"""The order of imports, and the cost of `import proxygml`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import proxygml

PACKAGE = Path(proxygml.__file__).parent

# Packages and modules in the order of the data flow: each imports only earlier ones.
ORDER = [
    *(
        "version",
        "files",
        "optional",
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
        "plots",
        "training",
        "export",
        "model",
        "vectors",
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


def test_package_import_is_light() -> None:
    heavy = ["torch", "faiss", "matplotlib", "sklearn", "pytorch_metric_learning", "lightning_fabric", "PIL", "rich"]
    code = f"import sys, proxygml; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_have_docstrings() -> None:
    for name in set(proxygml.__all__) - {"__version__"}:
        assert getattr(proxygml, name).__doc__, name
    assert set(proxygml.__all__) <= set(dir(proxygml))
