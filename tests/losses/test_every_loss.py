"""What holds for every loss: the input it refuses, its precision, its symmetries, and that it learns."""

import copy
import importlib
import math
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import miners
from torch import Tensor, nn

from proxygml.losses import METHODS, make
from proxygml.losses.damlrrm import BASES

SETTINGS = {  # where the defaults are not enough
    "proxygml": [{"proxies_per_class": 3, "ratio": 0.5}],  # by default a few classes have only positives linked
    "proxygml-plus": [
        {"proxies_per_class": 3, "ratio": 0.5, "aggregate": "softmax", "margin": 0.1, "scale": 4.0},
        {"proxies_per_class": 3, "ratio": 0.5, "anchor": True, "scale": 8.0, "margin": 0.1},
    ],
    "semihard": [{}, {"variant": "nearest"}],
    "clustering": [{}, {"gamma": 0.5}],
    "proxy-nca": [{}, {"exclude_positive": True}],
    "hdc": [{}, {"cascade": True}],
    "damlrrm": [{"base": base} for base in BASES],
    "softtriple": [{"centers_per_class": 3}],
    # What the histories start with, so that synthetic tuples are hard and count, and no term drowns the others.
    "hdml": [{"alpha": 1e6, "beta": 1e6, "softmax_factor": 1.0}],
    "contrastive": [{}, {"variant": "cosine"}],
    "triplet": [{}, {"variant": "hard"}],
}
FIRST_TWO = ("n-pair", "hdml")  # of a class are its anchor and its positive, other images are not used
CLASSES, DIMENSION = 5, 6  # no other size in the state of a loss is a multiple of 5


class Case(NamedTuple):
    name: str
    settings: dict

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.settings.items())])


Batch = tuple[Tensor, Tensor]  # embeddings and labels
CASES = [Case(name, settings) for name in METHODS for settings in SETTINGS.get(name, [{}])]


def over(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


every_loss = over(CASES)


class Fed(nn.Module):
    """A loss with what it asks for: training images for a tree, a network to watch, which changes nothing here."""

    def __init__(self, loss: nn.Module, training: Batch) -> None:
        super().__init__()
        self.loss, self.head = loss, nn.Identity()
        if hasattr(loss, "watch"):
            loss.watch(SimpleNamespace(trunk=SimpleNamespace(channels=training[0].shape[1]), head=self.head))
        if hasattr(loss, "begin_epoch"):
            loss.begin_epoch(1, lambda: training)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(embeddings), labels)


def made(
    case: Case,
    num_classes: int = CLASSES,
    embedding_dim: int = DIMENSION,
    *,
    dtype: torch.dtype = torch.float32,
    names: Tensor | None = None,
    chance: bool = False,
) -> Fed:
    """The loss in this precision, in which it also saw its training images, with these names for the classes.

    Without chance, one that draws triplets takes all of them.
    """
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(3 * num_classes, embedding_dim, generator=generator, dtype=torch.float64)
    labels = torch.arange(num_classes).repeat(3)
    training = images.to(dtype), labels if names is None else names[labels]
    loss = make(case.name, num_classes, embedding_dim, case.settings)
    if isinstance(getattr(loss, "miner", None), miners.DistanceWeightedMiner) and not chance:
        loss.miner = None
    return Fed(loss, training).to(dtype)


