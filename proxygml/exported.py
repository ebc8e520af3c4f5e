"""An exported network, and what one has to know to run it: model.onnx beside model.onnx.json. Needs no torch."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

import numpy as np

from proxygml.datasets import ImageList
from proxygml.embeddings import Embeddings
from proxygml.extras import library
from proxygml.files import one_line, parse_json
from proxygml.images import Crops
from proxygml.recipes import Recipe
from proxygml.version import __version__

if TYPE_CHECKING:
    import onnxruntime

VERSION = 1  # of the description: counts up when a reader of the one before would go wrong
INPUT, OUTPUT = "images", "embeddings"
PREPARATION = (
    "turn the image upright, as its EXIF orientation says",
    "make it 8-bit RGB, with transparency on white",
    "cut out the centre square whose side is crop_share of the shorter side",
    "resize that to image_size x image_size: bilinear, over all pixels that a smaller one covers (Pillow's BILINEAR)",
    "give it as uint8, channels first; the network itself subtracts means, divides and orders the channels",
)


@dataclass(frozen=True)
class Description:
    """What the JSON beside an exported network says: its file, its input and output, and the run that it is of."""

    format: str  # onnx, safetensors or torch-export
    sha256: str  # of the file
    model: str  # as `Run.mark`
    image_size: int
    crop_share: float
    embedding_dim: int
    unit_length: bool
    compared_with: str  # which images
    largest_difference: float  # of its embeddings of those from PyTorch's, beside vectors of length 1
    recipe: dict
    proxygml: str = __version__
    version: int = VERSION
    input: str = INPUT
    input_type: str = "uint8"
    input_values: str = "0 to 255"
    colours: str = "RGB"
    preparation: tuple[str, ...] = PREPARATION
    output: str = OUTPUT
    output_type: str = "float32"

    def to_json(self) -> str:
        """As JSON text that `from_json` reads."""
        shapes = {
            "input_shape": ["batch", 3, self.image_size, self.image_size],
            "output_shape": ["batch", self.embedding_dim],
        }
        return json.dumps(asdict(self) | shapes, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Description":
        """The description that `to_json` wrote; a ValueError says what is wrong with another text."""
        values = parse_json(text)
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object, got {type(values).__name__}")
        if isinstance(values.get("version"), int) and values["version"] > VERSION:
            raise ValueError(
                f"it is of version {values['version']}, written by proxygml {values.get('proxygml')}, and this is "
                f"proxygml {__version__}, which knows version {VERSION}: pip install --upgrade proxygml"
            )
        kinds = {name: get_origin(kind) or kind for name, kind in get_type_hints(cls).items()}
        for name, kind in kinds.items():
            if name not in values:
                raise ValueError(f"it does not say {name}")
            expected: Any = {float: (int, float), tuple: list}.get(kind, kind)
            if not isinstance(values[name], expected) or (isinstance(values[name], bool) and kind is not bool):
                raise ValueError(f"expected {name} as {kind.__name__}, got {values[name]!r}")
        if not (values["image_size"] >= 1 and 0 < values["crop_share"] <= 1):
            raise ValueError(
                f"expected image_size of at least 1 and crop_share above 0 and at most 1, got "
                f"{values['image_size']} and {values['crop_share']}"
            )
        try:
            Recipe().changed(values["recipe"])
        except ValueError as error:
            raise ValueError(f"{error} (written by proxygml {values['proxygml']}, this is {__version__})") from error
        try:
            return cls(**{name: kind(values[name]) for name, kind in kinds.items()})
        except OverflowError as error:
            raise ValueError(f"one of its numbers is too large: {error}") from error


def description_path(path: Path) -> Path:
    """Where the description of an exported network lies: model.onnx.json beside model.onnx."""
    return path.with_name(path.name + ".json")


def read_description(path: Path, expected_format: str) -> Description:
    """What is said of the exported network in a file, once the file is known to be the one that it is said of."""
    path = Path(path)
    beside = description_path(path)
    for file in (path, beside):
        if not file.is_file():
            raise FileNotFoundError(f"no {file}: expected what proxygml export wrote, {path.name} with {beside.name}")
    try:
        description = Description.from_json(beside.read_text(encoding="utf-8"))
    except ValueError as error:  # text that is no JSON too
        raise ValueError(f"{beside} does not describe an exported network: {one_line(error)}") from error
    if description.format != expected_format:
        raise ValueError(f"expected a network exported as {expected_format}, got {path}, which is {description.format}")
    if file_hash(path) != description.sha256:
        raise ValueError(f"{path} is cut short, altered or not the file that {beside.name} describes: export it again")
    return description


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()


def open_session(path: Path) -> "onnxruntime.InferenceSession":
    """An ONNX file in onnxruntime, on the CPU."""
    onnxruntime = library("onnxruntime", extra="export", user="an ONNX file")
    try:
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors share no class of their own
        raise ValueError(f"onnxruntime {onnxruntime.__version__} cannot open {path}: {one_line(error)}") from error


@dataclass(frozen=True)
class OnnxModel:
    """A network that `proxygml export --format onnx` wrote: images uint8 (B, 3, H, W) -> embeddings (B, D)."""

    description: Description
    session: "onnxruntime.InferenceSession"

    @classmethod
    def load(cls, path: Path) -> "OnnxModel":
        """The network in model.onnx, which model.onnx.json describes."""
        said, session = read_description(path, "onnx"), open_session(path)
        size = session.get_inputs()[0].shape[-1]
        if size != said.image_size:
            raise ValueError(
                f"{path} takes images of {size} pixels, and its JSON says {said.image_size}: export it again"
            )
        return cls(said, session)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Images uint8 (B, 3, H, W) in RGB -> embeddings (B, D)."""
        (embeddings,) = self.session.run([OUTPUT], {INPUT: images})
        return embeddings

    def embed(
        self, images: ImageList, *, batch_size: int = 64, progress: Callable[[int, int], None] | None = None
    ) -> Embeddings:
        """The embeddings of images, cut as the network was tested: what its run would make of them."""
        said = self.description
        crops = Crops(images.open, images.labels, size=said.image_size, test_crop=said.crop_share)
        vectors = []
        with ThreadPoolExecutor() as pool:  # Pillow decodes without Python's lock
            for start in range(0, len(crops), batch_size):
                numbers = range(start, min(start + batch_size, len(crops)))
                pixels = np.stack([pixels for pixels, _ in pool.map(crops.__getitem__, numbers)])  # (batch, 3, H, W)
                vectors.append(self(pixels))  # (batch, D)
                if progress is not None:
                    progress(numbers.stop, len(crops))
        paths, names = np.asarray(images.paths), np.asarray(images.class_names)
        return Embeddings(np.concatenate(vectors), images.labels, paths, names, said.model)
