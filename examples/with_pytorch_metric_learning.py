"""ProxyGML with pytorch-metric-learning: its sampler, trainer and accuracy with our loss as `metric_loss`."""

import logging

import torch
from pytorch_metric_learning import samplers, trainers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch.utils.data import TensorDataset

from proxygml import ProxyGMLLoss

logging.getLogger("PML").setLevel(logging.ERROR)  # no message per epoch
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def vectors(classes: int, images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic data, replace with yours: 16 informative features and 48 louder, uninformative ones."""
    labels = torch.arange(classes).repeat_interleave(images)
    informative = torch.randn(classes, 16)[labels] + 0.3 * torch.randn(len(labels), 16)
    return torch.cat([informative, 2 * torch.randn(len(labels), 48)], dim=1), labels


def recall(network: torch.nn.Module, features: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        embeddings = torch.nn.functional.normalize(network(features.to(device)))
    accuracy = AccuracyCalculator(include=("precision_at_1",), k=1)
    return accuracy.get_accuracy(embeddings, labels.to(device))["precision_at_1"]


seen, unseen = vectors(classes=50, images=12), vectors(classes=50, images=12)
trunk, embedder = torch.nn.Linear(64, 64).to(device), torch.nn.Linear(64, 32).to(device)
loss = ProxyGMLLoss(num_classes=50, embedding_dim=32, proxies_per_class=2, ratio=0.2).to(device)
print(f"Recall@1 of unseen classes before: {recall(torch.nn.Sequential(trunk, embedder), *unseen):.2f}")

trainers.MetricLossOnly(
    models={"trunk": trunk, "embedder": embedder},
    optimizers={
        "trunk_optimizer": torch.optim.Adam(trunk.parameters(), 1e-3),
        "embedder_optimizer": torch.optim.Adam(embedder.parameters(), 1e-3),
        "metric_loss_optimizer": torch.optim.Adam(loss.parameters(), 3e-2),  # the proxies
    },
    batch_size=60,
    loss_funcs={"metric_loss": loss},
    dataset=TensorDataset(*seen),
    sampler=samplers.MPerClassSampler(seen[1], m=4, batch_size=60, length_before_new_iter=600),
    data_device=device,
    dataloader_num_workers=0,
    freeze_these=(),
).train(num_epochs=20)
print(f"Recall@1 of unseen classes after:  {recall(torch.nn.Sequential(trunk, embedder), *unseen):.2f}")
