"""A fitted space in a folder: numbers as safetensors, parameters and scores as JSON, nothing that runs."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from proxygml.evaluation import Scores
from proxygml.files import atomic_write, one_line, parse_json, require_file, verify_checksum, with_checksum
from proxygml.version import __version__

NUMBERS, SETTINGS = "space.safetensors", "space.json"
SCHEMA_VERSION = 1


def write_space(folder: Path, parameters: dict[str, Any], fitted: dict[str, Any], features_model: str) -> None:
    """Write the parameters and the fitted attributes of an embedding; `features_model` is the id of its network."""
    arrays = {name: np.array(fitted[name], np.float64, order="C") for name in ("mean_", "components_", "power_")}
    numbers = save(arrays)
    rest = {name: _to_json(value) for name, value in fitted.items() if name not in arrays}
    settings = {
        "schema_version": SCHEMA_VERSION,
        "version": __version__,
        "id": _id(numbers),
        "features_model": features_model,
        "parameters": {name: _to_json(value) for name, value in parameters.items()},
        "fitted": rest,
    }
    with atomic_write(folder / NUMBERS) as draft:
        draft.write_bytes(numbers)
    with atomic_write(folder / SETTINGS) as draft:
        draft.write_text(json.dumps(with_checksum(settings), indent=2) + "\n")


def read_space(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the fitted attributes that `write_space` wrote."""
    settings = read_settings(folder)
    path = folder / NUMBERS
    numbers = require_file(path).read_bytes()
    if _id(numbers) != settings.get("id"):
        raise ValueError(f"{path} is damaged, or not of this {SETTINGS}: fit the space again")
    try:
        fitted = {**load(numbers), **settings["fitted"]}
        fitted["power_"] = float(fitted["power_"])
        fitted["classes_"] = np.array(fitted["classes_"])
        fitted["held_out_scores_"] = {
            name: Scores.from_json(scores) for name, scores in fitted["held_out_scores_"].items()
        }
        if "feature_names_in_" in fitted:
            fitted["feature_names_in_"] = np.array(fitted["feature_names_in_"], object)
        (width,), (_, columns) = fitted["mean_"].shape, fitted["components_"].shape
        if width != columns:
            raise ValueError(f"a mean of {width} features and a matrix of {columns}")
        return dict(settings["parameters"]), fitted
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder} is damaged ({one_line(error)}): fit the space again") from error


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of space.json."""
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"no {SETTINGS} in {folder}: not a fitted space, `proxygml fit` makes one")
    try:
        settings = parse_json(path.read_bytes())
        version = settings["schema_version"]
        if version == SCHEMA_VERSION:
            return verify_checksum(settings)
        written_by = settings["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({one_line(error)}): fit the space again") from error
    raise ValueError(f"{folder} was written by proxygml {written_by}, this is {__version__}: update proxygml")


def _id(numbers: bytes) -> str:
    return hashlib.sha256(numbers).hexdigest()[:16]


def _to_json(value: Any) -> Any:
    """A parameter or fitted attribute as JSON; a random generator as None."""
    if isinstance(value, np.random.RandomState):
        return None
    if isinstance(value, dict):
        return {name: _to_json(each) for name, each in value.items()}
    if isinstance(value, Scores):
        return value.to_json()
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
