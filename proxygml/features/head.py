"""The linear head of `ProxyGMLEmbedding`: whitening, sharpening, and a matrix trained with the ProxyGML loss."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.losses.proxygml.module import ProxyGMLLoss

PROXY_LEARNING_RATE = 1e-2  # proxies have unit length
MIN_STEPS = 16  # per epoch: small datasets get smaller batches
MIN_VARIANCE = 1e-6  # relative to the mean variance
MAX_NEGATIVE_LINKS = 100


def default_links(num_classes: int, proxies_per_class: int) -> int:
    """k: the N proxies of a sample's own class plus 0.3 C N others, at most 100 and at most all others.

    The paper's 0.05 C N is at most N for up to 20 classes and would link no negatives.
    """
    negatives = min(MAX_NEGATIVE_LINKS, max(1, round(0.3 * num_classes * proxies_per_class)))
    return proxies_per_class + min(negatives, (num_classes - 1) * proxies_per_class)


class Moments:
    """Running class counts, sums and products of features: the source of mean, within- and between-class covariance."""

    def __init__(self, features: np.ndarray, labels: np.ndarray) -> None:
        dim = features.shape[1]
        self.origin = features.mean(axis=0).astype(np.float64)  # (D,); squares about it lose few digits
        self.counts = np.zeros(0, np.int64)  # (C,)
        self.sums = np.zeros((0, dim))  # (C, D)
        self.products = np.zeros((dim, dim))  # (D, D)
        self.add(features, labels)

    def add(self, features: np.ndarray, labels: np.ndarray) -> None:
        """Add features (M, D) with labels (M,) in 0..C-1; labels may be new."""
        new = max(0, labels.max() + 1 - len(self.counts))
        self.counts, self.sums = np.pad(self.counts, (0, new)), np.pad(self.sums, ((0, new), (0, 0)))
        centered = features - self.origin  # (M, D)
        np.add.at(self.sums, labels, centered)
        self.counts += np.bincount(labels, minlength=len(self.counts))
        self.products += centered.T @ centered
        self._spectrum: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def mean(self) -> np.ndarray:
        """Mean feature (D,)."""
        return self.origin + self.sums.sum(axis=0) / self.total

    def within(self) -> np.ndarray:
        """Within-class covariance (D, D)."""
        weighted = self.sums / np.sqrt(np.maximum(self.counts, 1))[:, None]  # (C, D)
        return (self.products - weighted.T @ weighted) / self.total

    def spectrum(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues (D,), ascending, and eigenvectors (D, D) of `within`; cached."""
        if self._spectrum is None:
            self._spectrum = np.linalg.eigh(self.within())
        return self._spectrum

    def between(self) -> np.ndarray:
        """Centered and weighted class means b (C, D): b.T @ b is the between-class covariance."""
        means = self.sums / np.maximum(self.counts, 1)[:, None]  # (C, D)
        return (means - self.sums.sum(axis=0) / self.total) * np.sqrt(self.counts / self.total)[:, None]


def sampling_shrinkage(variances: np.ndarray, samples: int) -> float:
    """The shrinkage of a covariance with eigenvalues (D,) that its number of samples asks for.

    OAS, Chen et al., "Shrinkage algorithms for MMSE covariance estimation", 2010.
    """
    squared_mean, mean_square = variances.mean() ** 2, (variances**2).mean() / len(variances)
    spread = mean_square - squared_mean / len(variances)
    if spread <= 0:
        return 1.0
    return min(1.0, (mean_square + squared_mean) / ((samples + 1) * spread))


def whitening(variances: np.ndarray, directions: np.ndarray, *, exponent: float, shrinkage: float) -> np.ndarray:
    """Symmetric matrix (D, D) that raises variances (D,) along directions (D, D) to the power 1 - 2 exponent.

    Variances are first shrunk toward their mean. Without any variance, as with one sample per class, the identity.
    """
    mean = variances.mean()
    if mean <= 0:
        return np.eye(len(variances))
    variances = np.maximum((1 - shrinkage) * variances / mean + shrinkage, MIN_VARIANCE)
    return directions * variances**-exponent @ directions.T


def sharpening(between: np.ndarray, *, exponent: float) -> np.ndarray:
    """Symmetric matrix (D, D) that stretches directions by (1 + v / mean v)^exponent, v their between-class variance.

    `between` (C, D) comes from `Moments.between`.
    """
    _, deviations, directions = np.linalg.svd(between, full_matrices=False)  # (rank,), (rank, D)
    variances = deviations**2
    mean = max(variances.sum() / between.shape[1], np.finfo(float).tiny)
    return np.eye(between.shape[1]) + (directions.T * ((1 + variances / mean) ** exponent - 1)) @ directions


