"""HDML on the N-pair loss, from "Hardness-Aware Deep Metric Learning" (Zheng et al., CVPR 2019).

Every negative is pulled towards its anchor, more as the loss falls. A generator maps the pulled embeddings back to
features, and the network's head maps these to the embeddings of synthetic tuples. The paper's symbols and our names:

    y               features    (B, F)      output of the trunk
    g               head                    BatchNorm1d, Linear: part of the network, z = g(y)
    z_i, z+_i       anchors, positives      (n, D) each, first and second image of each of n classes, not normalized
    d+_i, d-_ij     own, distances          |z_i - z+_i| (n, 1) and |z_i - z+_j| (n, n)
    z^_ij           pulled      (n, n, D)   z+_j, moved towards z_i if it is farther away than z+_i
    i               generator               Linear, ReLU, BatchNorm1d, Linear, in this order
    y', y~          rebuilt, synthetic      (B, F) from z, and (n + n n, F) from the anchors and from the pulled
    z~              -           (n + n n, D)  g(y~)
    J_avg, J_gen    means of `metric_history` and `generator_history`
    lambda          1 - reconstruction_share

The steps, as in the authors' code except for the differences listed in HDMLLoss:

    1   J_m = N-pair(z, z+)
    2   z^_ij = z_i + (d+_i + (d-_ij - d+_i) e^(-alpha / J_avg)) (z+_j - z_i) / d-_ij if d-_ij > d+_i, else z+_j
    3   y' = i(z), y~ = i(z_i and z^_ij)
    4   J_syn = N-pair(z~)
    5   J_metric = e^(-beta / J_gen) J_m + (1 - e^(-beta / J_gen)) J_syn
    6   J_gen = (1 - lambda) |y' - y|^2 + softmax_factor lambda (cross entropy of y~ by the classifier)
    7   J_ce = cross entropy of y by the classifier
    8   the network learns from J_metric, the generator from J_gen, the classifier from J_ce
    9   J_avg and J_gen are means over the last `window` batches
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from proxygml.losses.interface import check_magnitude, full_precision, require_not_negative, require_whole

HIDDEN = 512  # units of the generator
AUTHORS_BATCH = 128  # the batch size that beta is tuned to
START = 1e6  # initial value of both histories: nothing is pulled, and the plain N-pair loss has the weight e^-0.01


class Terms(NamedTuple):
    """Terms of the last loss, without weights and gradient; None if the batch had fewer than two pairs."""

    metric: Tensor | None  # J_m, the N-pair loss of the batch
    synthetic: Tensor | None  # J_syn, the N-pair loss of the synthetic tuples
    metric_weight: Tensor | None  # e^(-beta / J_gen), the weight of J_m
    reconstruction: Tensor | None  # sum of |y' - y|^2, scaled to a batch of 128
    generator_softmax: Tensor | None  # cross entropy of synthetic features: anchors plus pulled negatives
    classifier: Tensor  # J_ce


class HDMLLoss(nn.Module):
    """`loss(embeddings, labels)`: the last output of the watched network (B, D), labels (B,) in 0..C-1 -> scalar.

    Call `watch(network)` first: it registers the network's head, builds `generator` and `classifier` for the width of
    its trunk (unless `features` is set, to load a state), and then records the features of every training batch.

    The value is J_metric + J_gen + J_ce. The network has the gradient of J_metric only, the generator that of J_gen and
    the classifier that of J_ce, so one Adam equals the authors' three; `learning_rates` has the rates of the last two.
    Do not clip all gradients by one norm.

    The first two images of a class are its pair; classes with one image are left out of the tuples. All images are
    reconstructed and classified. With fewer than two pairs the value is J_ce. The order of images within a class
    matters. `regularization` is the value for CUB; for Cars it is 3e-3.

    Our choices, where the paper is open or we differ from the authors: their weight decay inside J_m is left to the
    optimizer, so J_avg lacks it too; J_avg is the mean of J_m times its weight, as in their code ("average metric loss"
    in the paper is from memory); the reconstruction error, a sum, is scaled by 128/B (a reconstruction), since beta is
    tuned to its size; histories start at 1e6; pulling is differentiated, distances included; synthetic features are
    normalized by their own statistics and do not change the head's running statistics.
    """

    metric_history: Tensor
    generator_history: Tensor

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        alpha: float = 90.0,
        beta: float = 1e4,
        reconstruction_share: float = 0.5,
        softmax_factor: float = 1e4,
        regularization: float = 1.5e-2,
        window: int = 64,
        features: int | None = None,
    ) -> None:
        super().__init__()
        require_whole(num_classes=num_classes, embedding_dim=embedding_dim, window=window)
        require_not_negative(alpha=alpha, beta=beta, softmax_factor=softmax_factor, regularization=regularization)
        if not 0 <= reconstruction_share <= 1:
            raise ValueError(f"expected reconstruction_share in 0..1, got {reconstruction_share}")
        self.num_classes, self.embedding_dim = num_classes, embedding_dim
        self.alpha, self.beta = alpha, beta
        self.reconstruction_share, self.softmax_factor = reconstruction_share, softmax_factor
        self.regularization = regularization
        self.learning_rates = {"generator": 1e-2, "classifier": 1e-3}
        self.last_terms: Terms | None = None
        for name in ("metric_history", "generator_history"):  # newest last
            self.register_buffer(name, torch.full((window,), START))
        self._watched: tuple[nn.Module, ...] = ()  # the head; in a tuple, so that it is not a submodule
        self._features: Tensor | None = None  # (B, F) of the last training batch
        if features is not None:
            self._build(features)

    def watch(self, network: nn.Module) -> None:
        """Register the network's head and record its inputs from now on; call it before you create the optimizer."""
        if getattr(network, "normalize", False):
            raise ValueError("expected a network with unnormalized embeddings: build it with normalize=False")
        if self._watched:
            raise ValueError("expected one network to watch, got a second: create a loss for each")
        head, width = cast(nn.Module, network.head), cast(Any, network.trunk).channels
        if not hasattr(self, "classifier"):
            self._build(width)
        if width != self.classifier.in_features:
            raise ValueError(f"expected a trunk with {self.classifier.in_features} channels, got one with {width}")
        self._watched = (head,)
        head.register_forward_pre_hook(self._record)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch that the watched network has just embedded."""
        features = self._pop_features(embeddings)  # (B, F)
        with full_precision(self, embeddings, labels) as (embeddings, labels):  # J_gen of about 1e5 overflows float16
            check_magnitude(embeddings)
            precision, features = embeddings.dtype, features.to(embeddings.dtype)
            weight, bias = self.classifier.weight.to(precision), self.classifier.bias.to(precision)
            classification = F.cross_entropy(F.linear(features, weight, bias), labels)  # step 7: J_ce

            first, second = pairs_of(labels)  # (n,) each
            if len(first) < 2:
                self.last_terms = Terms(None, None, None, None, None, classification.detach())
                return classification + 0 * embeddings.sum()
            anchors, positives = embeddings[first], embeddings[second]  # (n, D) each
            batch, sizes = len(embeddings), [len(first), len(first) ** 2]  # B and n, n n
            metric = n_pair(anchors, positives[None], self.regularization)  # step 1: J_m
            kept_gap = torch.exp(-self.alpha / self.metric_history.mean()).to(precision)
            pulled = pull(anchors, positives, kept_gap)  # (n, n, D), step 2
            sources = torch.cat([embeddings, anchors, pulled.flatten(0, 1)])  # (B + n + n n, D)

            synthetic = self._generate(sources, learn=False)[batch:]  # (n + n n, F), step 3, to train the network
            hard_anchors, hard = self._embed(synthetic).split(sizes)  # (n, D), (n n, D): z~
            synthetic_metric = n_pair(hard_anchors, hard.view_as(pulled), self.regularization)  # step 4: J_syn
            metric_weight = torch.exp(-self.beta / self.generator_history.mean()).to(precision)
            network_loss = metric_weight * metric + (1 - metric_weight) * synthetic_metric  # step 5: J_metric

            generated = self._generate(sources.detach(), learn=True)  # (B + n + n n, F), step 3, to train it
            reconstruction = AUTHORS_BATCH / batch * (generated[:batch] - features).square().sum()
            anchor_scores, pulled_scores = F.linear(generated[batch:], weight.detach(), bias.detach()).split(sizes)
            classes = labels[first]  # (n,)
            softmax = F.cross_entropy(anchor_scores, classes)
            softmax = softmax + F.cross_entropy(pulled_scores, classes.repeat(len(first)))  # z^_ij has class j
            softmax_weight = (1 - self.reconstruction_share) * self.softmax_factor
            generator_loss = self.reconstruction_share * reconstruction + softmax_weight * softmax  # step 6: J_gen

            append(self.metric_history, metric_weight * metric)  # step 9
            append(self.generator_history, generator_loss)
        terms = (metric, synthetic_metric, metric_weight, reconstruction, softmax, classification)
        self.last_terms = Terms(*(term.detach() for term in terms))
        return network_loss + generator_loss + classification  # step 8: each parameter has a gradient of one term

    def _build(self, features: int) -> None:
        """The modules that depend on the width of the trunk."""
        # Only batch statistics are used, and two passes in each step would track them twice.
        norm = nn.BatchNorm1d(HIDDEN, track_running_stats=False)
        self.generator = nn.Sequential(
            nn.Linear(self.embedding_dim, HIDDEN), nn.ReLU(), norm, nn.Linear(HIDDEN, features)
        )
        self.classifier = nn.Linear(features, self.num_classes)
        self.to(self.metric_history)  # its device and dtype

    def _record(self, head: nn.Module, inputs: tuple[Tensor]) -> None:
        """Hook of the head: record the features of a training batch, not of images that are only embedded."""
        if self.training and torch.is_grad_enabled():
            self._features = inputs[0].detach()

    def _pop_features(self, embeddings: Tensor) -> Tensor:
        """The recorded features (B, F) of these embeddings, which can be used once."""
        features, self._features = self._features, None
        if not self._watched:
            raise ValueError("expected a watched network: call loss.watch(network) before the first batch")
        if features is None:
            raise ValueError(
                "expected new embeddings of the watched network, but it has recorded no features: call the loss once "
                "after each pass through the network, with gradients enabled and the loss in training mode"
            )
        if len(features) != len(embeddings):
            raise ValueError(
                f"expected the last {len(features)} embeddings of the watched network, got {len(embeddings)}"
            )
        return features

    def _generate(self, sources: Tensor, *, learn: bool) -> Tensor:
        """Embeddings (rows, D) -> features (rows, F), with gradients of the generator only if `learn`."""
        state = {
            name: (parameter if learn else parameter.detach()).to(sources.dtype)
            for name, parameter in self.generator.named_parameters()
        }
        return functional_call(self.generator, state, sources)

    def _embed(self, features: Tensor) -> Tensor:
        """Synthetic features (rows, F) -> embeddings (rows, D) by the head, without changing its running statistics."""
        (head,) = self._watched
        state = {name: parameter.to(features.dtype) for name, parameter in head.named_parameters()}
        for name, buffer in head.named_buffers():
            state[name] = buffer.to(features.dtype if buffer.is_floating_point() else buffer.dtype, copy=True)
        embeddings = functional_call(head, state, features)
        self._features = None  # the hook saw synthetic features
        return embeddings


def pairs_of(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the first and second image of each class with at least two: labels (B,) -> (n,), (n,)."""
    order = labels.argsort(stable=True)  # (B,)
    ordered = labels[order]
    same = ordered[1:] == ordered[:-1]  # (B - 1,): this and the next have the same class
    starts = torch.ones_like(same)  # (B - 1,): this is the first of its class
    starts[1:] = ~same[:-1]
    return order[:-1][starts & same], order[1:][starts & same]


