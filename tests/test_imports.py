"""Who may import whom, and what `import proxygml` may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import proxygml

PACKAGE = Path(proxygml.__file__).parent

# The packages and modules in the order of the data flow: each may import only those above it.
ORDER = [
    *("version", "files", "optional", "distributed", "losses", "optim", "data", "backbones", "evaluation"),
    *("embeddings", "features", "retrieval", "plots", "training", "export", "model", "server", "paper", "cli"),
    "__main__",
]


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """The modules of the package that a file imports, anywhere in it."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return {module.split(".")[1] for module in modules if module.startswith("proxygml.")}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_stands_above_it(path: Path) -> None:
    module = module_of(path)
    if module == "__init__":  # the public names, each loaded at its first use
        return
    assert module in ORDER, f"{module} is new: give it a place in ORDER"
    below = {name for name in imported_modules(path) if name in ORDER[ORDER.index(module) + 1 :]}
    assert not below, f"{module} imports {below}"


def test_every_file_says_its_purpose_first() -> None:
    folders = (PACKAGE, *(PACKAGE.parent / name for name in ("tests", "benchmarks", "examples", "fuzz")))
    written = {path: path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))}
    silent = [path for path, text in written.items() if text and not ast.get_docstring(ast.parse(text))]
    assert not silent, "they do not say what they are for"


def test_importing_the_package_loads_torch_and_nothing_heavy_beside_it() -> None:
    heavy = ["faiss", "matplotlib", "sklearn", "pytorch_metric_learning", "lightning_fabric", "PIL", "rich", "tyro"]
    code = f"import sys, proxygml; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_is_there_and_documented() -> None:
    for name in proxygml.__all__:
        thing = getattr(proxygml, name)
        assert name.startswith("__") or thing.__doc__
        assert name in dir(proxygml)
