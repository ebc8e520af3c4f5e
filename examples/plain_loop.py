"""ProxyGML in a plain PyTorch training loop: the proxies are a second parameter group."""

import torch

from proxygml import ProxyGMLLoss

torch.manual_seed(0)
classes, dim = 20, 64
centers = torch.randn(classes, dim)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic data, replace with yours: noisy features around a center for each class."""
    labels = torch.randint(classes, (size,))
    return centers[labels] + 2 * torch.randn(size, dim), labels


network = torch.nn.Sequential(torch.nn.Linear(dim, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
loss = ProxyGMLLoss(num_classes=classes, embedding_dim=32, proxies_per_class=3, ratio=0.2)
optimizer = torch.optim.Adam(
    [{"params": network.parameters(), "lr": 1e-3}, {"params": loss.parameters(), "lr": 3e-2}]  # the proxies
)

for step in range(1, 201):
    features, labels = batch(32)
    value = loss(network(features), labels)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    if step % 50 == 0:
        terms = loss.last_terms
        print(f"step {step}: loss {value:.3f} = {terms.sample_loss:.3f} + 0.3 x {terms.proxy_loss:.3f}")
