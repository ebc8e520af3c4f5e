"""Any module as a backbone: a network of your own, or one that timm or torchvision builds."""

import torch
from torch import Tensor, nn

from proxygml.backbones.trunk import IMAGENET_MEAN, IMAGENET_STD, Trunk

EXPECTED = "expected a network that turns images (B, 3, H, W) into features (B, F) or maps (B, F, h, w)"


class ModuleTrunk(Trunk):
    """Normalized images (B, 3, H, W) -> features (B, channels) or feature maps (B, channels, h, w) of a module.

    Pixels are normalized with the module's `pixel_mean` and `pixel_std` (RGB, 0..255), with the mean and std that timm
    keeps in `pretrained_cfg` (0..1), or with ImageNet's. Its direct children are the stages.
    """

    module: nn.Module
    is_pretrained = True  # it has the weights that it was given with

    def __init__(self, module: nn.Module, image_size: int) -> None:
        super().__init__()
        self.module = module
        self.stages = tuple(name for name, _ in module.named_children())
        timm = getattr(module, "pretrained_cfg", None) or {}
        self.pixel_mean = _triple(module, "pixel_mean", timm.get("mean"), IMAGENET_MEAN)
        self.pixel_std = _triple(module, "pixel_std", timm.get("std"), IMAGENET_STD)
        shape = _output_shape(module, image_size)
        self.channels, self.pools = shape[1], len(shape) == 2

    def forward(self, images: Tensor) -> Tensor:
        output = self.module(images)
        if not isinstance(output, Tensor):  # auxiliary outputs, in training only
            got = f"{type(self.module).__name__} returns a {type(output).__name__} in training"
            raise ValueError(f"{EXPECTED}, but {got}: leave out the others")
        return output

    def stage_modules(self, name: str) -> list[nn.Module]:
        return [self.module.get_submodule(name)]


def _triple(module: nn.Module, name: str, of_timm: object, default: tuple[float, ...]) -> tuple[float, ...]:
    """Three numbers on the scale 0..255."""
    if of_timm is not None and not hasattr(module, name):
        values = [255 * float(value) for value in of_timm]  # type: ignore[attr-defined]  # three numbers
    else:
        values = [float(value) for value in getattr(module, name, default)]
    if len(values) != 3:
        raise ValueError(f"expected {name} as three numbers (R, G, B on the scale 0..255), got {len(values)}")
    return tuple(values)


def _output_shape(module: nn.Module, image_size: int) -> tuple[int, ...]:
    """The shape of the module's output for two black images."""
    modes = {each: each.training for each in module.modules()}
    parameter = next(module.parameters(), torch.empty(0))
    images = torch.zeros(2, 3, image_size, image_size, device=parameter.device)
    try:
        with torch.no_grad():
            output = module.eval()(images)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{EXPECTED}; {type(module).__name__} raised for {tuple(images.shape)}: {error}") from error
    finally:
        for each, mode in modes.items():
            each.training = mode
    if not isinstance(output, Tensor):
        raise ValueError(f"{EXPECTED}, but {type(module).__name__} returns a {type(output).__name__}")
    if output.ndim not in (2, 4) or len(output) != 2:
        raise ValueError(f"{EXPECTED}, but {type(module).__name__} returns {tuple(output.shape)} for two images")
    if not output.is_floating_point():
        raise ValueError(f"{EXPECTED} of a float type, but {type(module).__name__} returns {output.dtype}")
    if not output.isfinite().all():
        raise ValueError(
            f"expected finite features, but {type(module).__name__} returns NaN or infinity for black images"
        )
    return tuple(output.shape)
