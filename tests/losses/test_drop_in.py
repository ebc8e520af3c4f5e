"""ProxyGMLLoss inside pytorch-metric-learning."""

import logging

import pytest
import torch
from pytorch_metric_learning import trainers
from torch.utils.data import TensorDataset

from proxygml import ProxyGMLLoss


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # that library's own
def test_the_librarys_own_trainer_trains_with_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    torch.manual_seed(0)
    centers = torch.randn(4, 10)
    labels = torch.arange(64) % 4
    data = TensorDataset(centers[labels] + 0.3 * torch.randn(64, 10), labels)
    trunk, embedder = torch.nn.Linear(10, 8), torch.nn.Linear(8, 6)
    loss = ProxyGMLLoss(4, 6, proxies_per_class=2, ratio=1)
    values = []
    trainers.MetricLossOnly(
        models={"trunk": trunk, "embedder": embedder},
        optimizers={
            "trunk_optimizer": torch.optim.Adam(trunk.parameters(), 1e-2),
            "embedder_optimizer": torch.optim.Adam(embedder.parameters(), 1e-2),
            "metric_loss_optimizer": torch.optim.Adam(loss.parameters(), 3e-2),
        },
        batch_size=16,
        loss_funcs={"metric_loss": loss},
        dataset=data,
        data_device=torch.device("cpu"),
        dataloader_num_workers=0,
        end_of_iteration_hook=lambda trainer: values.append(trainer.losses["metric_loss"].item()),
        freeze_these=(),
    ).train(num_epochs=10)
    assert len(values) == 40
    assert sum(values[-4:]) < 0.8 * sum(values[:4])


def test_extra_arguments_of_pml() -> None:
    loss = ProxyGMLLoss(4, 6, proxies_per_class=2, ratio=1)
    embeddings, labels = torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0])
    pairs = (torch.tensor([0]), torch.tensor([4]), torch.tensor([0]), torch.tensor([1]))
    plain = loss(embeddings, labels)
    assert loss(embeddings, labels, pairs) == plain
    assert loss(embeddings, labels, indices_tuple=None, ref_emb=torch.randn(5, 6), ref_labels=labels) == plain
