"""HDC's network against its layers written out and against the plain Embedder."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.backbones import Embedder, build_trunk
from proxygml.backbones.cascade import CascadedEmbedder, SidePool, choose_taps
from proxygml.backbones.convnet import ConvNet
from proxygml.backbones.inception import GoogLeNet
from proxygml.losses.hdc import HDCLoss


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> CascadedEmbedder:
    torch.manual_seed(0)
    return CascadedEmbedder(ConvNet(), 12)


class OneStage(nn.Module):
    channels, pixel_mean, pixel_std, bgr = 3, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), False
    stages = ("network",)


class TestEmbeddings:
    def test_parts_have_unit_length_in_training(self, model: CascadedEmbedder, images: Tensor) -> None:
        embeddings = model.train()(images)
        assert embeddings.shape == (4, 12)
        torch.testing.assert_close(embeddings.unflatten(1, (3, 4)).norm(dim=-1), torch.ones(4, 3))

    def test_parts_are_weighted_in_evaluation(self, model: CascadedEmbedder, images: Tensor) -> None:
        lengths = model.eval()(images).unflatten(1, (3, 4)).norm(dim=-1)
        torch.testing.assert_close(lengths, torch.tensor([1.0, 1.0, 2.0]).expand(4, 3))

    def test_dropout_is_active_in_training_only(self, model: CascadedEmbedder, images: Tensor) -> None:
        first, again = model(images), model(images)
        assert ((first - again).unflatten(1, (3, 4)).norm(dim=-1).mean(dim=0) > 0.1).all()  # in all three parts
        model.eval()
        assert torch.equal(model(images), model(images))

    @pytest.mark.parametrize("backbone", [ConvNet, GoogLeNet], ids=["RGB", "BGR"])
    def test_last_part_equals_the_plain_embedder(self, backbone: type, images: Tensor) -> None:
        torch.manual_seed(0)
        cascaded = CascadedEmbedder(backbone(), 12).eval()
        plain = Embedder(cascaded.trunk, 4).eval()
        plain.head.load_state_dict(cascaded.head[2][-1].state_dict())
        assert cascaded.trunk.bgr == (backbone is GoogLeNet)
        torch.testing.assert_close(cascaded(images)[:, 8:], 2 * plain(images))

    @torch.no_grad()
    def test_output_equals_the_layers_written_out(self) -> None:
        torch.manual_seed(0)
        trunk = GoogLeNet()
        model = CascadedEmbedder(trunk, 384).eval()
        images = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)
        x = images.flip(1) - torch.tensor([104.0, 117.0, 123.0]).view(3, 1, 1)
        expected = []
        weights = model.head.state_dict()
        for name in ("stem", "3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
            x = trunk.stage(name, x)
            if name in ("4a", "4d"):
                prefix = {"4a": 0, "4d": 1}[name]
                assert x.shape[-2:] == (14, 14)
                side = F.conv2d(F.avg_pool2d(x, 5, 3), weights[f"{prefix}.1.weight"], weights[f"{prefix}.1.bias"])
                assert side.shape == (1, 128, 4, 4)
                side = F.linear(side.relu().flatten(1), weights[f"{prefix}.4.weight"], weights[f"{prefix}.4.bias"])
                assert side.shape == (1, 1024)
                expected.append(F.linear(side.relu(), weights[f"{prefix}.7.weight"], weights[f"{prefix}.7.bias"]))
        expected.append(F.linear(x.mean(dim=(2, 3)), weights["2.3.weight"], weights["2.3.bias"]))
        assert all(vectors.shape == (1, 128) for vectors in expected)
        first, second, third = (vectors / vectors.norm(dim=1, keepdim=True) for vectors in expected)
        torch.testing.assert_close(model(images), torch.cat([first, second, 2 * third], dim=1))

    @torch.no_grad()
    @pytest.mark.parametrize("size", [(16, 16), (33, 20), (64, 64), (90, 120)])
    def test_any_image_size(self, model: CascadedEmbedder, size: tuple[int, int]) -> None:
        assert model.eval()(torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)).shape == (2, 12)


class TestSidePool:
    def test_averages_5x5_windows_with_stride_3(self) -> None:
        maps = torch.randn(2, 3, 14, 14)
        expected = torch.stack(
            [
                maps[:, :, row : row + 5, column : column + 5].mean(dim=(2, 3))
                for row in range(0, 10, 3)
                for column in range(0, 10, 3)
            ],
            dim=-1,
        )
        torch.testing.assert_close(SidePool()(maps), expected.unflatten(-1, (4, 4)))

    def test_includes_the_border_of_small_maps(self) -> None:
        maps = torch.arange(49.0).view(1, 1, 7, 7)
        corners = [
            maps[..., rows, columns].mean() for rows in (slice(5), slice(3, 7)) for columns in (slice(5), slice(3, 7))
        ]
        expected = torch.stack(corners).view(2, 2).repeat_interleave(2, dim=0).repeat_interleave(2, dim=1)
        torch.testing.assert_close(SidePool()(maps)[0, 0], expected)

    @pytest.mark.parametrize("size", [(1, 1), (4, 4), (4, 9), (5, 5), (7, 7), (28, 28)])
    def test_output_is_4x4_for_any_size(self, size: tuple[int, int]) -> None:
        pooled = SidePool()(torch.full((1, 2, *size), 3.0))
        torch.testing.assert_close(pooled, torch.full((1, 2, 4, 4), 3.0))

    def test_4x4_maps_are_unchanged(self) -> None:
        maps = torch.randn(1, 2, 4, 4)
        torch.testing.assert_close(SidePool()(maps), maps)


class TestTaps:
    @pytest.mark.parametrize(
        ("backbone", "taps", "channels"),
        [
            ("googlenet", ("4a", "4d"), (512, 528)),
            ("bn-inception", ("4a", "4d"), (576, 608)),
            ("convnet", ("block2", "block3"), (64, 128)),
            ("resnet18", ("layer2", "layer3"), (128, 256)),
            ("efficientnet-lite0", ("4", "6"), (80, 192)),
        ],
    )
    def test_taps_of_every_trunk(self, backbone: str, taps: tuple[str, str], channels: tuple[int, int]) -> None:
        model = CascadedEmbedder(build_trunk(backbone), 6)
        assert model.taps == taps
        assert tuple(model.head[head][1].in_channels for head in (0, 1)) == channels
        parts = model(torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)).unflatten(1, (3, 2))
        torch.testing.assert_close(parts.norm(dim=-1), torch.ones(2, 3))

    def test_trunk_with_one_stage(self) -> None:
        with pytest.raises(ValueError, match="at least four stages, got network"):
            CascadedEmbedder(OneStage(), 6)

    @pytest.mark.parametrize("count", range(4, 20))
    def test_taps_are_at_one_half_and_three_quarters(self, count: int) -> None:
        stages = tuple(f"stage{number}" for number in range(1, count + 1))
        first, second = (stages.index(tap) + 1 for tap in choose_taps(stages))
        assert count / 2 <= first < count / 2 + 1
        assert 3 * count / 4 <= second < count
        assert first < second


def test_every_weight_is_in_trunk_or_head_and_is_trained(model: CascadedEmbedder, images: Tensor) -> None:
    assert {name.split(".")[0] for name in model.state_dict()} == {"trunk", "head"}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([*model.trunk.parameters(), *model.head.parameters()], lr=0.1)
    HDCLoss(2, 12, ratios=(1.0, 1.0, 1.0))(model(images), torch.tensor([0, 0, 1, 1])).backward()
    optimizer.step()
    unchanged = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert unchanged == []


@pytest.mark.slow
def test_training_lowers_the_loss(images: Tensor) -> None:
    torch.manual_seed(0)
    model, loss = CascadedEmbedder(ConvNet(), 24), HDCLoss(2, 24, ratios=(1.0, 1.0, 1.0))
    labels = torch.tensor([0, 0, 1, 1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with torch.no_grad():
        first = loss(model.eval()(images), labels)
    for _ in range(10):
        optimizer.zero_grad()
        loss(model.train()(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        last = loss(model(images), labels)
    assert last < 0.5 * first


def test_autocast(model: CascadedEmbedder, images: Tensor) -> None:
    with torch.no_grad():
        plain = model.eval()(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(images)
    torch.testing.assert_close(mixed.float(), plain, rtol=0, atol=0.1)
    assert F.cosine_similarity(mixed.float(), plain).min() > 0.99


def test_dimension_that_is_no_multiple_of_three(images: Tensor) -> None:
    embeddings = CascadedEmbedder(ConvNet(), 128).eval()(images)
    lengths = [part.norm(dim=1) for part in embeddings.split([43, 43, 42], dim=1)]
    torch.testing.assert_close(torch.stack(lengths, dim=1), torch.tensor([1.0, 1.0, 2.0]).expand(len(images), 3))
    assert HDCLoss(2, 128)(embeddings, torch.arange(len(images)) % 2).isfinite()


@pytest.mark.parametrize("dimension", [2, 0, -3])
def test_dimension_below_three(dimension: int) -> None:
    with pytest.raises(ValueError, match=f"got {dimension}: 384 is usual"):
        CascadedEmbedder(ConvNet(), dimension)
