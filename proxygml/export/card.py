"""The model card of an exported network: README.md with scores, pictures and code that runs."""

from collections.abc import Sequence
from typing import Any

from proxygml.display import in_one_line, score_table
from proxygml.training.recipe import Recipe, is_class_name
from proxygml.training.summary import PICTURES, describe_scores, score_rows

CARD = """\
---
library_name: proxygml
tags: [metric-learning, image-retrieval]
{license_line}---
# {title}

Turns images into vectors of {dim} numbers, trained so that images of the same class are close to each other, also of
classes not seen in training.{unit_length}

## Use
```python
import proxygml

model = proxygml.load({arguments})  # the path of this folder
vectors = model.encode(["photo.jpg", "other.jpg"])  # (2, {dim})
print(vectors @ vectors.T)
```
{more}{onnx}
## Scores
{scores}
## Training
{training} Settings: `recipe.json`. Preparation of images: `preprocessing.json`.{curves}

## License
Of the weights: {license}. Terms of the training images and of pretrained weights may apply too.

Written by proxygml {version}.
"""
OWN = "`network` is a `{}`, built as for training.\n"
COMMANDS = """
```
proxygml index build PHOTOS --out my-index --run .
proxygml search my-index --image photo.jpg
```
"""
ONNX = """
Without proxygml and PyTorch:
```
pip install numpy pillow onnxruntime
python embed.py photo.jpg                        # prints the vector: {dim} numbers
python embed.py photos/*.jpg --out vectors.npz   # vectors, paths, labels (folder names)
```
`model.onnx`: input `images`, uint8 (B, 3, {size}, {size}), RGB; output `embeddings`, float32 (B, {dim}). Compared with
PyTorch on {compared_with}: the largest difference is {difference:.1e}. `decoding.py` decodes as in training; other
decoders give slightly different vectors. `LICENSE-scripts` is that of the scripts.
"""


def model_card(
    recipe: Recipe, settings: dict[str, Any], scores: dict, pictures: Sequence[str], license: str | None
) -> str:
    """The text of README.md."""
    name = f"{recipe.backbone}, trained with {recipe.loss} on {recipe.dataset}"
    dim, own = recipe.embedding_dim, is_class_name(recipe.backbone)
    unit = " Vectors have unit length: a dot product is a cosine." if settings["unit_length"] else ""
    start = f", starting from the weights {recipe.weights}" if recipe.weights else ""
    crops = " Only the last layer was trained." if recipe.feature_crops else ""
    card = CARD.format(
        license_line=f"license: {license}\n" if license else "",
        title=name,
        dim=dim,
        unit_length=unit,
        arguments='".", network=network' if own else '"."',
        more=OWN.format(recipe.backbone) if own else COMMANDS,
        onnx=ONNX.format(
            dim=dim,
            size=recipe.test_side,
            compared_with=settings["compared_with"],
            difference=settings["largest_difference"],
        )
        if "compared_with" in settings
        else "",
        scores=_scores(recipe, scores, pictures),
        training=f"{name}, {recipe.epochs} {'epoch' if recipe.epochs == 1 else 'epochs'}{start}.{crops}",
        curves="\n\n" + _picture("curves.png") if "curves.png" in pictures else "",
        license=license or "none stated",
        version=settings["proxygml"],
    )
    return "\n".join(in_one_line(line) for line in card.split("\n"))


def _scores(recipe: Recipe, scores: dict, pictures: Sequence[str]) -> str:
    rows, baseline = score_rows(recipe, scores)
    if not rows:
        return "The network was not scored.\n"
    columns, cells = score_table(rows, heading="%", baseline=baseline)
    table = [columns, ["---"] * len(columns), *(row + [""] * (len(columns) - len(row)) for row in cells)]
    text = "\n".join(f"| {' | '.join(row)} |" for row in table) + f"\n\n{describe_scores(recipe, scores)}.\n"
    if "remark" in scores:
        text += f"\n\\* {scores['remark']}\n"
    return text + "".join(f"\n{_picture(name)}\n" for name in pictures if name != "curves.png")


def _picture(name: str) -> str:
    return f"![{PICTURES[name].capitalize()}]({name})"
