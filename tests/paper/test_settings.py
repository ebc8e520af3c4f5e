"""The settings of the experiments: literal where finished runs depend on them, and each walked on a miniature tree."""

from pathlib import Path

import pytest
import torch

from proxygml.backbones.inception import BNInception
from proxygml.cli import main
from proxygml.paper import find, frozen, settings
from proxygml.paper.rendering import Section
from proxygml.paper.report import report
from proxygml.paper.results import fingerprint, load_runs, save_runs
from proxygml.paper.running import jobs_of
from proxygml.paper.settings import SETTINGS, base_recipe
from tests.data.conftest import write_image

PINNED = {  # a change of these makes every finished run worthless
    "cars-head": "1260c368dc99fb77",
    "cub-head": "95b46932bdcd5a26",
    "cars-small": "c90759cbf5f77973",
    "cub-small": "0cd1b02ea5c6b560",
    "omniglot-sop": "d4667bf1c91f24c5",
}
HEAD, SMALL = ("cars-head", "cub-head"), ("cars-small", "cub-small")


@pytest.mark.parametrize("name", PINNED)
def test_finished_runs_stay_those_of_todays_settings(name: str) -> None:
    assert fingerprint(SETTINGS[name].recipe) == PINNED[name]


@pytest.mark.parametrize("name", HEAD)
def test_a_head_is_trained_by_the_papers_recipe(name: str) -> None:
    recipe = SETTINGS[name].recipe
    assert recipe == recipe.changed(
        {
            "epochs": 50,
            "batch_size": 32,
            "embedding_dim": 512,
            "decay": (19, 39),
            "decay_factor": 0.1,
            "proxies_per_class": 12,
            "ratio": 0.05,
            "proxy_weight": 0.3,
            "start_ratio": None,
            "optimizer": "adam",
            "adam_epsilon": 0.01,
            "learning_rate": 1e-4,
            "proxy_learning_rate": 3e-2,
            "backbone": "efficientnet-lite0",
            "weights": "pretrained",
            "feature_crops": 8,
            "image_size": {"cars-head": 144, "cub-head": 224}[name],
        }
    )


@pytest.mark.parametrize("name", SMALL)
def test_the_small_setting_trains_the_whole_network(name: str) -> None:
    recipe = SETTINGS[name].recipe
    assert recipe == recipe.changed(
        {
            "epochs": 6,
            "schedule": "cosine",
            "image_size": 112,
            "freeze_batch_norm": True,
            "pooling": "average",
            "learning_rate": 2e-4,
            "head_learning_rate": 1e-3,
            "proxy_learning_rate": 3e-2,
            "adam_epsilon": 0.01,
            "backbone": "efficientnet-lite0",
            "weights": "pretrained",
            "feature_crops": 0,
            "frozen": (),
        }
    )


def test_the_stand_in_for_sop_has_its_settings() -> None:
    ours, sop = SETTINGS["omniglot-sop"].recipe, SETTINGS["sop"].recipe
    for name in ("proxies_per_class", "proxy_weight", "proxy_learning_rate", "ratio", "adam_epsilon"):
        assert getattr(ours, name) == getattr(sop, name), name
    assert (ours.recall_at, ours.max_class_size, ours.classes) == ((1, 10, 100), 5, None)


@pytest.mark.parametrize("name", [*HEAD, *SMALL, "omniglot-sop"])
def test_last_epoch_is_scored(name: str) -> None:
    recipe = SETTINGS[name].recipe
    assert (recipe.keep_epoch, recipe.held_out, recipe.test) == ("last", 0.0, True)
    for experiment, tested in (("comparison", ()), ("convergence", tuple(range(1, recipe.epochs + 1)))):
        rows = find(experiment).recipes(base_recipe(name, "ROOT", quick=False)).values()
        assert {(row.keep_epoch, row.tested_epochs) for row in rows} == {("last", tested)}


def test_scores_in_between_do_not_make_it_another_run() -> None:
    recipe = SETTINGS["cars-head"].recipe
    assert fingerprint(recipe) == fingerprint(recipe.changed({"tested_epochs": (1, 2)}))
    chosen = recipe.changed({"keep_epoch": "best"})
    assert fingerprint(chosen) != fingerprint(chosen.changed({"tested_epochs": (1, 2)})) != fingerprint(recipe)


