"""proxygml export."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from proxygml.cli.display import drawn_progress, output


def export(
    run: Annotated[Path, tyro.conf.Positional],
    out: Path,
    format: Literal["onnx", "safetensors", "torch-export"] = "onnx",
) -> None:
    """Write the trained network of a run for use elsewhere, with a JSON beside it that says how to prepare images.

    The file is compared with PyTorch on test images of the run before it gets its name; one that differs by more than
    0.0001 is not kept. `proxygml embed --model model.onnx` needs no torch.

    Args:
        run: Folder of a trained run.
        out: The file to write (.onnx, .safetensors or .pt2), or a folder for it.
        format: ONNX with its weights, the weights alone, or a program of torch.export.
    """
    from proxygml.export.write import export_run
    from proxygml.training.run import Run

    with drawn_progress() as progress:
        path, said = export_run(Run.open(run), out, format, progress=progress)
    output.print(
        f"{path}, described in {path.name}.json: largest difference from PyTorch {said.largest_difference:.1e} "
        f"on {said.compared_with}",
        highlight=False,
        markup=False,
    )
