"""ProxyGML with open-metric-learning (OML): its dataset, sampler, extractor and metrics with our loss.

OML 4.0 works with NumPy 2, but requires NumPy 1 and torchvision, so install it without dependencies:

    pip install --no-deps open-metric-learning==4.0.0 omegaconf antlr4-python3-runtime==4.9.3 validators gdown
    pip install beautifulsoup4
"""

import numpy as np
import torch
from oml.functional.metrics import calc_retrieval_metrics
from oml.interfaces.datasets import ILabeledDataset
from oml.interfaces.models import IExtractor
from oml.samplers.balance import BalanceSampler

from proxygml import ProxyGMLLoss

torch.manual_seed(0)
np.random.seed(0)  # noqa: NPY002, the sampler uses it


class Vectors(ILabeledDataset):
    """Synthetic data, replace with yours: 16 informative features and 48 louder, uninformative ones."""

    input_tensors_key, index_key = "input_tensors", "idx"

    def __init__(self, classes: int, images: int) -> None:
        self.labels = torch.arange(classes).repeat_interleave(images)
        informative = torch.randn(classes, 16)[self.labels] + 0.3 * torch.randn(len(self.labels), 16)
        self.features = torch.cat([informative, 2 * torch.randn(len(self.labels), 48)], dim=1)
        self.extra_data = {}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor | int]:
        return {self.input_tensors_key: self.features[item], self.labels_key: self.labels[item], self.index_key: item}

    def get_labels(self) -> np.ndarray:
        return self.labels.numpy()


class Extractor(IExtractor):
    """A small network, in place of e.g. OML's `ViTExtractor.from_pretrained(...)`."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, self.feat_dim))

    @property
    def feat_dim(self) -> int:
        return 32

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.network(features)


@torch.no_grad()
def recall(extractor: Extractor, data: Vectors) -> float:
    embeddings = torch.nn.functional.normalize(extractor.extract(data.features))
    nearest = (embeddings @ embeddings.T).fill_diagonal_(-2).topk(1).indices
    relevant = [(data.labels == label).nonzero()[:, 0] for label in data.labels]
    relevant = [others[others != query] for query, others in enumerate(relevant)]
    metrics = calc_retrieval_metrics(
        list(nearest), relevant, cmc_top_k=(1,), precision_top_k=(), map_top_k=(), verbose=False
    )
    return float(metrics["cmc"][1])


seen, unseen = Vectors(classes=50, images=12), Vectors(classes=50, images=12)
extractor = Extractor().train()
criterion = ProxyGMLLoss(num_classes=50, embedding_dim=extractor.feat_dim, proxies_per_class=2, ratio=0.2)
optimizer = torch.optim.Adam(
    [{"params": extractor.parameters(), "lr": 1e-3}, {"params": criterion.parameters(), "lr": 3e-2}]
)
sampler = BalanceSampler(seen.get_labels(), n_labels=10, n_instances=6)
loader = torch.utils.data.DataLoader(seen, batch_sampler=sampler)

before = recall(extractor, unseen)
for _ in range(40):
    for batch in loader:
        loss = criterion(extractor(batch["input_tensors"]), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"Recall@1 of unseen classes: {before:.2f} before, {recall(extractor, unseen):.2f} after")
