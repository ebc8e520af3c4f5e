"""Libraries that only some uses of this package need."""

import importlib
from types import ModuleType


def library(name: str, *, extra: str, user: str) -> ModuleType:
    """A library that `user` needs; where it is missing, an error names the extra that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(f'{user} needs {name}: pip install "proxygml[{extra}]"', name=name) from None
