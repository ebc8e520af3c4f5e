"""Who may import whom, and what `import proxygml` may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import proxygml

PACKAGE = Path(proxygml.__file__).parent

# room -> the rooms it may import; files, locks, loading, gathering, extras and version may be imported by all
MAY_IMPORT = {
    "version": set(),
    "files": set(),
    "gathering": set(),
    "extras": set(),
    "locks": set(),
    "loading": set(),
    "launching": set(),
    "recipes": {"losses"},
    "datasets": set(),
    "images": set(),
    "backbones": set(),
    "cache": {"datasets", "images"},
    "losses": set(),
    "optimizers": set(),
    "sampling": set(),
    "heads": {"losses"},
    "estimator": {"evaluation", "heads", "losses"},
    "shards": set(),
    "evaluation": set(),
    "embeddings": {"images"},
    "index": {"embeddings"},
    "pictures": {"evaluation"},
    "runs": {"recipes"},
    "ingredients": {
        *("recipes", "datasets", "images", "cache", "backbones", "losses", "optimizers", "sampling", "launching"),
    },
    "judging": {"recipes", "datasets", "images", "evaluation", "embeddings", "ingredients"},
    "learning": {"recipes", "datasets", "images", "backbones", "losses", "monitor", "shards", "ingredients"},
    "monitor": set(),
    "features": {"recipes", "datasets", "images", "ingredients"},
    "sessions": {
        *("features", "recipes", "datasets", "cache", "evaluation", "pictures", "runs", "launching"),
        *("ingredients", "judging", "learning", "shards"),
    },
    "training": {"recipes", "datasets", "backbones", "embeddings", "runs", "ingredients", "judging", "sessions"},
    "exported": {"recipes", "datasets", "images", "embeddings"},
    "export": {"recipes", "backbones", "runs", "ingredients", "training", "exported"},
    "galleries": {"datasets", "embeddings", "index", "runs", "ingredients", "sessions", "training"},
    "browser": {
        *("recipes", "datasets", "images", "losses", "embeddings", "index", "runs", "ingredients", "training"),
    },
    "methods": set(),
    "experiments": {
        "recipes",
        "datasets",
        "backbones",
        "losses",
        "methods",
        "runs",
        "ingredients",
        "sessions",
        "training",
    },
    "display": {"losses", "recipes", "experiments"},
    "commands": None,  # anything
    "cli": {"commands", "display", "launching"},
    "__main__": {"cli", "launching"},
    "__init__": {"estimator", "losses", "optimizers"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """The rooms of the package that a file imports, anywhere in it."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return {module.split(".")[1] for module in modules if module.startswith("proxygml.")}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_the_design_allows(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"{room} is a new room: say in MAY_IMPORT what it may import"
    allowed = MAY_IMPORT[room]
    if allowed is not None:
        unexpected = (
            imported_rooms(path) - allowed - {room, "files", "locks", "loading", "gathering", "extras", "version"}
        )
        assert not unexpected, f"{room} imports {unexpected}"


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
