"""Trunks from the Hugging Face hub or a folder (`hf:NAME_OR_FOLDER`): ViT, DINOv2, CLIP's image side, ConvNeXt."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from proxygml.backbones.trunk import Trunk
from proxygml.extras import library
from proxygml.files import one_line, parse_json


class Architecture(NamedTuple):
    """Class in transformers, and what of its output is the image: the class token, the pooled vector or the maps."""

    network: str
    output: str


ARCHITECTURES = {  # by the model_type in config.json
    "vit": Architecture("ViTModel", "token"),
    "dinov2": Architecture("Dinov2Model", "token"),
    "dinov2_with_registers": Architecture("Dinov2WithRegistersModel", "token"),
    "clip": Architecture("CLIPVisionModel", "pooled"),  # the class token after CLIP's last layer norm
    "clip_vision_model": Architecture("CLIPVisionModel", "pooled"),
    "convnext": Architecture("ConvNextModel", "maps"),
    "convnextv2": Architecture("ConvNextV2Model", "maps"),
}
FILES = ["config.json", "preprocessor_config.json", "model*.safetensors", "model.safetensors.index.json"]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Hub(Trunk):
    """Images (B, 3, H, W) in RGB -> maps (B, channels, h, w) from ConvNeXt, (B, channels, 1, 1) from the others.

    The network is one stage, since its insides differ between releases of transformers; `network` is the module of
    transformers itself, for whoever wants to freeze a part of it. Without `pretrained` it starts from random weights.
    """

    stages = ("network",)
    classifier = ()
    weights_from = "weights of hf: backbones are the safetensors files of the hub model or of the folder"

    def __init__(self, name: str, pretrained: bool = True) -> None:
        super().__init__()
        transformers = _transformers()
        name = name.removeprefix("hf:")
        folder = fetch(name)
        model_type = _read(folder / "config.json").get("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"hf:{name} is of type {model_type!r}: expected one of {', '.join(ARCHITECTURES)}")
        architecture = ARCHITECTURES[model_type]
        network_class = getattr(transformers, architecture.network)
        config = network_class.config_class.from_pretrained(folder)
        if pretrained:
            self.network = _load(network_class, config, folder, name)
        else:
            self.network = network_class(config)
        _drop_unused(self.network)
        self.output = architecture.output
        self.channels: int = config.hidden_sizes[-1] if self.output == "maps" else config.hidden_size
        self.stage_channels = {"network": self.channels}
        self.pixel_mean, self.pixel_std = pixel_statistics(folder)
        # ViT and CLIP take other image sizes than their own only when told to interpolate the positions.
        self.interpolates = "interpolate_pos_encoding" in inspect.signature(self.network.forward).parameters

    def stage(self, name: str, maps: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> maps (B, channels, 1, 1), or (B, channels, h, w) from ConvNeXt."""
        (network,) = self.modules_of(name)
        answer = network(maps, interpolate_pos_encoding=True) if self.interpolates else network(maps)
        if self.output == "maps":
            return answer.last_hidden_state
        vectors = answer.pooler_output if self.output == "pooled" else answer.last_hidden_state[:, 0]  # (B, channels)
        return vectors[:, :, None, None]


def fetch(name: str) -> Path:
    """The folder with the model's files: `name` itself if it is one, the hub's copy in the local cache otherwise."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"no config.json in {folder}: give a folder that save_pretrained wrote")
        return folder
    from huggingface_hub import snapshot_download  # comes with transformers

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # no network, no such model, no such name
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"hf:{name} is neither a folder here nor a model that the hub or its local cache gave "
            f"({reason.rstrip('.')}): check the name and the network, or give a folder that save_pretrained wrote"
        ) from None


def pixel_statistics(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the pixels, 0..255, from preprocessor_config.json; ImageNet's where it does not say."""
    path = folder / "preprocessor_config.json"
    settings = _read(path) if path.is_file() else {}
    mean, deviation = settings.get("image_mean") or IMAGENET_MEAN, settings.get("image_std") or IMAGENET_STD
    if settings.get("do_normalize") is False:
        mean, deviation = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if len(mean) != 3 or len(deviation) != 3:
        raise ValueError(f"{path} gives {len(mean)} means and {len(deviation)} deviations: expected three of each")
    return tuple(255 * value for value in mean), tuple(255 * value for value in deviation)


def _transformers() -> ModuleType:
    return library("transformers", extra="hub", user="an hf: backbone")


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({one_line(error)}): fetch it again") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds no settings by name: fetch it again")
    return settings


def _load(network_class: type[Any], config: object, folder: Path, name: str) -> nn.Module:
    if not any(folder.glob("model*.safetensors")):
        raise FileNotFoundError(
            f"no model.safetensors for hf:{name} in {folder}: only safetensors weights are loaded, since other files "
            "can carry code; convert them with save_pretrained"
        )
    index = folder / "model.safetensors.index.json"
    named = _read(index).get("weight_map") if index.is_file() else {}
    strange = [file for file in dict(named or {}).values() if not re.fullmatch(r"[\w.-]+\.safetensors", str(file))]
    if strange:
        raise ValueError(f"{index} names {strange[0]!r}: only safetensors files in the same folder are loaded")
    with _quiet():
        network, report = network_class.from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True
        )
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ValueError(
            f"the weights of hf:{name} lack {len(missing)} of the network's tensors, first {missing[0]}: "
            f"give a model whose weights are those of {network_class.__name__}"
        )
    return network.float()  # some are published in half precision


def _drop_unused(network: nn.Module) -> None:
    """Takes out the parameters that no image reaches: training in several processes waits for every gradient."""
    for module in network.modules():
        for name in ("pooler", "mask_token"):  # the first is ViT's tanh layer, which most checkpoints never trained
            if getattr(module, name, None) is not None:
                setattr(module, name, None)
    if type(network).__name__.startswith("ConvNext"):
        network.layernorm = nn.Identity()  # acts on the pooled vector; here the maps go on


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no table of CLIP's unread text weights; what lacks is raised by `_load`."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