def test_data_is_a_folder_or_one_that_holds_it(tmp_path: Path) -> None:
    (tmp_path / "Cars196").mkdir()
    assert base_recipe("cars-head", str(tmp_path), quick=False).data == str(tmp_path / "Cars196")
    assert base_recipe("cars-head", str(tmp_path / "Cars196"), quick=False).data == str(tmp_path / "Cars196")


class TestTheFrozenNetwork:
    @staticmethod
    def write(folder: Path, dataset: str) -> None:
        base = base_recipe(dataset, "", quick=False)
        scores = dict.fromkeys(("recall@1", "recall@2", "recall@4"), 0.5) | {"nmi": 0.6}
        made_by = {"commit": "c", "machine": "m"}
        for experiment, more in (("frozen", {"frozen": scores | {"recall@1": 0.4}}), ("ratio", {})):
            runs = [
                {"row": job.row, "seed": job.seed, "fingerprint": fingerprint(job.recipe), "scores": scores}
                | {"made_by": made_by, **more}
                for job in jobs_of(find(experiment).recipes(base), (0, 1))
            ]
            save_runs(folder / experiment / f"{dataset}.json", runs)

    def test_stands_on_top_of_every_table(self, tmp_path: Path) -> None:
        self.write(tmp_path, "cars-head")
        table = Section("ratio", "cars-head", "paper", tmp_path).table
        assert table.rows[0] == (frozen.FROZEN, "40.0 ± 0.0", "60.0 ± 0.0")
        assert table.rows[1][0] == "N 12, r 0.01"

    def test_head_and_small_share_the_network(self, tmp_path: Path) -> None:
        self.write(tmp_path, "cub-small")
        table = Section("ratio", "cub-small", "paper", tmp_path).table
        assert [row[:2] for row in table.rows[:2]] == [(frozen.FROZEN, "40.0 ± 0.0"), (frozen.HEAD, "50.0 ± 0.0")]
        assert f"| {frozen.FROZEN} | 40.0 ± 0.0 | 60.0 ± 0.0 |" in report(tmp_path)

    def test_is_the_floor_of_the_same_head_in_both_settings(self) -> None:
        (head,), (small,) = (
            find("frozen").rows(SETTINGS[name].recipe).values() for name in ("cars-head", "cars-small")
        )
        assert head.changed({"image_size": 112, "crop_scale": small.crop_scale}) == small
        assert head.baselines


def write_products(root: Path) -> None:
    """Stanford_Online_Products with 6 classes of 3 photos to train on and 6 to test on."""
    folder = root / "Stanford_Online_Products"
    for file, first in (("Ebay_train.txt", 1), ("Ebay_test.txt", 7)):
        lines = ["image_id class_id super_class_id path"]
        for number in range(18):
            path = f"bicycle_final/{first + number // 3}_{number % 3}.JPG"
            write_image(folder / path, size=(80, 70), seed=100 * first + number // 3)
            lines.append(f"{number + 1} {first + number // 3} 1 {path}")
        (folder / file).write_text("\n".join(lines) + "\n")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_miniature_sop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: None) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"classes": 6, "epochs": 1, "embedding_dim": 24, "image_size": 48, "workers": 0, "weights": "random.pth"}
    monkeypatch.setattr(settings, "QUICK", small)
    write_products(tmp_path)
    torch.save(BNInception().state_dict(), "random.pth")
    rows = ["proxygml", "ms"]
    main.main(["paper", "comparison", "--dataset", "sop", "--data", ".", "--quick", "--jobs", "1", "--only", *rows])
    runs = load_runs(tmp_path / "runs/quick/comparison/sop.json")
    assert sorted(run["row"] for run in runs) == sorted(rows)
    for run in runs:
        assert {"recall@1", "recall@10", "recall@100", "nmi"} <= run["scores"].keys()
    assert "| quoted: R@100 |" in (tmp_path / "runs/quick/comparison/sop.md").read_text()
    assert "ProxyGML is comparable to ms" in report(tmp_path / "runs/quick", quick=True)
