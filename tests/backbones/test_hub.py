"""Trunks from the hub: tiny models saved here, read back and compared with transformers itself."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from proxygml.backbones.hub import Hub, pixel_statistics

TOKENS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
KINDS = ["vit", "dinov2", "dinov2_with_registers", "clip_vision_model", "convnext", "convnextv2"]


@pytest.fixture
def transformers() -> ModuleType:
    library = pytest.importorskip("transformers", reason='transformers is not installed: pip install "proxygml[hub]"')
    library.utils.logging.disable_progress_bar()
    return library


def tiny(transformers: ModuleType, kind: str) -> nn.Module:
    """A small model of one kind with random weights, the normalisations away from their start."""
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
    }[kind]
    model = network(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_what_the_model_says_of_the_image(transformers, tmp_path, kind):
    model = tiny(transformers, kind)
    model.save_pretrained(tmp_path)
    trunk = Hub(f"hf:{tmp_path}").eval()
    images = torch.randn(2, 3, 32, 32)
    answer = model(images)
    maps = trunk(images)
    if kind.startswith("convnext"):
        torch.testing.assert_close(maps, answer.last_hidden_state)
        assert maps.shape == (2, 24, 1, 1)
    elif kind == "vit":  # its pooled vector is a tanh layer for another task
        torch.testing.assert_close(maps, answer.last_hidden_state[:, 0, :, None, None])
    else:
        torch.testing.assert_close(maps, answer.pooler_output[:, :, None, None])
    assert maps.shape[1] == trunk.channels == trunk.stage_channels["network"]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_other_image_sizes_pass(transformers, tmp_path, kind):
    tiny(transformers, kind).save_pretrained(tmp_path)
    maps = Hub(str(tmp_path)).eval()(torch.randn(1, 3, 64, 96))
    assert maps.shape == ((1, 24, 2, 3) if kind.startswith("convnext") else (1, 32, 1, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(transformers, tmp_path, kind):
    tiny(transformers, kind).save_pretrained(tmp_path)
    trunk = Hub(str(tmp_path)).train()
    trunk(torch.randn(2, 3, 64, 64)).square().sum().backward()
    # Training in several processes waits for the gradient of every parameter.
    assert [name for name, parameter in trunk.named_parameters() if parameter.grad is None] == []


@torch.no_grad()
def test_a_whole_clip_gives_its_image_side_in_silence(transformers, tmp_path, capfd):
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50000}
    whole = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=TOKENS)).eval()
    whole.save_pretrained(tmp_path)
    capfd.readouterr()
    trunk = Hub(str(tmp_path)).eval()
    assert capfd.readouterr() == ("", "")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(trunk(images)[:, :, 0, 0], whole.vision_model(images).pooler_output)
    assert transformers.utils.logging.get_verbosity() == transformers.utils.logging.WARNING


def test_half_precision_becomes_single(transformers, tmp_path):
    tiny(transformers, "vit").half().save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in Hub(str(tmp_path)).parameters()} == {torch.float32}


def test_without_pretrained_the_weights_are_random_and_no_weight_file_is_needed(transformers, tmp_path):
    model = tiny(transformers, "vit")
    model.config.save_pretrained(tmp_path)
    trunk = Hub(str(tmp_path), pretrained=False)
    assert trunk.network.layernorm.weight.eq(1).all()
    assert trunk(torch.randn(1, 3, 32, 32)).shape == (1, 32, 1, 1)


def test_its_one_stage_is_the_whole_network(transformers, tmp_path):
    tiny(transformers, "dinov2").save_pretrained(tmp_path)
    trunk = Hub(str(tmp_path)).eval()
    assert trunk.stages == ("network",)
    (network,) = trunk.modules_of("network")
    assert len(list(network.parameters())) == len(list(trunk.parameters()))
    with pytest.raises(ValueError, match="'stem' in Hub: take one of network"):
        trunk.stage("stem", torch.zeros(1))


def test_pixel_statistics_come_from_the_folder_or_are_imagenets(tmp_path):
    imagenet = pixel_statistics(tmp_path)
    assert imagenet == (pytest.approx((123.675, 116.28, 103.53)), pytest.approx((58.395, 57.12, 57.375)))
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 1.0]}))
    assert pixel_statistics(tmp_path) == ((127.5, 127.5, 127.5), (63.75, 127.5, 255.0))
    settings.write_text(json.dumps({"do_normalize": False, "image_mean": [0.5, 0.5, 0.5]}))
    assert pixel_statistics(tmp_path) == ((0, 0, 0), (255, 255, 255))
    settings.write_text(json.dumps({"image_mean": [0.5], "image_std": [0.5]}))
    with pytest.raises(ValueError, match="1 means and 1 deviations: expected three"):
        pixel_statistics(tmp_path)
    settings.write_text("{")
    with pytest.raises(ValueError, match=r"preprocessor_config.json is not JSON"):
        pixel_statistics(tmp_path)


def test_the_trunk_carries_the_statistics_of_its_folder(transformers, tmp_path):
    tiny(transformers, "convnext").save_pretrained(tmp_path)
    settings = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    trunk = Hub(str(tmp_path))
    assert (trunk.bgr, trunk.pixel_mean, trunk.pixel_std) == (False, (127.5,) * 3, (127.5,) * 3)


@pytest.mark.parametrize("name", ["hf:nobody/nothing-here", "hf:/nowhere/at/all", "hf:a b c"])
def test_a_model_that_is_not_found_is_refused_in_one_line(transformers, monkeypatch, name):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=f"^{name} is neither a folder here nor a model") as refusal:
        Hub(name)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_config_or_with_another_kind_of_model_is_refused(transformers, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json in"):
        Hub(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="of type 'bert': expected one of vit, dinov2"):
        Hub(str(tmp_path))


def test_only_safetensors_are_loaded(transformers, tmp_path):
    model = tiny(transformers, "vit")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="only safetensors weights are loaded"):
        Hub(str(tmp_path))


@pytest.mark.parametrize("named", ["pytorch_model.bin", "../elsewhere/model.safetensors", "/tmp/model.safetensors"])
def test_an_index_of_weights_may_name_only_safetensors_beside_it(transformers, tmp_path, named):
    class Bomb:
        def __reduce__(self) -> tuple:
            return open, (str(tmp_path / "it-was-run"), "w")

    tiny(transformers, "vit").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    torch.save({"embeddings.cls_token": Bomb()}, tmp_path / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": {"embeddings.cls_token": named}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="only safetensors files in the same folder are loaded") as caught:
        Hub(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "it-was-run").exists()


def test_weights_that_lack_a_layer_are_refused_by_name(transformers, tmp_path):
    tiny(transformers, "dinov2").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lack \d+ of the network's tensors, first encoder.layer.2"):
        Hub(str(tmp_path))


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r'needs transformers: pip install "proxygml\[hub\]"'):
        Hub(str(tmp_path))
