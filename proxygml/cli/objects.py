"""Objects of your own on the command line, as package.module:name.

A name is imported only if the user has typed it: a recipe may come from a stranger.
"""

import importlib
import os
import sys
from typing import Any

from proxygml.files import did_you_mean


def import_object(name: str) -> Any:
    """What package.module:name names; modules in the current folder are found too."""
    module_name, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not module_name.startswith(str(error.name)):  # the module exists and lacks something itself
            raise
        raise ValueError(
            f"no module {module_name} is installed or in the current folder: expected MODULE:NAME"
        ) from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module_name} has no {path}{did_you_mean(part, vars(found))}")
        found = getattr(found, part)
    return found
