"""The paper's presets, walked on miniature trees of the genuine formats with random weights."""

from pathlib import Path

import pytest
import torch
from lightning_fabric import seed_everything

from proxygml.backbones import build_trunk, load_pretrained
from proxygml.data import load
from proxygml.training import build, start
from proxygml.training.loop import learning_rate_factor
from proxygml.training.presets import PRESETS
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from tests.data.conftest import cars_tree, cub_tree, genuine, sop_tree  # noqa: F401  (fixtures)

PAPER = ["paper-cub", "paper-cars", "paper-sop"]


def preset(name: str) -> Recipe:
    return PRESETS[name][1]


class TestEveryValueIsThatOfThePaperOrItsCode:
    @pytest.mark.parametrize("name", PAPER)
    def test_shared_by_all_three(self, name: str) -> None:
        recipe = preset(name)
        assert recipe == recipe.changed(
            {
                "backbone": "bn-inception",
                "weights": "pretrained",
                "embedding_dim": 512,
                "pooling": "average",
                "image_size": 224,
                "crop_scale": (0.08, 1.0),
                "crop_ratio": (3 / 4, 4 / 3),
                "flip": True,
                "test_crop": 224 / 256,
                "ratio": 0.05,
                "batch_size": 32,
                "epochs": 50,
                "learning_rate": 1e-4,
                "adam_epsilon": 0.01,
                "weight_decay": 1e-4,
                "scale": 1.0,
                "held_out": 0.0,
            }
        )

    def test_that_differ(self) -> None:
        for name in ("paper-cub", "paper-cars"):
            recipe = preset(name)
            assert (recipe.proxies_per_class, recipe.proxy_weight, recipe.proxy_learning_rate) == (12, 0.3, 3e-2)
            assert recipe.freeze_batch_norm
            assert recipe.recall_at == (1, 2, 4, 8)
        recipe = preset("paper-sop")
        assert (recipe.proxies_per_class, recipe.proxy_weight, recipe.proxy_learning_rate) == (1, 0.0, 3e-1)
        assert not recipe.freeze_batch_norm
        assert recipe.recall_at == (1, 10, 100, 1000)

    def test_resnet50_differs_in_the_network_only(self) -> None:
        recipe = preset("resnet50")
        assert recipe == preset("paper-cub").changed({"backbone": "resnet50"})
        model = build.build_model(recipe.changed({"weights": None}))
        assert (model.trunk.channels, model.head.out_features) == (2048, 512)

    def test_learning_rate_schedule(self) -> None:
        factors = [learning_rate_factor(preset("paper-cars"), epoch) for epoch in range(50)]
        assert factors == pytest.approx([1] * 19 + [0.1] * 20 + [0.01] * 11)

    def test_tested_epochs(self) -> None:
        assert preset("paper-cub").tested_epochs == (1, 2, *range(35, 51))

    @pytest.mark.parametrize(("name", "links"), [("paper-cub", 60), ("paper-cars", 59), ("paper-sop", 566)])
    def test_links_follow_from_the_published_number_of_classes(self, name: str, links: int) -> None:
        classes = {"paper-cub": 100, "paper-cars": 98, "paper-sop": 11318}[name]
        assert build.build_loss(preset(name), classes).links == links


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.filterwarnings("ignore:.*every link of a sample")  # three classes are few for a ratio of .05
@pytest.mark.slow
def test_some_epochs_of_a_preset_on_a_miniature_tree(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tree = request.getfixturevalue({"cub": "cub_tree", "cars": "cars_tree", "sop": "sop_tree"}[preset(name).dataset])
    recipe = preset(name).changed(
        {"data": str(tree), "weights": None, "epochs": 6, "workers": 0, "image_size": 64, "baselines": False}
        | {"tested_epochs": (1, 6), "recall_at": (1, 2), "ratio": 1.0, "device": "cpu"}
        | {"crop_scale": (1.0, 1.0), "flip": False}  # the same few images every time, so that the loss has to fall
    )
    run = start.train(recipe, tmp_path / "run")
    first, *_, last = run.log
    assert first["learning_rate_trunk"] == first["learning_rate_head"] == 1e-4
    assert first["learning_rate_proxies"] == recipe.proxy_learning_rate
    assert "test" in first

    seed_everything(recipe.seed, verbose=False)
    before = build.build_model(recipe).state_dict()
    after = run.load_last()["model"]
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    statistics = {key for key in before if "running" in key or "num_batches" in key}
    assert moved - statistics == before.keys() - statistics
    assert bool(moved & statistics) == (not recipe.freeze_batch_norm)
    groups = run.load_last()["optimizer"]["param_groups"]
    assert [group["name"] for group in groups] == ["trunk", "head", "proxies"]
    assert {(group["eps"], group["weight_decay"]) for group in groups} == {(0.01, 1e-4)}
    assert last["loss"] < first["loss"]


@pytest.mark.filterwarnings("ignore:.*every link of a sample")
@pytest.mark.slow
def test_the_preset_for_photos_moves_what_is_not_frozen(cub_tree: Path, tmp_path: Path) -> None:  # noqa: F811
    torch.manual_seed(0)
    torch.save(build_trunk("efficientnet-lite0").state_dict(), tmp_path / "weights.pth")
    recipe = preset("photos").changed(
        {
            "dataset": "cub",
            "data": str(cub_tree),
            "cache": None,
            "weights": str(tmp_path / "weights.pth"),
            "embedding_dim": 16,
            "epochs": 2,
            "baselines": False,
            "image_size": 64,
            "test_scale": 1.125,
            "frozen": ("stem", "1"),
        }
    )
    run = start.train(recipe, tmp_path / "run")
    model = build.build_model(recipe)
    load_pretrained(model.trunk, recipe.weights)
    after = run.load_last()["model"]
    frozen = {id(p) for stage in recipe.frozen for m in model.trunk.stage_modules(stage) for p in m.parameters()}
    assert frozen
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, after[name]) == (id(parameter) in frozen), name