def project(features: np.ndarray, mean: np.ndarray, components: np.ndarray) -> np.ndarray:
    """Features (M, D) minus mean (D,), times components (d, D), as unit vectors (M, d)."""
    vectors = (features - mean) @ components.T  # (M, d)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(vectors.dtype).tiny)


class Head:
    """Mean (D,), whitening and sharpening as one matrix (D, D), and the trained matrix base + delta (D, d).

    delta starts at zero; base is the identity or, for d < D, the principal directions.
    """

    def __init__(
        self,
        moments: Moments,
        *,
        dim: int,
        whiten: float,
        shrinkage: float,
        sharpen: float,
        learning_rate: float,
        batch_size: int,
        proxies_per_class: int,
        make_loss: Callable[[int], ProxyGMLLoss],
        seed: int,
    ) -> None:
        self.whiten, self.shrinkage, self.sharpen = whiten, shrinkage, sharpen
        self.learning_rate, self.batch_size, self.make_loss = learning_rate, batch_size, make_loss
        self.generator = torch.Generator().manual_seed(seed)
        self.update(moments)
        self.base = torch.eye(len(self.mean))
        if dim < len(self.mean):
            means = moments.between() @ self.whitening  # (C, D)
            covariance = self.whitening.T @ moments.within() @ self.whitening + 2 * means.T @ means  # means count twice
            self.base = torch.from_numpy(np.linalg.eigh(covariance)[1][:, -dim:].copy()).float()  # (D, d)
        self.delta = torch.zeros_like(self.base, requires_grad=True)
        self.proxies = nn.Parameter(torch.empty(0, proxies_per_class, dim))  # grows with the classes

    def update(self, moments: Moments) -> None:
        """Recompute mean, whitening and sharpening from the features seen so far."""
        self.mean, self.seen = moments.mean(), moments.total
        variances, directions = moments.spectrum()
        shrinkage = max(self.shrinkage, sampling_shrinkage(variances, moments.total - int((moments.counts > 0).sum())))
        white = whitening(variances, directions, exponent=self.whiten, shrinkage=shrinkage)
        self.whitening = white @ sharpening(moments.between() @ white, exponent=self.sharpen)

    def components(self) -> np.ndarray:
        """The whole linear map (d, D), applied to centered features."""
        return (self.whitening @ (self.base + self.delta.detach()).double().numpy()).T

    def transform(self, features: np.ndarray) -> np.ndarray:
        """Unit vectors (M, d) of features (M, D)."""
        return project(features, self.mean, self.components())

    def train_epoch(self, features: np.ndarray, labels: np.ndarray) -> None:
        """One epoch on features (M, D) with labels (M,) in 0..C-1; new labels get proxies. Training needs 2 classes."""
        white = torch.from_numpy((features - self.mean) @ self.whitening)  # (M, D), float64
        samples = F.normalize(white, dim=1, eps=1e-300).float()  # (M, D)
        classes = torch.from_numpy(labels)
        order = torch.randperm(len(samples), generator=self.generator)
        self._add_classes(samples, classes, order)
        if len(self.proxies) < 2:
            return
        with torch.random.fork_rng(devices=[]):  # leaves the caller's random state alone
            torch.set_rng_state(self.generator.get_state())
            for rows in order.split(min(self.batch_size, -(-len(order) // MIN_STEPS))):
                loss = self.loss(samples[rows] @ (self.base + self.delta), classes[rows])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()

    def _add_classes(self, samples: Tensor, labels: Tensor, order: Tensor) -> None:
        """Initialize the proxies of new classes at their samples."""
        old, num_classes = len(self.proxies), int(labels.max()) + 1
        if old >= num_classes:
            return
        order = order[labels[order].argsort(stable=True)]  # grouped by class
        counts = labels.bincount(minlength=num_classes)[old:, None]  # (new, 1)
        first = len(labels) - counts.flip(0).cumsum(0).flip(0)  # (new, 1): first sample of each class
        chosen = first + torch.arange(self.proxies.shape[1]) % counts  # (new, N)
        with torch.no_grad():
            new = F.normalize(samples[order[chosen]] @ (self.base + self.delta), dim=-1)  # (new, N, d)
            self.proxies = nn.Parameter(torch.cat([self.proxies, new]))
        if num_classes < 2:
            return
        with torch.random.fork_rng(devices=[]):
            self.loss = self.make_loss(num_classes)
        self.loss.proxies = self.proxies
        groups = [
            # Adam moves each of the D entries of a column: divided by D, a step rotates a vector equally for any D.
            {"params": [self.delta], "lr": self.learning_rate / len(self.delta)},
            {"params": [self.proxies], "lr": PROXY_LEARNING_RATE},
        ]
        self.optimizer = torch.optim.Adam(groups, fused=True)
