"""The losses by name: METHODS lists what each needs, `make` returns the module `loss(embeddings, labels) -> scalar`.

A loss of your own may say what it needs by attributes of the same names as in `Method`, of the class if it is made by
the trainer: `batches`, `images_per_class`, `unit_length`, `learning_rate`. Any loss may also have

- `begin_epoch(epoch, embed)`: called before every epoch (from 0); `embed()` returns embeddings (M, D) and labels (M,)
  of all training images, without augmentation.
- `class_distances` (C, C): after `begin_epoch`, for batches "neighboring".
- `learning_rates`: of submodules, by name.
- `last_terms`: a named tuple of scalars that are logged beside the loss.
- `watch(network)`: called once, for a loss that runs parts of the network itself; then there is one process.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from proxygml.files import unknown_name
from proxygml.optional import library

if TYPE_CHECKING:  # `proxygml losses` starts without torch
    from torch import nn

LIBRARY, OURS = "pytorch-metric-learning", "written here"
ON_LIBRARY = ("pml", "damlrrm")  # modules of this package that import it
Batches = Literal["shuffled", "balanced", "neighboring", "two streams"]
BATCHES = get_args(Batches)


@dataclass(frozen=True)
class Method:
    """The source of a loss and what it needs from the trainer."""

    maker: str  # module of this package, and name in it
    title: str
    paper: str
    source: str = LIBRARY
    batches: Batches = "shuffled"
    images_per_class: int = 4  # in batches other than shuffled
    unit_length: bool = True  # normalize embeddings, in training and in evaluation
    learning_rate: float = 3e-2  # of the parameters of the loss, with Adam and an epsilon of 1e-8
    network: Literal["plain", "batch-norm head", "three heads"] = "plain"
    caveat: str = ""  # what we reconstructed or only remember


METHODS = {
    "proxygml": Method("proxygml.module.ProxyGMLLoss", "ProxyGML", "Zhu et al., NeurIPS 2020", OURS),
    "proxygml-plus": Method("plus.ProxyGMLPlusLoss", "ProxyGML with more ingredients", "not in a paper", OURS),
    "semihard": Method(
        "pml.semihard", "Semi-hard triplets", "Schroff et al., CVPR 2015", batches="balanced",
        caveat="the library takes all semi-hard triplets; the quoted row may be TensorFlow's (variant nearest)",
    ),
    "liftedstruct": Method(
        "pml.liftedstruct", "Lifted structure", "Oh Song et al., CVPR 2016", batches="balanced", unit_length=False
    ),
    "clustering": Method(
        "clustering.ClusteringLoss", "Clustering by facility location", "Oh Song et al., CVPR 2017", OURS,
        caveat="gamma and its decay are another implementation's",
    ),
    "proxy-nca": Method("pml.proxy_nca", "Proxy-NCA", "Movshovitz-Attias et al., ICCV 2017"),
    "hdc": Method(
        "hdc.HDCLoss", "Hard-aware deeply cascaded", "Yuan et al., ICCV 2017", OURS, batches="balanced",
        network="three heads", caveat="every head ranks all pairs, as in the released code; the paper: cascade=True",
    ),
    "htl": Method(
        "htl.HTLLoss", "Hierarchical triplets", "Ge et al., ECCV 2018", OURS, batches="neighboring",
        images_per_class=2, caveat="linkage of the tree, batch layout and first epoch are reconstructed",
    ),
    "damlrrm": Method(
        "damlrrm.DAMLRRMLoss", "DAMLRRM", "Xu et al., CVPR 2019", OURS, batches="two streams",
        caveat="a reconstruction: only the abstract of the paper was available",
    ),
    "hdml": Method(
        "hdml.HDMLLoss", "Hardness-aware (N-pair)", "Zheng et al., CVPR 2019", OURS, batches="balanced",
        images_per_class=2, unit_length=False, network="batch-norm head",
        caveat="the quoted row is, from memory, the N-pair form; one term is scaled to the batch size",
    ),
    "softtriple": Method(
        "pml.softtriple", "SoftTriple", "Qian et al., ICCV 2019", learning_rate=3e-4,  # its centers start short
        caveat="two centers a class on Stanford Online Products are from memory",
    ),
    "ms": Method(
        "pml.ms", "Multi-similarity", "Wang et al., CVPR 2019", batches="balanced", images_per_class=5,
        caveat="base 1 of the paper is from memory, 0.5 the released code's",
    ),
    "margin": Method(
        "pml.margin", "Margin, distance-weighted", "Wu et al., ICCV 2017", batches="balanced", images_per_class=5
    ),
    "proxy-anchor": Method("pml.proxy_anchor", "Proxy-Anchor", "Kim et al., CVPR 2020"),
    "n-pair": Method(
        "pml.n_pair", "N-pair", "Sohn, NeurIPS 2016", batches="balanced", images_per_class=2, unit_length=False
    ),
    "contrastive": Method("pml.contrastive", "Contrastive", "Hadsell et al., CVPR 2006", batches="balanced"),
    "triplet": Method(
        "pml.triplet", "Triplets, all", "Weinberger and Saul, JMLR 2009", batches="balanced"
    ),
    "norm-softmax": Method("pml.norm_softmax", "Normalized softmax", "Wang et al., ACM MM 2017"),
    "cosface": Method("pml.cosface", "CosFace", "Wang et al., CVPR 2018"),
    "am-softmax": Method("pml.am_softmax", "AM-softmax", "Wang et al., SPL 2018"),
    "arcface": Method("pml.arcface", "ArcFace", "Deng et al., CVPR 2019"),
    "l-softmax": Method(
        "pml.l_softmax", "Large-margin softmax", "Liu et al., ICML 2016", unit_length=False,
        caveat="from memory, the plain cosine has the final weight of the authors, who decrease it during training",
    ),
    "subcenter-arcface": Method("pml.subcenter_arcface", "Sub-center ArcFace", "Deng et al., ECCV 2020"),
    "center": Method(
        "center.CenterLoss", "Center", "Wen et al., ECCV 2016", OURS, unit_length=False,
        caveat="the paper sums where this takes means, from memory",
    ),
}  # fmt: skip


def find(name: str) -> Method:
    """The Method of a name; an unknown name is an error that lists the known ones."""
    if name not in METHODS:
        raise unknown_name("a loss", name, METHODS)
    return METHODS[name]


def needs_of(loss: object) -> Method:
    """What a loss of your own needs, by its attributes batches, images_per_class, unit_length and learning_rate."""
    names = ("batches", "images_per_class", "unit_length", "learning_rate")
    own = {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    method = Method("", type(loss).__name__, "", "yours", **own)
    if method.batches not in BATCHES:
        raise ValueError(f"expected batches of a loss as one of {', '.join(BATCHES)}, got {method.batches!r}")
    return method


def make(name: str, num_classes: int, embedding_dim: int, settings: Mapping[str, object]) -> "nn.Module":
    """A loss with these settings; an unknown one is an error that lists the known ones."""
    known = defaults(name)
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"{name} has no setting {key}: it has {', '.join(known) or 'none'}")
        number = isinstance(known[key], (int, float)) and not isinstance(known[key], bool)
        kinds = (int, float) if number else (type(known[key]),)
        if known[key] is not None and (not isinstance(value, kinds) or (number and isinstance(value, bool))):
            raise ValueError(
                f"expected {key} of {name} as {'a number' if number else kinds[0].__name__}, got {value!r}"
            )
    return _maker(name)(num_classes, embedding_dim, **settings)


def defaults(name: str) -> dict[str, object]:
    """The settings of a loss with their defaults."""
    parameters = inspect.signature(_maker(name)).parameters
    return {key: each.default for key, each in parameters.items() if each.kind is each.KEYWORD_ONLY}


def _maker(name: str) -> "Callable[..., nn.Module]":
    module, _, maker = find(name).maker.rpartition(".")
    if module in ON_LIBRARY:
        library("pytorch_metric_learning", extra="losses", user=f"the loss {name}")
    return getattr(importlib.import_module(f"proxygml.losses.{module}"), maker)
