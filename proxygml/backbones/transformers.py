"""Trunks from the Hugging Face hub or a folder (`hf:NAME_OR_FOLDER`): ViT, DINOv2, CLIP, ConvNeXt, ResNet."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from proxygml.backbones.trunk import Trunk
from proxygml.files import one_line, parse_json
from proxygml.optional import library

ARCHITECTURES = {  # by the model_type in config.json: class in transformers, and its output that represents the image
    "vit": ("ViTModel", "token"),
    "dinov2": ("Dinov2Model", "token"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "token"),
    "clip": ("CLIPVisionModel", "pooled"),  # the class token after CLIP's last layer norm
    "clip_vision_model": ("CLIPVisionModel", "pooled"),
    "convnext": ("ConvNextModel", "maps"),
    "convnextv2": ("ConvNextV2Model", "maps"),
    "resnet": ("ResNetModel", "maps"),
}
CONFIG_FILES = ("config.json", "preprocessor_config.json")
FILES = [*CONFIG_FILES, "model*.safetensors", "model.safetensors.index.json"]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class TransformersTrunk(Trunk):
    """Images (B, 3, H, W) in RGB -> feature maps (B, channels, h, w) of ConvNeXt and ResNet, else (B, channels, 1, 1).

    The network is a single stage, because its inner modules differ between releases of transformers; `network` is the
    module of transformers itself.
    """

    stages = ("network",)
    is_pretrained = True
    weights_from = "weights of hf: backbones are the safetensors files of the hub model or of the folder"

    def __init__(self, name: str, config_folder: Path | None = None) -> None:
        """With the pretrained weights, or with random ones if a folder with CONFIG_FILES is given."""
        super().__init__()
        transformers = library("transformers", extra="hub", user="an hf: backbone")
        name = name.removeprefix("hf:")
        self.config_folder = folder = config_folder or fetch(name)
        model_type = _read_json(folder / "config.json").get("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"hf:{name} is of type {model_type!r}: expected one of {', '.join(ARCHITECTURES)}")
        class_name, self.output = ARCHITECTURES[model_type]
        network_class = getattr(transformers, class_name)
        config = network_class.config_class.from_pretrained(folder)
        self.network = network_class(config) if config_folder else _load(network_class, config, folder, name)
        _remove_unused(self.network)
        self.channels: int = config.hidden_sizes[-1] if self.output == "maps" else config.hidden_size
        self.stage_channels = {"network": self.channels}
        self.pixel_mean, self.pixel_std = pixel_statistics(folder)
        # ViT and CLIP accept other image sizes than their own only with this argument.
        self.interpolates = "interpolate_pos_encoding" in inspect.signature(self.network.forward).parameters

    def stage(self, name: str, x: Tensor) -> Tensor:
        outputs = self.network(x, interpolate_pos_encoding=True) if self.interpolates else self.network(x)
        if self.output == "maps":
            return outputs.last_hidden_state
        vectors = outputs.pooler_output if self.output == "pooled" else outputs.last_hidden_state[:, 0]
        return vectors[:, :, None, None]  # (B, channels, 1, 1)


def fetch(name: str) -> Path:
    """The folder with the model's files: `name` itself if it is a folder, otherwise a download in the hub's cache."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"no config.json in {folder}: pass a folder written by save_pretrained")
        return folder
    from huggingface_hub import snapshot_download  # comes with transformers

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # no network, no such model, invalid name
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise FileNotFoundError(
            f"hf:{name} is neither a folder nor a model on the hub or in its local cache ({reason}): "
            "check the name and the network, or pass a folder written by save_pretrained"
        ) from None


def pixel_statistics(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixels 0..255 from preprocessor_config.json, by default ImageNet's."""
    path = folder / "preprocessor_config.json"
    settings = _read_json(path) if path.is_file() else {}
    mean, std = settings.get("image_mean") or IMAGENET_MEAN, settings.get("image_std") or IMAGENET_STD
    if settings.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if len(mean) != 3 or len(std) != 3:
        raise ValueError(f"{path}: expected three values in image_mean and image_std, got {len(mean)} and {len(std)}")
    return tuple(255 * value for value in mean), tuple(255 * value for value in std)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({one_line(error)}): download it again") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(settings).__name__}: download it again")
    return settings


def _load(network_class: type[Any], config: object, folder: Path, name: str) -> nn.Module:
    if not any(folder.glob("model*.safetensors")):
        raise FileNotFoundError(
            f"no model.safetensors for hf:{name} in {folder}: only safetensors weights are loaded, because other files "
            "can contain code; convert them with save_pretrained"
        )
    index = folder / "model.safetensors.index.json"
    weight_map = _read_json(index).get("weight_map") if index.is_file() else {}
    for file in dict(weight_map or {}).values():
        if not re.fullmatch(r"[\w.-]+\.safetensors", str(file)):
            raise ValueError(f"{index} names {file!r}: only safetensors files in the same folder are loaded")
    with _quiet():
        network, report = network_class.from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True
        )
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ValueError(
            f"the weights of hf:{name} lack {len(missing)} of the network's tensors, first {missing[0]}: "
            f"use weights of {network_class.__name__}"
        )
    return network.float()  # some are published in half precision


def _remove_unused(network: nn.Module) -> None:
    """Remove parameters that get no gradient, for which distributed training would wait."""
    if getattr(network, "pooler", None) is not None:  # ViT's is a tanh layer that most checkpoints never trained
        network.pooler = nn.Identity()
    for module in network.modules():
        if getattr(module, "mask_token", None) is not None:
            module.mask_token = None  # type: ignore[assignment]
    if type(network).__name__.startswith("ConvNext"):
        network.layernorm = nn.Identity()  # acts on the pooled vector, which is not used


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no list of CLIP's unused text weights; `_load` reports missing ones."""
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