@pytest.mark.slow
def test_second_epoch_trains_head_and_proxies(cub_tree: Path, tmp_path: Path) -> None:  # noqa: F811
    recipe = preset("paper-cub").changed(
        {"data": str(cub_tree), "weights": None, "epochs": 2, "workers": 0, "image_size": 64, "baselines": False}
        | {"tested_epochs": (), "ratio": 1.0}
    )
    run = start.train(recipe, tmp_path / "run")
    from proxygml.training.checkpoints import load_checkpoint

    first, second = (load_checkpoint(run.folder / name)["model"] for name in ("previous.pt", "last.pt"))
    moved = {key for key in first if not torch.equal(first[key], second[key])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.filterwarnings("ignore:.*every link of a sample")
def test_weights_that_cannot_be_found_say_which_file_to_get(
    cub_tree: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    recipe = preset("paper-cub").changed({"data": str(cub_tree), "workers": 0})
    with pytest.raises(
        FileNotFoundError, match=r"no bn_inception-52deb4733.pth in the working directory .*--weights PATH"
    ):
        start.train(recipe, tmp_path / "run")


@pytest.mark.slow
def test_published_weights_are_found(
    cub_tree: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from proxygml.backbones.inception import BNInception

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(BNInception, "published_file", "bn_inception.pth")  # without the hash of the genuine file
    torch.save(BNInception().state_dict() | {"last_linear.weight": torch.ones(2)}, "bn_inception.pth")
    recipe = preset("paper-cub").changed(
        {"data": str(cub_tree), "epochs": 1, "workers": 0, "image_size": 64, "baselines": False, "ratio": 1.0}
    )
    told = []
    start.train(recipe, tmp_path / "run", progress=lambda what, done, total, note: told.append((what, note)))
    (note,) = [note for what, note in told if what == "weights"]
    assert note.endswith("bn_inception.pth, 0 missing, 0 unexpected")


@pytest.mark.slow
def test_broken_image(
    cub_tree: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    images, _ = load("cub", cub_tree)
    victim = Path(images.root) / images.paths[0]
    victim.write_bytes(victim.read_bytes()[:200])
    recipe = Recipe(dataset="cub", data=str(cub_tree), image_size=32, epochs=1, ratio=1.0, batch_size=4, held_out=0.0)
    with pytest.raises(ValueError, match=rf"1 of {len(images)} images cannot be read, first .* --skip-broken"):
        start.train(recipe, tmp_path / "refused")
    run = start.train(recipe.changed({"skip_broken": True}), tmp_path / "skipped")
    assert run.scores["skipped_training_images"] == 1
    assert Run.open(run.folder).log


@pytest.mark.slow
def test_the_genuine_annotations_give_the_published_counts() -> None:
    train_images, test_images = load("cars", genuine("annotations/Cars196"))
    assert (len(train_images), len(test_images)) == (8054, 8131)
