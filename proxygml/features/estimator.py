"""ProxyGML on feature vectors as a scikit-learn transformer: `ProxyGMLEmbedding().fit(X, y).transform(X)`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from proxygml.display import Progress, counted, shown
from proxygml.features.head import Head, Moments, default_links, project
from proxygml.features.selection import Selection, select
from proxygml.features.storage import read_space, write_space
from proxygml.losses.interface import require_not_negative, require_positive, require_whole
from proxygml.losses.proxygml.module import ProxyGMLLoss

DTYPES = [np.float32, np.float64]  # others, such as float16, are converted to the first
# With fewer classes, those held out are too few to choose by: stretching the directions between 10 species of birds
# lowered Recall@1 on 20 others from 84 % to 60 %, though 3 held-out ones gained. With 10 images of each of 40 species,
# what 100 held-out images chose lowered it by 1.4 points, and the defaults raised it by 1.3; with 30 images of each,
# the choice raised it by 0.6 and the defaults by 1.5.
MIN_CLASSES, MIN_SHARPENED, MIN_HELD_OUT = 20, 60, 200  # classes, classes, samples
MAX_PROXY_ROWS = 2_000  # proxies sampled per step for L^p; all of them cost C^2 N
WHITENINGS, SHARPENINGS = (0.0, 0.25, 0.5), (0.0, 0.125, 0.25, 0.5, 1.0, 2.0)  # mildest first: it wins ties
DEFAULT_WHITENING, DEFAULT_SHARPENING = 0.25, 0.0  # without held-out classes
FITTED = {  # attributes that are saved
    *("mean_", "components_", "power_", "whitening_", "sharpening_", "classes_", "n_iter_"),
    *("held_out_score_", "held_out_scores_", "feature_names_in_"),
}


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
        held-out classes among `WHITENINGS` and `SHARPENINGS`. Without held-out classes, whitening is 0.25; with fewer
        than 60 classes, sharpening is 0.
    shrinkage : shrinkage of the within-class variance toward its mean, 0 to 1; more where samples are few.
    epochs : maximum number of epochs; `partial_fit` trains for one.
    learning_rate : Adam's learning rate for A, divided by n_features.
    batch_size : maximum batch size; an epoch has at least 16 steps.
    held_out : fraction of the classes (at least two) that select whitening, sharpening and the number of epochs. With
        0, fewer than 20 classes, or fewer than 200 samples of the held-out classes, all epochs are trained.
    random_state : seed. The result depends on it and on the order of the samples.
    progress : show a progress bar on a terminal, or call this with (activity, done, total, note).

    Attributes
    ----------
    components_ : A, (n_components, n_features). mean_ : (n_features,).
    power_, whitening_, sharpening_ : the values used.
    classes_ : labels. n_iter_ : epochs trained. held_out_score_ : mean of Recall@1 and MAP@R of the held-out classes in
    percent, before training and after every epoch; empty without held-out classes. held_out_scores_ : `Scores` of these
    classes by their "features", compared by cosine, and by "whitened" and "trained" vectors, before training and after.
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
        progress: bool | Progress = False,
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
        X, y = self._validate(X, y, first=True)  # noqa: N806
        features = _signed_power(X, self.power_)
        self.__dict__.pop("_stream", None)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("expected at least two classes, got 1 class")
        rng = check_random_state(self.random_state)
        chosen = self._select(X, features, labels, rng)
        self.whitening_, self.sharpening_, self.n_iter_ = chosen.whitening, chosen.sharpening, chosen.epochs
        self.held_out_score_, self.held_out_scores_ = chosen.history, chosen.scores
        head = self._new_head(Moments(features, labels), self.whitening_, self.sharpening_, rng.randint(2**31 - 1))
        for _ in self._track(range(self.n_iter_), "fitting"):
            head.train_epoch(features, labels)
        return self._set_result(head)

    def partial_fit(self, X: np.ndarray, y: np.ndarray) -> "ProxyGMLEmbedding":  # noqa: N803
        """Train one epoch on the next part of a stream; it may contain new classes.

        Mean and whitening cover all parts so far and are updated each time the number of samples has doubled. The first
        call, or the first after `fit`, starts a stream.
        """
        first = not hasattr(self, "_stream")
        X, y = self._validate(X, y, first=first)  # noqa: N806
        features = _signed_power(X, self.power_)
        old = np.array([], y.dtype) if first else self.classes_
        if y.dtype.kind != old.dtype.kind:  # numpy would convert both to float or str and merge different labels
            raise ValueError(f"expected labels of type {old.dtype} as before, got {y.dtype}: convert them")
        self.classes_ = np.concatenate([old, np.setdiff1d(y, old)])  # in order of appearance
        order = np.argsort(self.classes_, kind="stable")
        labels = order[np.searchsorted(self.classes_, y, sorter=order)]  # (M,)
        if first:
            moments = Moments(features, labels)
            seed = check_random_state(self.random_state).randint(2**31 - 1)
            head = self._new_head(moments, self.whitening_, self.sharpening_, seed)
            self._stream = moments, head
            self.n_iter_ = 0
            self.held_out_score_, self.held_out_scores_ = [], {}
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

    def save(self, path: str | Path, *, features_model: str = "") -> None:
        """Write a folder that `load` and `proxygml transform` read: safetensors and JSON.

        `features_model` is the id of the network that computed the features (`Embeddings.model`), if known.
        `partial_fit` starts over after loading.
        """
        check_is_fitted(self)
        fitted = {name: getattr(self, name) for name in FITTED if hasattr(self, name)}
        write_space(Path(path), self.get_params(), fitted, features_model)

    @classmethod
    def load(cls, path: str | Path) -> "ProxyGMLEmbedding":
        """What `save` wrote."""
        parameters, fitted = read_space(Path(path))
        model = cls().set_params(**parameters)
        for name in FITTED & fitted.keys():
            setattr(model, name, fitted[name])
        model.n_features_in_ = len(model.mean_)
        return model

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _validate(self, X: np.ndarray, y: np.ndarray, *, first: bool) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
        """Features (M, D) and labels (M,), after a check of both and of all parameters."""
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
                raise ValueError(
                    f"expected features that vary, got {counted(len(X), 'equal sample')}: are all images the same?"
                )
            largest = float(np.abs(X).max())
            if not 1e-100 <= largest <= 1e100:  # squares would be 0 or infinite
                raise ValueError(f"expected features between 1e-100 and 1e100, got up to {largest:.3g}: scale them")
            self.power_: float = (0.5 if X.min() >= 0 else 1.0) if self.power is None else self.power
            require_positive(power=self.power_)
        return X, y

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

    def _new_head(self, moments: Moments, whitening: float, sharpening: float, seed: int) -> Head:
        return Head(
            moments,
            dim=self._dim,
            whiten=whitening,
            shrinkage=self.shrinkage,
            sharpen=sharpening,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            proxies_per_class=self.proxies_per_class,
            make_loss=self._make_loss,
            seed=seed,
        )

    def _select(
        self, given: np.ndarray, features: np.ndarray, labels: np.ndarray, rng: np.random.RandomState
    ) -> Selection:
        """What held-out classes choose, if there are any; features (M, D) before and after the power."""
        if len(self.classes_) < MIN_CLASSES or self.held_out == 0:
            return Selection(self.whitening_, self.sharpening_, self.epochs)
        drawn = rng.permutation(len(self.classes_))[: max(2, round(self.held_out * len(self.classes_)))]
        held_out = np.isin(labels, drawn)
        if held_out.sum() < MIN_HELD_OUT:
            return Selection(self.whitening_, self.sharpening_, self.epochs)
        seed, many = rng.randint(2**31 - 1), len(self.classes_) >= MIN_SHARPENED
        return select(
            given,
            features,
            labels,
            held_out,
            whitenings=WHITENINGS if self.whitening is None else [self.whitening],
            sharpenings=SHARPENINGS if self.sharpening is None and many else [self.sharpening_],
            epochs=self._track(range(self.epochs + 1), "early stopping"),
            new_head=lambda moments, whitening, sharpening: self._new_head(moments, whitening, sharpening, seed),
        )

    def _track(self, epochs: range, description: str) -> Iterator[int]:
        with shown(self.progress) as report:
            for done, epoch in enumerate(epochs, 1):
                yield epoch
                report(description, done, len(epochs), "")

    def _set_result(self, head: Head) -> "ProxyGMLEmbedding":
        self.mean_ = head.mean
        self.components_ = np.ascontiguousarray(head.components())  # as loaded: other strides round differently
        return self


def _signed_power(features: np.ndarray, power: float) -> np.ndarray:
    return features if power == 1 else np.sign(features) * np.abs(features) ** power
