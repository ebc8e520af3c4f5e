"""ProxyGML with Lightning: as a submodule, the loss is moved, trained and saved with the network."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from proxygml import ProxyGMLLoss, evaluate


class Embedding(lightning.LightningModule):
    """A network and its proxies; checkpoints contain both."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
        self.loss = ProxyGMLLoss(num_classes=classes, embedding_dim=32, proxies_per_class=2, ratio=0.2)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        features, labels = batch
        value = self.loss(self.network(features), labels)
        self.log("loss", value)
        return value

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        features, labels = batch  # one batch with all samples: each is compared with all others
        self.log("recall_at_1", evaluate(self.network(features), labels, cluster=False).recall[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [
            {"params": self.network.parameters(), "lr": 1e-3},
            {"params": self.loss.parameters(), "lr": 3e-2},  # the proxies
        ]
        return torch.optim.Adam(groups)


def vectors(classes: int, images: int) -> TensorDataset:
    """Synthetic data, replace with yours: 16 informative features and 48 louder, uninformative ones."""
    labels = torch.arange(classes).repeat_interleave(images)
    informative = torch.randn(classes, 16)[labels] + 0.3 * torch.randn(len(labels), 16)
    return TensorDataset(torch.cat([informative, 2 * torch.randn(len(labels), 48)], dim=1), labels)


lightning.seed_everything(0, verbose=False)
seen, unseen = vectors(classes=50, images=12), vectors(classes=50, images=12)
model = Embedding(classes=50)
trainer = lightning.Trainer(
    max_epochs=20,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=1,
)
validation = DataLoader(unseen, batch_size=len(unseen))
(before,) = trainer.validate(model, validation, verbose=False)
trainer.fit(model, DataLoader(seen, batch_size=60, shuffle=True))
(after,) = trainer.validate(model, validation, verbose=False)
print(f"Recall@1 of unseen classes: {before['recall_at_1']:.2f} before, {after['recall_at_1']:.2f} after")