def n_pair(anchors: Tensor, candidates: Tensor, regularization: float) -> Tensor:
    """Mean cross entropy of candidate i for anchor i, plus regularized norms: (n, D), (n or 1, n, D) -> scalar.

    With a first axis of 1, all anchors have the same candidates.
    """
    scores = (candidates @ anchors[:, :, None]).squeeze(-1)  # (n, n)
    norms = anchors.square().sum(dim=-1).mean() + candidates.square().sum(dim=-1).mean()
    return F.cross_entropy(scores, torch.arange(len(anchors), device=anchors.device)) + regularization / 4 * norms


def pull(anchors: Tensor, positives: Tensor, kept_gap: Tensor | float) -> Tensor:
    """Every positive as a negative of every anchor, pulled towards it: (n, D), (n, D) -> (anchors n, positives n, D).

    A negative farther away than the anchor's own positive keeps the fraction `kept_gap` of the gap between the two
    distances; a nearer one, and the positive itself, do not move.
    """
    distances = (positives - anchors[:, None]).norm(dim=-1)  # (n, n): d-
    own = distances.diagonal()[:, None]  # (n, 1): d+
    farther = distances > own
    fraction = (own + (distances - own) * kept_gap) / distances.where(farther, 1)  # from anchor to negative
    return torch.lerp(anchors[:, None], positives, fraction.where(farther, 1)[:, :, None])


@torch.no_grad()
def append(history: Tensor, value: Tensor) -> None:
    """Append a scalar to a history (window,) in place and drop the oldest."""
    history.copy_(torch.cat([history[1:], value.to(history.dtype)[None]]))
