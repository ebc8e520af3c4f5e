"""Model folders: the trained network of a run with all that it needs elsewhere, written and opened."""

import json
import shutil
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from proxygml.backbones.transformers import CONFIG_FILES
from proxygml.display import Progress, no_progress
from proxygml.export import onnx as onnx_export
from proxygml.export.card import model_card
from proxygml.files import atomic_write, one_line, parse_json, require_file, with_checksum
from proxygml.training.build import BACKBONE_CONFIG
from proxygml.training.recipe import Recipe
from proxygml.training.run import EXPORTED, WEIGHTS, Run
from proxygml.training.summary import PICTURES
from proxygml.version import __version__

FORMAT = 1  # of the folder: higher if this version could not read it
ONNX_FILES = ("model.onnx", "embed.py", "decoding.py", "LICENSE-scripts")
PREPARATION = (
    "rotate the image upright according to its EXIF orientation",
    "convert it to 8-bit RGB, with transparency on white",
    "crop the center square with a side of crop_fraction times the shorter side",
    "resize it to image_size x image_size: bilinear with antialiasing (Pillow's BILINEAR)",
    "pass it as uint8, channels first; the network itself normalizes and orders the channels",
)


def write_folder(
    run: Run,
    network: nn.Module,
    out: Path,
    *,
    onnx: bool = False,
    license: str | None = None,
    data: str | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Write the trained network of a run, which is on the CPU, to a folder; returns its preprocessing.json.

    `onnx` adds the network as ONNX, compared on the run's images, which are in `data`. Nothing is written when
    anything is wrong.
    """
    if out.exists() and not (out.is_dir() and ((out / EXPORTED).exists() or not any(out.iterdir()))):
        raise ValueError(f"expected a new or empty folder, or an earlier export, got {out}")
    if onnx:
        onnx_export.require_libraries()
    recipe = portable(run.recipe)
    scores = _portable_scores(run)
    settings: dict[str, Any] = {
        "format": FORMAT,
        "proxygml": __version__,
        "model": run.model_id,
        "image_size": recipe.test_side,
        "crop_fraction": recipe.test_crop,
        "preparation": PREPARATION,
        "embedding_dim": recipe.embedding_dim,
        "unit_length": getattr(network, "normalize", False),
    }
    with ExitStack() as stack:

        def write(name: str) -> Path:
            return stack.enter_context(atomic_write(out / name))

        settings_draft = write(EXPORTED)  # the last that gets its name
        if onnx:
            settings |= onnx_export.write_onnx(run, network, write(ONNX_FILES[0]), data, progress)
        shutil.copyfile(run.folder / WEIGHTS, write(WEIGHTS))
        write("recipe.json").write_text(recipe.to_json())
        if scores:
            write("scores.json").write_text(json.dumps(with_checksum(scores), indent=2) + "\n")
        pictures = [name for name in PICTURES if (run.folder / name).is_file()]
        for name in pictures:
            shutil.copyfile(run.folder / name, write(name))
        config = getattr(network.trunk, "config_folder", None)  # of an hf: backbone
        for name in CONFIG_FILES:
            if isinstance(config, Path) and (config / name).is_file():
                shutil.copyfile(config / name, write(f"{BACKBONE_CONFIG}/{name}"))
        card = model_card(recipe, settings, scores, pictures, license)
        write("README.md").write_text(card, encoding="utf-8")
        settings_draft.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if onnx:
        onnx_export.copy_scripts(out)
        (out / ONNX_FILES[-1]).write_text(metadata.distribution("proxygml").read_text("licenses/LICENSE") or "MIT\n")
    written = {*pictures, *(ONNX_FILES if onnx else ()), *(("scores.json",) if scores else ())}
    for name in {*PICTURES, *ONNX_FILES, "scores.json"} - written:  # of an earlier export
        (out / name).unlink(missing_ok=True)
    return settings


def open_folder(folder: Path) -> Run:
    """The recipe, weights and scores of a model folder, as those of a run without images and log."""
    path = folder / EXPORTED
    try:
        settings = parse_json(require_file(path).read_bytes())
        version, number = str(settings["proxygml"]), int(settings["format"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({one_line(error)}): export the model again") from error
    newer = ValueError(f"{folder} is of proxygml {version}, which {__version__} cannot read: upgrade proxygml")
    if number > FORMAT:
        raise newer
    try:
        Run.open(folder).recipe  # noqa: B018  # of another version, it may have other settings
    except ValueError as error:
        if version == __version__:
            raise
        raise newer from error
    return Run.open(folder)


def portable(recipe: Recipe) -> Recipe:
    """The recipe without the paths of this machine."""
    changes: dict[str, object] = {"data": None, "cache": None}
    if recipe.weights is not None:
        changes["weights"] = Path(recipe.weights).name
    if recipe.backbone.startswith("hf:/"):
        changes["backbone"] = f"hf:{Path(recipe.backbone).name}"
    return recipe.changed(changes)


def _portable_scores(run: Run) -> dict:
    """The scores of a run, without the command that made them; empty if it has not finished."""
    if not (run.folder / "scores.json").exists():
        return {}
    scores = run.scores
    made_by = {name: value for name, value in scores.get("made_by", {}).items() if name != "command"}
    return scores | {"made_by": made_by}