def overlapping_classes() -> Batch:
    """Three images of each class, close enough together for every loss to be at work."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(CLASSES).repeat(3)
    centers = torch.randn(CLASSES, DIMENSION, generator=generator, dtype=torch.float64)
    spread = torch.randn(len(labels), DIMENSION, generator=generator, dtype=torch.float64)
    return 0.6 * centers[labels] + 0.8 * spread, labels


class Outcome(NamedTuple):
    """Everything a batch gives and leaves behind."""

    value: Tensor
    gradient: Tensor  # of the embeddings
    state: dict[str, Tensor]  # gradients of the parameters, and the buffers
    terms: tuple[Tensor | None, ...]


def value_and_gradients(
    loss: Callable[[Tensor, Tensor], Tensor],
    embeddings: Tensor,
    labels: Tensor,
    parameters: Sequence[nn.Parameter] | None = None,
) -> tuple[Tensor, ...]:
    """Value, gradient of the embeddings, gradients of the parameters, of all the loss has unless some are given."""
    embeddings = embeddings.detach().clone().requires_grad_()
    value = loss(embeddings, labels)
    variables = [embeddings, *(loss.parameters() if parameters is None else parameters)]
    return value.detach(), *torch.autograd.grad(value, variables, materialize_grads=True)


def outcome(loss: Fed, embeddings: Tensor, labels: Tensor, autocast: torch.dtype | None = None) -> Outcome:
    """Of a copy, since centers and histories move with every batch; autocast is for forward alone, as it should be."""
    loss = copy.deepcopy(loss)
    names, parameters = [name for name, _ in loss.named_parameters()], list(loss.parameters())
    forward = torch.autocast("cpu", dtype=autocast, enabled=autocast is not None)(loss.forward)
    value, gradient, *gradients = value_and_gradients(forward, embeddings, labels, parameters)
    state = dict(zip(names, gradients, strict=True)) | dict(loss.named_buffers())
    return Outcome(value, gradient, state, tuple(getattr(loss.loss, "last_terms", None) or ()))


def axis_of_classes(tensor: Tensor) -> int | None:
    """Where its classes lie side by side, each with one row or several."""
    return next((axis for axis, size in enumerate(tensor.shape) if size % CLASSES == 0), None)


def renamed(state: dict[str, Tensor], names: Tensor) -> dict[str, Tensor]:
    """What belongs to a class moved to where its new name says."""
    moved = dict(state)
    for key, tensor in state.items():
        if (axis := axis_of_classes(tensor)) is not None:
            by_class = tensor.unflatten(axis, (CLASSES, -1)).index_select(axis, names.argsort())
            moved[key] = by_class.flatten(axis, axis + 1)
    return moved


def identical(one: Outcome, other: Outcome) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def nearly(one: Outcome, other: Outcome) -> None:
    """Equal but for the order of sums in float64."""
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def batch() -> Batch:
    return overlapping_classes()


class TestSymmetries:
    @every_loss
    def test_the_order_of_the_batch_does_not_matter(self, case: Case, batch: Batch) -> None:
        embeddings, labels = batch
        order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
        if case.name in FIRST_TWO:  # classes change places, images of a class do not
            order = torch.arange(15).view(3, CLASSES)[:, [2, 0, 4, 3, 1]].flatten()
        if case.name == "damlrrm":  # three quarters are one stream, the rest another
            order = torch.cat([order[order < 11], order[order >= 11]])
        loss = made(case, dtype=torch.float64)
        expected = outcome(loss, embeddings, labels)
        assert expected.gradient.abs().max() > 1e-3
        shuffled = outcome(loss, embeddings[order], labels[order])
        nearly(shuffled, expected._replace(gradient=expected.gradient[order]))

    @every_loss
    def test_the_names_of_the_classes_do_not_matter(self, case: Case, batch: Batch) -> None:
        embeddings, labels = batch
        names = torch.tensor([2, 0, 4, 3, 1])
        loss, other = made(case, dtype=torch.float64), made(case, dtype=torch.float64, names=names)
        for state in loss.state_dict().values():
            if axis_of_classes(state) is not None:
                state += 0.3 * torch.rand_like(state)  # boundaries and centers that differ between classes
        other.load_state_dict(renamed(loss.state_dict(), names))
        expected = outcome(loss, embeddings, labels)
        expected = expected._replace(state=renamed(expected.state, names))
        only_compares = not loss.state_dict() and case.name not in ("n-pair", "htl")  # these have an order of classes
        (identical if only_compares else nearly)(outcome(other, embeddings, names[labels]), expected)
        if list(loss.parameters()):
            assert (loss(embeddings, names[labels]) - expected.value).abs() > 1e-6

    @over([case for case in CASES if METHODS[case.name].unit_length and case.name != "clustering"])
    def test_lengths_do_not_matter_to_a_loss_that_normalizes(self, case: Case, batch: Batch) -> None:
        embeddings, labels = batch
        loss = made(case, dtype=torch.float64)
        expected = outcome(loss, embeddings, labels)
        longer = outcome(loss, 3 * embeddings, labels)
        nearly(longer._replace(gradient=3 * longer.gradient), expected)


class TestPrecision:
    @every_loss
    def test_autocast_changes_nothing(self, case: Case, batch: Batch) -> None:
        embeddings, labels = batch[0].float(), batch[1]
        plain = outcome(made(case), embeddings, labels)
        assert plain.value.dtype == torch.float32
        for low in (torch.bfloat16, torch.float16):
            torch.manual_seed(0)
            with torch.autocast("cpu", dtype=low):  # a tree is made here, too
                loss = made(case)
            identical(outcome(loss, embeddings, labels, autocast=low), plain)

    @every_loss
    def test_low_precision_embeddings_are_computed_in_float32(self, case: Case, batch: Batch) -> None:
        loss = made(case)
        for low in (torch.bfloat16, torch.float16):
            embeddings, labels = batch[0].to(low), batch[1]
            expected = outcome(loss, embeddings.float(), labels)
            assert expected.value.dtype == torch.float32
            identical(outcome(loss, embeddings, labels), expected._replace(gradient=expected.gradient.to(low)))

    @every_loss
    def test_double_embeddings(self, case: Case, batch: Batch) -> None:
        loss = made(case)
        actual = outcome(loss, *batch)
        assert actual.value.dtype == actual.gradient.dtype == torch.float64
        assert all(state.dtype == torch.float32 for state in actual.state.values())
        expected = outcome(copy.deepcopy(loss).double(), *batch)
        torch.testing.assert_close(actual[:2], expected[:2])
        single = outcome(loss, batch[0].float(), batch[1]).value
        torch.testing.assert_close(single.double(), expected.value, rtol=1e-5, atol=1e-6)


@every_loss
def test_a_loss_can_be_copied_pickled_and_loaded(case: Case, batch: Batch) -> None:
    embeddings, labels = batch[0].float(), batch[1]
    loss, other = made(case), made(case)
    other.load_state_dict(loss.state_dict())
    of_a_copy = outcome(loss, embeddings, labels)
    for again in (pickle.loads(pickle.dumps(loss)), other):
        identical(outcome(again, embeddings, labels), of_a_copy)
    assert loss(embeddings, labels) == of_a_copy.value


@every_loss
def test_labels_may_be_of_any_integer_type(case: Case, batch: Batch) -> None:
    embeddings, labels = batch[0].float(), torch.tensor([0, 5, 130, 198, 199])[batch[1]]
    loss = made(case, 200)
    expected = copy.deepcopy(loss)(embeddings, labels)
    for kind in (torch.uint8, torch.int16, torch.uint16, torch.int32):
        assert copy.deepcopy(loss)(embeddings, labels.to(kind)) == expected


DEGENERATE = {
    "one class": (torch.randn(4, DIMENSION, generator=torch.Generator().manual_seed(0)), torch.tensor([1] * 4)),
    "every class once": (torch.randn(4, DIMENSION, generator=torch.Generator().manual_seed(0)), torch.arange(4)),
    "a single image": (torch.ones(1, DIMENSION), torch.tensor([2])),
    "one class in one place": (torch.ones(4, DIMENSION), torch.tensor([2] * 4)),
    "classes in one place": (torch.ones(4, DIMENSION), torch.arange(4)),
    "pairs in one place": (torch.ones(6, DIMENSION), torch.tensor([0, 0, 1, 1, 2, 2])),
    "pairs without length": (torch.zeros(6, DIMENSION), torch.tensor([0, 0, 1, 1, 2, 2])),
    "pairs in places of their own": (torch.eye(DIMENSION)[[0, 0, 1, 1]] + 0.1, torch.tensor([0, 0, 3, 3])),
}
NEEDS_TRIPLETS = ("semihard", "triplet", "liftedstruct", "ms", "margin", "htl", "clustering", "damlrrm")


@every_loss
def test_degenerate_batches_have_a_finite_loss_and_gradient(case: Case) -> None:
    loss = made(case, chance=True)
    for kind, degenerate in DEGENERATE.items():
        value, gradient, state, terms = outcome(loss, *degenerate)
        tensors = [value, gradient, *state.values(), *(term for term in terms if term is not None)]
        assert value.shape == (), kind
        assert all(tensor.isfinite().all() for tensor in tensors), kind


@over([case for case in CASES if case.name in NEEDS_TRIPLETS])
def test_batch_without_triplets(case: Case) -> None:
    loss = made(case, chance=True)
    for kind in ("one class", "every class once", "a single image", "one class in one place", "classes in one place"):
        value, gradient, *_ = outcome(loss, *DEGENERATE[kind])
        assert value == gradient.abs().max() == 0, kind


@over([case for case in CASES if str(case) not in ("semihard", "proxy-nca exclude_positive=True")])
def test_equal_embeddings_of_different_classes(case: Case) -> None:
    """But for triplets whose negatives have to be farther, and a loss that may be negative."""
    loss = made(case, chance=True)
    for kind in ("pairs in one place", "pairs without length"):
        assert outcome(loss, *DEGENERATE[kind]).value > 0, kind


# test_hdml.py has a network to learn; with so small a margin clusters need not be wide apart.
@over([case for case in CASES if case.name != "hdml" and case.settings != {"gamma": 0.5}])
def test_a_toy_problem_is_learned(case: Case) -> None:
    loss, method = made(case, 3, 12, chance=True), METHODS[case.name]
    labels = torch.arange(3).repeat(2 if case.name in FIRST_TWO else 6)
    vectors = nn.Parameter(torch.randn(len(labels), 12))
    optimizer = torch.optim.Adam([vectors, *loss.parameters()], lr=0.1)

    def embed() -> Tensor:
        return F.normalize(vectors) if method.unit_length else vectors

    epochs: list[list[float]] = [[], []]
    for epoch, values in enumerate(epochs):
        if hasattr(loss.loss, "begin_epoch"):
            loss.loss.begin_epoch(epoch, lambda: (embed(), labels))
        for _ in range(30):
            optimizer.zero_grad()
            value = loss(embed(), labels)
            value.backward()
            optimizer.step()
            values.append(value.item())
    remaining = {"clustering": 0.1, "damlrrm": 0.8}.get(case.name, 0.5)
    for values in epochs if case.name == "htl" else [epochs[0] + epochs[1]]:  # with its tree margins begin anew
        assert values[-1] < remaining * values[0]
    several_centres = case.name in ("softtriple", "subcenter-arcface")  # so a class may gather in several places
    for part in embed().detach().tensor_split(3 if method.network == "three heads" else 1, dim=1):
        samples = F.normalize(part) if method.unit_length else part
        nearest = torch.cdist(samples, samples).fill_diagonal_(math.inf).argmin(dim=1)
        assert (labels[nearest] == labels).double().mean() >= (0.75 if several_centres else 1)


BAD_INPUT = [
    (torch.ones(2, 6), torch.tensor([0, 5]), "expected labels in 0..4, got 0..5: number the classes from 0"),
    (torch.ones(2, 6), torch.tensor([-1, 2]), "expected labels in 0..4, got -1..2"),
    (torch.ones(2, 5), torch.tensor([0, 1]), "expected embeddings of shape (batch, 6), got (2, 5)"),
    (torch.ones(6), torch.tensor([0]), "expected embeddings of shape (batch, 6), got (6,)"),
    (torch.ones(0, 6), torch.tensor([]), "expected at least one embedding, got an empty batch"),
    (torch.ones(2, 6), torch.tensor([0.0, 1.0]), "expected integer labels, got torch.float32"),
    (torch.ones(2, 6), torch.tensor([True, False]), "expected integer labels, got torch.bool"),
    (torch.ones(2, 6), torch.tensor([0, 1, 2]), "expected labels of shape (2,), got (3,)"),
    (torch.ones(2, 6, dtype=torch.int64), torch.tensor([0, 1]), "expected embeddings of a float type"),
    (torch.ones(2, 6), [0, 1], "expected labels as a tensor, got list"),
    (
        torch.tensor([[1.0] * 5 + [math.nan]] * 2),
        torch.tensor([0, 1]),
        "expected finite embeddings, got NaN or infinity in 2 of 2 rows",
    ),
    (torch.tensor([[1.0] * 5 + [math.inf], [1.0] * 6]), torch.tensor([0, 1]), "in 1 of 2 rows"),
]


@every_loss
def test_bad_input_is_refused(case: Case) -> None:
    loss = made(case)
    for *given, message in BAD_INPUT:
        refuses(loss, given, message)
        if case.name == "htl":  # which sees all training images, too
            refuses(lambda *given: loss.loss.begin_epoch(1, lambda: given), given, message)


def refuses(called: Callable, given: list, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        called(*given)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@every_loss
def test_a_loss_for_no_classes_is_refused(case: Case) -> None:
    refuses(make, [case.name, 0, DIMENSION, case.settings], "num_classes as a whole number of at least 1, got 0")


@pytest.mark.parametrize("name", METHODS)
def test_missing_library_error_has_the_install_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"proxygml.losses.{METHODS[name].maker.rpartition('.')[0]}")
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    if "pytorch_metric_learning import" in Path(module.__file__).read_text():
        message = rf'the loss {name} needs pytorch_metric_learning: pip install "proxygml\[losses\]"'
        with pytest.raises(ModuleNotFoundError, match=message):
            make(name, 100, 8, {})
    else:
        assert make(name, 100, 8, {})
