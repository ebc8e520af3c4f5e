"""hf: trunks: tiny models saved to a folder, loaded and compared with transformers itself."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from proxygml.backbones import build_trunk, load_pretrained
from proxygml.backbones.transformers import TransformersTrunk, pixel_statistics

TOKENS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
MAPS = ["convnext", "convnextv2", "resnet"]
MODEL_TYPES = ["vit", "dinov2", "dinov2_with_registers", "clip_vision_model", *MAPS]


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    library = pytest.importorskip("transformers", reason='transformers is not installed: pip install "proxygml[hub]"')
    library.utils.logging.disable_progress_bar()
    return library


def tiny(transformers: ModuleType, model_type: str) -> nn.Module:
    """A small model with random weights, also in its normalization layers."""
    torch.manual_seed(0)
    maps = {"hidden_sizes": [8, 8, 16, 24], "depths": [1, 1, 1, 1]}
    network, config = {
        "vit": (transformers.ViTModel, transformers.ViTConfig(**TOKENS)),
        "dinov2": (transformers.Dinov2Model, transformers.Dinov2Config(**TOKENS)),
        "dinov2_with_registers": (
            transformers.Dinov2WithRegistersModel,
            transformers.Dinov2WithRegistersConfig(**TOKENS),
        ),
        "clip_vision_model": (transformers.CLIPVisionModel, transformers.CLIPVisionConfig(**TOKENS)),
        "convnext": (transformers.ConvNextModel, transformers.ConvNextConfig(**maps)),
        "convnextv2": (transformers.ConvNextV2Model, transformers.ConvNextV2Config(**maps)),
        "resnet": (transformers.ResNetModel, transformers.ResNetConfig(**maps, embedding_size=8)),
    }[model_type]
    model = network(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@torch.no_grad()
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_output_equals_the_models_image_representation(transformers, tmp_path, model_type):
    model = tiny(transformers, model_type)
    model.save_pretrained(tmp_path)
    trunk = TransformersTrunk(f"hf:{tmp_path}").eval()
    images = torch.randn(2, 3, 32, 32)
    outputs = model(images)
    maps = trunk(images)
    if model_type in MAPS:
        torch.testing.assert_close(maps, outputs.last_hidden_state)
        assert maps.shape == (2, 24, 1, 1)
    elif model_type == "vit":  # not the pooled vector, a tanh layer for another task
        torch.testing.assert_close(maps, outputs.last_hidden_state[:, 0, :, None, None])
    else:
        torch.testing.assert_close(maps, outputs.pooler_output[:, :, None, None])
    assert maps.shape[1] == trunk.channels == trunk.stage_channels["network"]


@torch.no_grad()
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_other_image_sizes(transformers, tmp_path, model_type):
    tiny(transformers, model_type).save_pretrained(tmp_path)
    maps = TransformersTrunk(str(tmp_path)).eval()(torch.randn(1, 3, 64, 96))
    assert maps.shape == ((1, 24, 2, 3) if model_type in MAPS else (1, 32, 1, 1))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_parameter_gets_a_gradient(transformers, tmp_path, model_type):
    tiny(transformers, model_type).save_pretrained(tmp_path)
    trunk = TransformersTrunk(str(tmp_path)).train()
    trunk(torch.randn(2, 3, 64, 64)).square().sum().backward()
    # Distributed training waits for the gradient of every parameter.
    assert [name for name, parameter in trunk.named_parameters() if parameter.grad is None] == []


@torch.no_grad()
def test_full_clip_loads_its_image_tower_silently(transformers, tmp_path, capfd):
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50000}
    whole = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=TOKENS)).eval()
    whole.save_pretrained(tmp_path)
    capfd.readouterr()
    trunk = TransformersTrunk(str(tmp_path)).eval()
    assert capfd.readouterr() == ("", "")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(trunk(images)[:, :, 0, 0], whole.vision_model(images).pooler_output)
    assert transformers.utils.logging.get_verbosity() == transformers.utils.logging.WARNING


def test_pretrained_weights_are_its_own(transformers, tmp_path):
    tiny(transformers, "resnet").save_pretrained(tmp_path)
    trunk = build_trunk(f"hf:{tmp_path}")
    before = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    assert load_pretrained(trunk, "pretrained") == "those of the hub model"
    assert all(torch.equal(tensor, before[name]) for name, tensor in trunk.state_dict().items())


def test_half_precision_is_converted(transformers, tmp_path):
    tiny(transformers, "vit").half().save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in TransformersTrunk(str(tmp_path)).parameters()} == {torch.float32}


def test_the_network_is_one_stage(transformers, tmp_path):
    tiny(transformers, "dinov2").save_pretrained(tmp_path)
    trunk = TransformersTrunk(str(tmp_path)).eval()
    assert trunk.stages == ("network",)
    (network,) = trunk.stage_modules("network")
    assert len(list(network.parameters())) == len(list(trunk.parameters()))


def test_pixel_statistics(tmp_path):
    imagenet = pixel_statistics(tmp_path)
    assert imagenet == (pytest.approx((123.675, 116.28, 103.53)), pytest.approx((58.395, 57.12, 57.375)))
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 1.0]}))
    assert pixel_statistics(tmp_path) == ((127.5, 127.5, 127.5), (63.75, 127.5, 255.0))
    settings.write_text(json.dumps({"do_normalize": False, "image_mean": [0.5, 0.5, 0.5]}))
    assert pixel_statistics(tmp_path) == ((0, 0, 0), (255, 255, 255))
    settings.write_text(json.dumps({"image_mean": [0.5], "image_std": [0.5]}))
    with pytest.raises(ValueError, match="expected three values in image_mean and image_std, got 1 and 1"):
        pixel_statistics(tmp_path)
    settings.write_text("{")
    with pytest.raises(ValueError, match=r"preprocessor_config.json is not JSON"):
        pixel_statistics(tmp_path)


def test_trunk_has_the_pixel_statistics_of_its_folder(transformers, tmp_path):
    tiny(transformers, "convnext").save_pretrained(tmp_path)
    settings = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    trunk = TransformersTrunk(str(tmp_path))
    assert (trunk.bgr, trunk.pixel_mean, trunk.pixel_std) == (False, (127.5,) * 3, (127.5,) * 3)


@pytest.mark.parametrize("name", ["hf:nobody/nothing-here", "hf:/nowhere/at/all", "hf:a b c"])
def test_unknown_model_is_rejected_in_one_line(transformers, monkeypatch, name):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=f"^{name} is neither a folder nor a model") as raised:
        TransformersTrunk(name)
    assert "\n" not in str(raised.value)


def test_missing_config_and_unsupported_type(transformers, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json in"):
        TransformersTrunk(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="of type 'bert': expected one of vit, dinov2"):
        TransformersTrunk(str(tmp_path))


def test_only_safetensors_are_loaded(transformers, tmp_path):
    model = tiny(transformers, "vit")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="only safetensors weights are loaded"):
        TransformersTrunk(str(tmp_path))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "../elsewhere/model.safetensors", "/tmp/model.safetensors"])
def test_weight_index_stays_in_its_folder(transformers, tmp_path, file):
    class Bomb:
        def __reduce__(self) -> tuple:
            return open, (str(tmp_path / "executed"), "w")

    tiny(transformers, "vit").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    torch.save({"embeddings.cls_token": Bomb()}, tmp_path / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": {"embeddings.cls_token": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="only safetensors files in the same folder are loaded") as caught:
        TransformersTrunk(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_missing_weights_are_rejected_by_name(transformers, tmp_path):
    tiny(transformers, "dinov2").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lack \d+ of the network's tensors, first encoder.layer.2"):
        TransformersTrunk(str(tmp_path))


def test_missing_library_error_has_the_install_command(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r'needs transformers: pip install "proxygml\[hub\]"'):
        TransformersTrunk(str(tmp_path))
