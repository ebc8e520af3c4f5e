"""ProxyGML on feature vectors, as a scikit-learn transformer: `ProxyGMLEmbedding().fit(X, y).transform(X)`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from proxygml.evaluation import evaluate
from proxygml.heads import Head, Moments, make_loss, transformed
from proxygml.losses.interface import require_not_negative, require_positive, require_whole

FLOATS = [np.float32, np.float64]  # what is computed with; others, such as float16, become the first
FEWEST_CLASSES = 4  # of which some are held out to judge by
PATIENCE = 6  # epochs without a better score on held-out classes
MOST_JUDGED = 5_000  # held-out samples
WHITENINGS, SHARPENINGS = (0.0, 0.25, 0.5), (0.0, 0.125, 0.25, 0.5, 1.0, 2.0)  # the mildest first: it wins ties
UNJUDGED = 0.25, 0.125  # whitening and sharpening where there are too few classes to judge by


class ProxyGMLEmbedding(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A space for feature vectors in which those of a class are near each other, also of classes not seen in `fit`.

    A transformed vector has unit length and the direction of A (f(x) - mean): f takes roots of the features, and the
    matrix A starts as a whitening of what varies within classes and a stretching of what varies between them, from
    where the ProxyGML loss turns it, as long as classes that are held out gain by it. Compare transformed vectors by
    cosine or by Euclidean distance.

    Parameters
    ----------
    n_components : width of the new space; None keeps that of the features.
    proxies_per_class, proxy_weight, scale : of the loss, see `ProxyGMLLoss`.
    links : proxies that each sample is linked to; None takes `proxygml.heads.choose_links`.
    power : features are raised to it, and keep their sign; None takes 0.5 where none is negative, as after a ReLU,
        and 1 elsewhere.
    whitening : 0 leaves the variance within classes as it is, 0.5 makes it equal in all directions.
    sharpening : 0 leaves the directions in which means of classes vary as they are, more stretches them. None, of both:
        what finds held-out classes best, of `WHITENINGS` and `SHARPENINGS`; without any, `UNJUDGED`.
    shrinkage : how far that variance is first drawn to its mean, 0 to 1.
    epochs : at most so many; `partial_fit` goes once through what it is given.
    learning_rate : of Adam for the matrix, divided by n_features.
    batch_size : at most; epochs have 16 steps or more.
    held_out : share of the classes, two at least, that choose whitening, sharpening and the epoch to stop at. With 0,
        or with fewer than four classes, that is the last epoch.
    random_state : seed.
    progress : show a bar with the time left.

    Attributes
    ----------
    components_ : (n_components, n_features), A above. mean_ : (n_features,).
    power_, whitening_, sharpening_ : what was taken.
    classes_ : labels. n_iter_ : epochs that were learned. held_out_score_ : mean of Recall@1 and MAP@R of
    held-out classes in percent, before learning and after every epoch; empty where none were held out.
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
        """Learn from features X (M, n_features) and labels y (M,)."""
        features, y = self._checked(X, y, first=True)
        self.__dict__.pop("_stream", None)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("expected at least two classes, got 1 class: there is nothing to tell apart")
        random = check_random_state(self.random_state)
        with _bar(self.progress) as tell:
            self.n_iter_ = self._find_end(features, labels, random, tell)
            head = self._new_head(Moments.of(features, labels), seed=_drawn(random))
            for epoch in range(self.n_iter_):
                head.learn(features, labels)
                tell("learning", epoch + 1, self.n_iter_)
        return self._take(head)

    def partial_fit(self, X: np.ndarray, y: np.ndarray) -> "ProxyGMLEmbedding":  # noqa: N803
        """Learn from the next part of a stream, in which there may be new classes.

        Mean and whitening are those of all that was seen, brought up to date whenever it has doubled. A stream begins
        with the first call, or with the first after `fit`.
        """
        first = not hasattr(self, "_stream")
        features, y = self._checked(X, y, first=first)
        known = np.array([], y.dtype) if first else self.classes_
        if y.dtype.kind != known.dtype.kind:  # numpy would make floats or texts of both, and merge what is different
            raise ValueError(f"expected labels as in the parts before, {known.dtype}, got {y.dtype}: convert them")
        self.classes_ = np.concatenate([known, np.setdiff1d(y, known)])  # in the order in which they came
        order = np.argsort(self.classes_, kind="stable")
        labels = order[np.searchsorted(self.classes_, y, sorter=order)]  # (M,)
        if first:
            moments = Moments.of(features, labels)
            self._stream = moments, self._new_head(moments, seed=_drawn(check_random_state(self.random_state)))
            self.n_iter_ = 0
            self.held_out_score_: list[float] = []
        else:
            moments, head = self._stream
            moments.add(features, labels)
            if moments.total >= 2 * head.seen:
                head.look_at(moments)
        self._stream[1].learn(features, labels)
        self.n_iter_ += 1
        return self._take(self._stream[1])

    def transform(self, X: np.ndarray) -> np.ndarray:  # noqa: N803
        """Features X (M, n_features) in the new space: unit vectors (M, n_components)."""
        check_is_fitted(self)
        with _in_one_line():
            X = validate_data(self, X, reset=False, dtype=FLOATS)  # noqa: N806
        return transformed(_raised(X, self.power_), self.mean_, self.components_).astype(X.dtype)

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _checked(self, X: np.ndarray, y: np.ndarray, *, first: bool) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
        """Features (M, D) raised to the power, and labels (M,) as they came, once both and all settings can be used."""
        with _in_one_line():
            X, y = validate_data(self, X, y, reset=first, dtype=FLOATS, ensure_min_samples=1 + first)  # noqa: N806
        check_classification_targets(y)
        if y.dtype.kind == "u" and y.max() < 2**63:
            y = y.astype(np.int64)
        width = X.shape[1] if self.n_components is None else self.n_components
        require_whole(
            proxies_per_class=self.proxies_per_class, n_components=width, epochs=self.epochs, batch_size=self.batch_size
        )
        require_positive(learning_rate=self.learning_rate)
        self.whitening_ = UNJUDGED[0] if self.whitening is None else self.whitening
        self.sharpening_ = UNJUDGED[1] if self.sharpening is None else self.sharpening
        require_not_negative(
            whitening=self.whitening_, sharpening=self.sharpening_, shrinkage=self.shrinkage, held_out=self.held_out
        )
        if width > X.shape[1]:
            raise ValueError(f"expected n_components up to {X.shape[1]}, as X has features, got {width}")
        for name, share in {"held_out": self.held_out, "shrinkage": self.shrinkage}.items():
            if share > 1 or (share == 1 and name == "held_out"):
                raise ValueError(f"expected {name} as a share, below 1, got {share}")
        if first:
            if (X[0] == X).all():
                raise ValueError(f"expected features that vary, got {len(X)} equal samples")
            largest = float(np.abs(X).max())
            if not 1e-100 <= largest <= 1e100:  # squares of others are 0 or infinite
                raise ValueError(f"expected features between 1e-100 and 1e100, got up to {largest:.3g}: scale them")
            self.power_ = (0.5 if X.min() >= 0 else 1.0) if self.power is None else self.power
            require_positive(power=self.power_)
        return _raised(X, self.power_), y

    def _new_head(self, moments: Moments, *, seed: int) -> Head:
        width = len(moments.origin) if self.n_components is None else self.n_components
        return Head(
            moments,
            width=width,
            proxies_per_class=self.proxies_per_class,
            whiten=self.whitening_,
            shrinkage=self.shrinkage,
            sharpen=self.sharpening_,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            make_loss=partial(
                make_loss,
                width=width,
                proxies_per_class=self.proxies_per_class,
                links=self.links,
                proxy_weight=self.proxy_weight,
                scale=self.scale,
            ),
            seed=seed,
        )

    def _find_end(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        random: np.random.RandomState,
        tell: Callable[[str, int, int], None],
    ) -> int:
        """After how many epochs held-out classes are found best, having learned from the others alone."""
        self.held_out_score_ = []
        if len(self.classes_) < FEWEST_CLASSES or self.held_out == 0:
            return self.epochs
        drawn = random.permutation(len(self.classes_))[: max(2, round(self.held_out * len(self.classes_)))]
        judging = np.isin(labels, drawn)  # (M,)
        judged, expected = features[judging][:MOST_JUDGED], labels[judging][:MOST_JUDGED]
        features, labels = features[~judging], np.unique(labels[~judging], return_inverse=True)[1]
        moments = Moments.of(features, labels)
        self._choose_space(moments, judged, expected)
        head = self._new_head(moments, seed=_drawn(random))
        for epoch in range(self.epochs + 1):
            self.held_out_score_.append(_score(head.transform(judged), expected))
            best = int(np.argmax(self.held_out_score_))
            if epoch == self.epochs or epoch - best >= PATIENCE:
                break
            head.learn(features, labels)
            tell("finding out for how long", epoch + 1, self.epochs)
        return best

    def _choose_space(self, moments: Moments, judged: np.ndarray, expected: np.ndarray) -> None:
        """Of whitenings and sharpenings that are not given, those with which judged features (M, D) are found best."""
        found = {}
        whitenings = WHITENINGS if self.whitening is None else [self.whitening]
        for pair in product(whitenings, SHARPENINGS if self.sharpening is None else [self.sharpening]):
            self.whitening_, self.sharpening_ = pair
            found[pair] = _score(self._new_head(moments, seed=0).transform(judged), expected)
        self.whitening_, self.sharpening_ = max(found, key=found.__getitem__)

    def _take(self, head: Head) -> "ProxyGMLEmbedding":
        self.mean_, self.components_ = head.mean, head.components()
        return self


def _raised(features: np.ndarray, power: float) -> np.ndarray:
    return features if power == 1 else np.sign(features) * np.abs(features) ** power


def _drawn(random: np.random.RandomState) -> int:
    return random.randint(2**31 - 1)


def _score(vectors: np.ndarray, labels: np.ndarray) -> float:
    """The mean of Recall@1 and MAP@R in percent: unit vectors (M, d), labels (M,)."""
    scores = evaluate(vectors, labels, recall_at=(1,), cluster=False)
    return 50 * (scores.recall[1] + scores.map_at_r)


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Without what scikit-learn's errors say below their first line: the array, and other estimators to take."""
    try:
        yield
    except ValueError as error:
        first, _, more = str(error).partition("\n")
        if "Reshape your data" in more:
            first += " Reshape your data: X.reshape(1, -1) if it is one sample, X.reshape(-1, 1) if one feature"
        raise ValueError(first) from error


@contextmanager
def _bar(shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A function that is told what goes on, and how much of it is done."""
    if not shown:
        yield lambda what, done, total: None
        return
    from rich.progress import Progress, TaskID  # only here: others need not have it

    with Progress() as bar:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield tell
