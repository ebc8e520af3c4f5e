"""ProxyGML on feature vectors as a scikit-learn transformer: `ProxyGMLEmbedding().fit(X, y).transform(X)`."""

from collections.abc import Iterable
from itertools import product

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from proxygml.evaluation import evaluate
from proxygml.features.head import Head, Moments, default_links, project
from proxygml.losses.interface import require_not_negative, require_positive, require_whole
from proxygml.losses.proxygml.module import ProxyGMLLoss

DTYPES = [np.float32, np.float64]  # others, such as float16, are converted to the first
MIN_CLASSES = 4  # fewer: no class is held out
PATIENCE = 6  # epochs without a better score on held-out classes
MAX_HELD_OUT_SAMPLES = 5_000
MAX_PROXY_ROWS = 2_000  # proxies sampled per step for L^p; all of them cost C^2 N
WHITENINGS, SHARPENINGS = (0.0, 0.25, 0.5), (0.0, 0.125, 0.25, 0.5, 1.0, 2.0)  # mildest first: it wins ties
DEFAULT_WHITENING, DEFAULT_SHARPENING = 0.25, 0.125  # without held-out classes


class ProxyGMLEmbedding(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Linear embedding of feature vectors that generalizes to classes not seen in `fit`.

    A transformed vector is A (f(x) - mean), scaled to unit length; f raises the features to a power. The matrix A
    starts as a whitening of the within-class variance and a stretch of the between-class variance. The ProxyGML loss
    then trains it as long as held-out classes improve. Compare transformed vectors by cosine or Euclidean distance.

    Parameters
    ----------
    n_components : dimension of the embedding; None keeps that of the features.
    proxies_per_class, proxy_weight, scale : see `ProxyGMLLoss`.
    links : proxies linked to each sample; None uses `proxygml.features.head.default_links`.
    power : exponent of the features, sign preserved; None is 0.5 if no feature is negative, as after a ReLU, else 1.
    whitening : exponent of the within-class whitening: 0 for none, 0.5 for equal variance in all directions.
    sharpening : exponent of the stretch of between-class directions, 0 for none. For both, None selects the best for
        held-out classes among `WHITENINGS` and `SHARPENINGS` (without held-out classes: 0.25 and 0.125).
    shrinkage : shrinkage of the within-class variance toward its mean, 0 to 1.
    epochs : maximum number of epochs; `partial_fit` trains for one.
    learning_rate : Adam's learning rate for A, divided by n_features.
    batch_size : maximum batch size; an epoch has at least 16 steps.
    held_out : fraction of the classes (at least two) that select whitening, sharpening and the number of epochs. With
        0, or fewer than four classes, all epochs are trained.
    random_state : seed. The result depends on it and on the order of the samples.
    progress : show a progress bar.

    Attributes
    ----------
    components_ : A, (n_components, n_features). mean_ : (n_features,).
    power_, whitening_, sharpening_ : the values used.
    classes_ : labels. n_iter_ : epochs trained. held_out_score_ : mean of Recall@1 and MAP@R of the held-out classes in
    percent, before training and after every epoch; empty without held-out classes.
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        proxies_per_class: int = 4,
        links: int | None = None,
        proxy_weight: float = 0.3,
        scale: float = 4.0,
        power: float | None = None,
        whitening: float | None = None,
        shrinkage: float = 0.3,
        sharpening: float | None = None,
        epochs: int = 40,
        learning_rate: float = 0.05,
        batch_size: int = 256,
        held_out: float = 0.25,
        random_state: int | np.random.RandomState | None = None,
        progress: bool = False,
    ) -> None:
        self.n_components = n_components
        self.proxies_per_class = proxies_per_class
        self.links = links
        self.proxy_weight = proxy_weight
        self.scale = scale
        self.power = power
        self.whitening = whitening
        self.shrinkage = shrinkage
        self.sharpening = sharpening
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.held_out = held_out
        self.random_state = random_state
        self.progress = progress

    def fit(self, X: np.ndarray, y: np.ndarray) -> "ProxyGMLEmbedding":  # noqa: N803 (scikit-learn's name)
        """Fit features X (M, n_features) with labels y (M,)."""
        features, y = self._validate(X, y, first=True)
        self.__dict__.pop("_stream", None)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("expected at least two classes, got 1 class")
        rng = check_random_state(self.random_state)
        self.n_iter_ = self._select_epochs(features, labels, rng)
        head = self._new_head(Moments(features, labels), rng.randint(2**31 - 1))
        for _ in self._track(range(self.n_iter_), "fitting"):
            head.train_epoch(features, labels)
        return self._set_result(head)

    def partial_fit(self, X: np.ndarray, y: np.ndarray) -> "ProxyGMLEmbedding":  # noqa: N803
        """Train one epoch on the next part of a stream; it may contain new classes.

        Mean and whitening cover all parts so far and are updated each time the number of samples has doubled. The first
        call, or the first after `fit`, starts a stream.
        """
        first = not hasattr(self, "_stream")
        features, y = self._validate(X, y, first=first)
        old = np.array([], y.dtype) if first else self.classes_
        if y.dtype.kind != old.dtype.kind:  # numpy would convert both to float or str and merge different labels
            raise ValueError(f"expected labels of type {old.dtype} as before, got {y.dtype}: convert them")
        self.classes_ = np.concatenate([old, np.setdiff1d(y, old)])  # in order of appearance
        order = np.argsort(self.classes_, kind="stable")
        labels = order[np.searchsorted(self.classes_, y, sorter=order)]  # (M,)
        if first:
            moments = Moments(features, labels)
            head = self._new_head(moments, check_random_state(self.random_state).randint(2**31 - 1))
            self._stream = moments, head
            self.n_iter_ = 0
            self.held_out_score_: list[float] = []
        else:
            moments, head = self._stream
            moments.add(features, labels)
            if moments.total >= 2 * head.seen:
                head.update(moments)
        head.train_epoch(features, labels)
        self.n_iter_ += 1
        return self._set_result(head)

    def transform(self, X: np.ndarray) -> np.ndarray:  # noqa: N803
        """Unit vectors (M, n_components) of features X (M, n_features)."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=DTYPES)  # noqa: N806
        return project(_signed_power(X, self.power_), self.mean_, self.components_).astype(X.dtype)

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _validate(self, X: np.ndarray, y: np.ndarray, *, first: bool) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
        """Features (M, D) raised to the power, and labels (M,), after a check of both and of all parameters."""
        X, y = validate_data(self, X, y, reset=first, dtype=DTYPES, ensure_min_samples=1 + first)  # noqa: N806
        check_classification_targets(y)
        if y.dtype.kind == "u" and y.max() < 2**63:
            y = y.astype(np.int64)
        require_whole(
            proxies_per_class=self.proxies_per_class,
            n_components=self._dim,
            epochs=self.epochs,
            batch_size=self.batch_size,
        )
        require_positive(learning_rate=self.learning_rate)
        self.whitening_ = DEFAULT_WHITENING if self.whitening is None else self.whitening
        self.sharpening_ = DEFAULT_SHARPENING if self.sharpening is None else self.sharpening
        require_not_negative(
            whitening=self.whitening_, sharpening=self.sharpening_, shrinkage=self.shrinkage, held_out=self.held_out
        )
        if self._dim > X.shape[1]:
            raise ValueError(f"expected n_components up to {X.shape[1]}, the number of features, got {self._dim}")
        if self.held_out >= 1:
            raise ValueError(f"expected held_out as a fraction below 1, got {self.held_out}")
        if self.shrinkage > 1:
            raise ValueError(f"expected shrinkage from 0 to 1, got {self.shrinkage}")
        if first:
            if (X[0] == X).all():
                raise ValueError(f"expected features that vary, got {len(X)} equal samples")
            largest = float(np.abs(X).max())
            if not 1e-100 <= largest <= 1e100:  # squares would be 0 or infinite
                raise ValueError(f"expected features between 1e-100 and 1e100, got up to {largest:.3g}: scale them")
            self.power_ = (0.5 if X.min() >= 0 else 1.0) if self.power is None else self.power
            require_positive(power=self.power_)
        return _signed_power(X, self.power_), y

    @property
    def _dim(self) -> int:
        return self.n_features_in_ if self.n_components is None else self.n_components

    def _make_loss(self, num_classes: int) -> ProxyGMLLoss:
        return ProxyGMLLoss(
            num_classes,
            self._dim,
            proxies_per_class=self.proxies_per_class,
            links=default_links(num_classes, self.proxies_per_class) if self.links is None else self.links,
            proxy_weight=self.proxy_weight,
            scale=self.scale,
            proxy_rows=MAX_PROXY_ROWS,
        )

    def _new_head(self, moments: Moments, seed: int) -> Head:
        return Head(
            moments,
            dim=self._dim,
            whiten=self.whitening_,
            shrinkage=self.shrinkage,
            sharpen=self.sharpening_,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            proxies_per_class=self.proxies_per_class,
            make_loss=self._make_loss,
            seed=seed,
        )

    def _select_epochs(self, features: np.ndarray, labels: np.ndarray, rng: np.random.RandomState) -> int:
        """The number of epochs with the best score on held-out classes, training on the others."""
        self.held_out_score_ = []
        if len(self.classes_) < MIN_CLASSES or self.held_out == 0:
            return self.epochs
        drawn = rng.permutation(len(self.classes_))[: max(2, round(self.held_out * len(self.classes_)))]
        held_out = np.isin(labels, drawn)  # (M,)
        test, test_labels = features[held_out][:MAX_HELD_OUT_SAMPLES], labels[held_out][:MAX_HELD_OUT_SAMPLES]
        features, labels = features[~held_out], np.unique(labels[~held_out], return_inverse=True)[1]
        moments = Moments(features, labels)
        self._select_whitening(moments, test, test_labels)
        head = self._new_head(moments, rng.randint(2**31 - 1))
        for epoch in self._track(range(self.epochs + 1), "early stopping"):
            self.held_out_score_.append(_score(head.transform(test), test_labels))
            best = int(np.argmax(self.held_out_score_))
            if epoch == self.epochs or epoch - best >= PATIENCE:
                break
            head.train_epoch(features, labels)
        return best

    def _select_whitening(self, moments: Moments, test: np.ndarray, test_labels: np.ndarray) -> None:
        """Set the whitening and sharpening that score best on held-out features test (M, D), where not given."""
        scores = {}
        whitenings = WHITENINGS if self.whitening is None else [self.whitening]
        for pair in product(whitenings, SHARPENINGS if self.sharpening is None else [self.sharpening]):
            self.whitening_, self.sharpening_ = pair
            scores[pair] = _score(self._new_head(moments, seed=0).transform(test), test_labels)
        self.whitening_, self.sharpening_ = max(scores, key=scores.__getitem__)

    def _track(self, epochs: range, description: str) -> Iterable[int]:
        if not self.progress:
            return epochs
        from rich.progress import track

        return track(epochs, description)

    def _set_result(self, head: Head) -> "ProxyGMLEmbedding":
        self.mean_, self.components_ = head.mean, head.components()
        return self


def _signed_power(features: np.ndarray, power: float) -> np.ndarray:
    return features if power == 1 else np.sign(features) * np.abs(features) ** power


def _score(vectors: np.ndarray, labels: np.ndarray) -> float:
    """Mean of Recall@1 and MAP@R in percent of unit vectors (M, d) with labels (M,)."""
    scores = evaluate(vectors, labels, recall_at=(1,), cluster=False)
    return 50 * (scores.recall[1] + scores.map_at_r)
