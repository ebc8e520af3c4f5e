"""A matrix for feature vectors that starts as a whitening, or principal directions, and learns with ProxyGML."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml.losses.proxygml.module import ProxyGMLLoss

PROXY_LEARNING_RATE = 1e-2  # proxies have unit length
FEWEST_STEPS = 16  # in an epoch: batches of few samples are smaller
LEAST_VARIANCE = 1e-6  # of the mean one
MOST_NEGATIVES = 100  # links to proxies of other classes
MOST_CLASSIFIED = 2_000  # proxies that a step's L^p is the mean of, drawn by chance among more: all cost C^2 N


def choose_links(num_classes: int, proxies_per_class: int) -> int:
    """k: all N proxies of a sample's own class and 0.3 C N of others, 100 at most and no more than there are.

    The paper's 0.05 C N is no more than N with up to 20 classes, and no negative would be linked.
    """
    wanted = min(MOST_NEGATIVES, max(1, round(0.3 * num_classes * proxies_per_class)))
    return proxies_per_class + min(wanted, (num_classes - 1) * proxies_per_class)


def make_loss(
    num_classes: int, *, width: int, proxies_per_class: int, links: int | None, proxy_weight: float, scale: float
) -> ProxyGMLLoss:
    """The loss for so many classes."""
    links = choose_links(num_classes, proxies_per_class) if links is None else links
    return ProxyGMLLoss(
        num_classes,
        width,
        proxies_per_class=proxies_per_class,
        links=links,
        proxy_weight=proxy_weight,
        scale=scale,
        proxy_rows=MOST_CLASSIFIED,
    )


class Moments:
    """Counts, sums and products of features that came in parts: what mean and variance within classes are made of."""

    def __init__(self, origin: np.ndarray) -> None:
        self.origin = origin.astype(np.float64)  # (D,), near their mean, about which squares lose few digits
        self.counts = np.zeros(0, np.int64)  # (C,)
        self.sums = np.zeros((0, len(origin)))  # (C, D)
        self.products = np.zeros((len(origin), len(origin)))  # (D, D)

    @classmethod
    def of(cls, features: np.ndarray, labels: np.ndarray) -> "Moments":
        """Of features (M, D) with labels (M,) in 0..C-1."""
        moments = cls(features.mean(axis=0))
        moments.add(features, labels)
        return moments

    def add(self, features: np.ndarray, labels: np.ndarray) -> None:
        """Of more features (M, D) with labels (M,), among which there may be new classes."""
        new = max(0, labels.max() + 1 - len(self.counts))
        self.counts, self.sums = np.pad(self.counts, (0, new)), np.pad(self.sums, ((0, new), (0, 0)))
        centred = features - self.origin  # (M, D)
        np.add.at(self.sums, labels, centred)
        self.counts += np.bincount(labels, minlength=len(self.counts))
        self.products += centred.T @ centred
        self._spectrum: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def mean(self) -> np.ndarray:
        """Of all features: (D,)."""
        return self.origin + self.sums.sum(axis=0) / self.total

    def within(self) -> np.ndarray:
        """Covariance of features about the mean of their class: (D, D)."""
        weighted = self.sums / np.sqrt(np.maximum(self.counts, 1))[:, None]  # (C, D)
        return (self.products - weighted.T @ weighted) / self.total

    def spectrum(self) -> tuple[np.ndarray, np.ndarray]:
        """Variances (D,) within classes, ascending, and their directions (D, D); kept, as it takes a while."""
        if self._spectrum is None:
            self._spectrum = np.linalg.eigh(self.within())
        return self._spectrum

    def between(self) -> np.ndarray:
        """Means of classes about the mean of all, (C, D), weighted so that b.T @ b is their covariance."""
        shares = np.maximum(self.counts, 1)[:, None]  # (C, 1)
        centred = self.sums / shares - self.sums.sum(axis=0) / self.total  # (C, D)
        return centred * np.sqrt(self.counts / self.total)[:, None]


def whitening(variances: np.ndarray, directions: np.ndarray, *, exponent: float, shrinkage: float) -> np.ndarray:
    """The matrix (D, D), symmetric, that takes variances (D,) in directions (D, D) to their power 1 - 2 exponent.

    Variances are first drawn to their mean; where there are none, as with one sample a class, it is the identity.
    """
    mean = variances.mean()
    if mean <= 0:
        return np.eye(len(variances))
    variances = np.maximum((1 - shrinkage) * variances / mean + shrinkage, LEAST_VARIANCE)
    return directions * variances**-exponent @ directions.T


def sharpening(between: np.ndarray, *, exponent: float) -> np.ndarray:
    """The matrix (D, D), symmetric, that stretches directions by (1 + v / mean v)^exponent, v the variance of means.

    Means of classes (C, D) are as `Moments.between` gives them.
    """
    _, deviations, directions = np.linalg.svd(between, full_matrices=False)  # (rank,), (rank, D)
    variances = deviations**2
    mean = max(variances.sum() / between.shape[1], np.finfo(float).tiny)
    return np.eye(between.shape[1]) + (directions.T * ((1 + variances / mean) ** exponent - 1)) @ directions


def transformed(features: np.ndarray, mean: np.ndarray, components: np.ndarray) -> np.ndarray:
    """Unit vectors (M, d): features (M, D) less their mean (D,), multiplied with components (d, D)."""
    vectors = (features - mean) @ components.T  # (M, d)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(vectors.dtype).tiny)


class Head:
    """Mean (D,), whitening and sharpening in one (D, D), and what learns: start + turn (D, d).

    The turn begins as zero. The start is the identity or, where the width d is smaller, the principal directions.
    """

    def __init__(
        self,
        moments: Moments,
        *,
        width: int,
        proxies_per_class: int,
        whiten: float,
        shrinkage: float,
        sharpen: float,
        learning_rate: float,
        batch_size: int,
        make_loss: Callable[[int], ProxyGMLLoss],
        seed: int,
    ) -> None:
        self.whiten, self.shrinkage, self.sharpen = whiten, shrinkage, sharpen
        self.learning_rate, self.batch_size, self.make_loss = learning_rate, batch_size, make_loss
        self.random = torch.Generator().manual_seed(seed)
        self.look_at(moments)
        features = len(self.mean)
        self.start = torch.eye(features)
        if width < features:
            means = moments.between() @ self.space  # (C, D)
            spread = self.space.T @ moments.within() @ self.space + 2 * means.T @ means  # (D, D): means count twice
            self.start = torch.from_numpy(np.linalg.eigh(spread)[1][:, -width:].copy()).float()  # (D, d)
        self.turn = torch.zeros_like(self.start, requires_grad=True)
        self.proxies = nn.Parameter(torch.empty(0, proxies_per_class, width))  # of the classes that it has met

    def look_at(self, moments: Moments) -> None:
        """Take mean, whitening and sharpening from what has been seen by now."""
        self.mean, self.seen = moments.mean(), moments.total
        white = whitening(*moments.spectrum(), exponent=self.whiten, shrinkage=self.shrinkage)
        self.space = white @ sharpening(moments.between() @ white, exponent=self.sharpen)

    def components(self) -> np.ndarray:
        """What features less their mean are multiplied with: (d, D)."""
        return (self.space @ (self.start + self.turn.detach()).double().numpy()).T

    def transform(self, features: np.ndarray) -> np.ndarray:
        """Features (M, D) in the space that it has by now: unit vectors (M, d)."""
        return transformed(features, self.mean, self.components())

    def learn(self, features: np.ndarray, labels: np.ndarray) -> None:
        """One epoch of features (M, D) with labels (M,) in 0..C-1, each of which it has met or meets now.

        Of a first class alone there is nothing to learn but proxies.
        """
        white = torch.from_numpy((features - self.mean) @ self.space)  # (M, D), float64, of any length
        samples = F.normalize(white, dim=1, eps=1e-300).float()  # (M, D)
        classes = torch.from_numpy(labels)
        order = torch.randperm(len(samples), generator=self.random)
        self._welcome(samples, classes, order)
        if len(self.proxies) < 2:
            return
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers are not ours to draw
            torch.set_rng_state(self.random.get_state())
            for rows in order.split(min(self.batch_size, -(-len(order) // FEWEST_STEPS))):
                loss = self.loss(samples[rows] @ (self.start + self.turn), classes[rows])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()

    def _welcome(self, samples: Tensor, labels: Tensor, order: Tensor) -> None:
        """Give new classes proxies, at samples of theirs."""
        known, num_classes = len(self.proxies), int(labels.max()) + 1
        if known >= num_classes:
            return
        order = order[labels[order].argsort(stable=True)]  # class by class
        counts = labels.bincount(minlength=num_classes)[known:, None]  # (new, 1)
        first = len(labels) - counts.flip(0).cumsum(0).flip(0)  # (new, 1): where the samples of a class begin
        places = first + torch.arange(self.proxies.shape[1]) % counts  # (new, N)
        with torch.no_grad():
            new = F.normalize(samples[order[places]] @ (self.start + self.turn), dim=-1)  # (new, N, d)
            self.proxies = nn.Parameter(torch.cat([self.proxies, new]))
        if num_classes < 2:
            return
        with torch.random.fork_rng(devices=[]):  # as above
            self.loss = self.make_loss(num_classes)
        self.loss.proxies = self.proxies
        groups = [
            # A step of Adam moves each of D entries of a column: divided by D, it turns a vector as far for any D.
            {"params": [self.turn], "lr": self.learning_rate / len(self.turn)},
            {"params": [self.proxies], "lr": PROXY_LEARNING_RATE},
        ]
        self.optimizer = torch.optim.Adam(groups, fused=True)
