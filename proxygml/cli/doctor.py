"""proxygml doctor: what works on this machine, how fast it is, and a remedy for what does not work."""

import importlib
import platform
import sys
from collections.abc import Iterator

from proxygml.display import output
from proxygml.files import one_line

LIBRARIES = {  # module: package
    "torch": "torch",
    "lightning_fabric": "lightning-fabric",
    "faiss": "faiss-cpu",
    "numpy": "numpy",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
}


def doctor(json: bool = False) -> None:
    """Check this machine in about a minute: libraries, weights, devices, several processes, and speed.

    Every line says ok, not available or failed, with a remedy; the exit code is 1 if something failed.

    Args:
        json: Print the lines as JSON.
    """
    findings = []
    for check, status, detail in examine():
        findings.append({"check": check, "status": status, "detail": detail})
        if not json:
            output.print(f"{status:15s}{check}: {detail}")
    if json:
        output.print_json(data=findings)
    if any(finding["status"] == "failed" for finding in findings):
        sys.exit(1)


def examine() -> Iterator[tuple[str, str, str]]:
    """Name, status and detail of every check; only the libraries if one of them cannot be imported."""
    yield "python", "ok", platform.python_version()
    complete = True
    for name, package in LIBRARIES.items():
        try:
            yield name, "ok", importlib.import_module(name).__version__
        except Exception as error:  # broken builds raise many types
            complete = False
            yield name, "failed", f"{one_line(error)}: pip install --force-reinstall {package}"
    if complete:
        from proxygml.training.checks import run_checks

        yield from run_checks()
