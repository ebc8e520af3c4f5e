"""proxygml classify and proxygml calibrate."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from proxygml.cli.display import program, show_next
from proxygml.cli.options import AS_TRAINED, Hardware
from proxygml.cli.search import check_queries, read_queries
from proxygml.display import in_one_line, messages, output, show_progress, show_table
from proxygml.training.recipe import Split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxygml.retrieval import Index
    from proxygml.tasks.calibrate import Separation
    from proxygml.tasks.classify import Answer

MOST_REFUSED = 0.5  # of the known images: more is worth a hint
GUESSED = 1.5  # times the accuracy of a guess; 2 would be all of two classes
PICTURES = (".png", ".pdf", ".svg")
RATES = (0.01, 0.02, 0.05, 0.1, 0.2)  # of false accepts, that are shown beside the wanted one
FEW_CLASSES = 20  # from which on the false accepts measured are close to those of new classes: docs/tasks.md


def classify(
    index: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX|RUN|NPZ")],
    hardware: Hardware = AS_TRAINED,
    image: tuple[Path, ...] = (),
    vectors: Path | None = None,
    run: Path | None = None,
    space: Path | None = None,
    split: Split = "test",
    data: Path | None = None,
    json: bool = False,
) -> None:
    """Tell the class of images by a vote of their nearest neighbors, or that it is unknown.

    `proxygml classify my-index --image photo.jpg`. To teach a new class, add some photos of it:
    `proxygml index add my-index PHOTOS`. Nothing is unknown until `proxygml calibrate` has found the threshold.

    Args:
        index: Whose items vote: an index, by its folder or its address postgresql://..., a run, or an .npz.
        hardware: What embeds images.
        image: Images to classify, or folders of images.
        vectors: Or an .npz of embeddings to classify.
        run: What embeds the images, if the index does not contain its network.
        space: The fitted space of the index, which is applied to what you classify.
        split: The images of a run that vote.
        data: Folder of the run's images, if they have moved.
        json: Print the answers with all candidates as JSON.
    """
    check_queries(image, vectors, "classify")

    from proxygml.embeddings import Embeddings
    from proxygml.retrieval import Index
    from proxygml.tasks.classify import classify as answer
    from proxygml.tasks.classify import read_calibration
    from proxygml.vectors import open_vectors

    with show_progress() as progress:
        source = open_vectors(index, split=split, data=data, load=hardware.load, progress=progress)
    opened = Index.from_embeddings(source) if isinstance(source, Embeddings) else source
    calibration = read_calibration(opened)
    queries = read_queries(index, opened, hardware, image=image, vectors=vectors, run=run, space=space)
    answers = answer(opened, queries.vectors, calibration)
    if json:
        entries = [
            {"query": name} | each._asdict() | {"candidates": [candidate._asdict() for candidate in each.candidates]}
            for name, each in zip(queries.paths.tolist(), answers, strict=True)
        ]
        output.print_json(data=entries, ensure_ascii=True)
        return
    show_answers(queries.paths.tolist(), answers)
    if calibration is None:
        storable = isinstance(source, Index)
        remedy = f"`{program()} calibrate {shlex.quote(index)}`" if storable else "build an index, then calibrate it"
        messages.print(f"not calibrated, so nothing is unknown: {remedy}")


def show_answers(queries: "Sequence[str]", answers: "Sequence[Answer]") -> None:
    """Print a row for each query."""

    def described(answer: "Answer", place: int) -> str:
        if place >= len(answer.candidates):
            return ""
        candidate = answer.candidates[place]
        percent = "<1" if candidate.probability < 0.01 else f"{100 * candidate.probability:.0f}"
        return f"{in_one_line(candidate.label)} {percent} %"

    rows = [
        (in_one_line(query), described(each, 0), described(each, 1), f"{each.score:.3f}")
        if each.label is not None
        else (in_one_line(query), "unknown", described(each, 0), f"{each.score:.3f}")
        for query, each in zip(queries, answers, strict=True)
    ]
    show_table(("image", "class", "or", "score"), rows, left=(0, 1, 2))


def calibrate(
    index: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX|RUN")],
    hardware: Hardware = AS_TRAINED,
    false_accepts: float = 0.01,
    picture: Path | None = None,
    split: Split = "test",
    data: Path | None = None,
    json: bool = False,
) -> None:
    """Find the threshold below which `proxygml classify` says unknown, calibrate its probabilities, and store both.

    Every image is searched for among all others, and among those of other classes, as if its class were missing.

    Args:
        index: An index, by its folder or its address postgresql://..., or a run.
        hardware: What embeds images.
        false_accepts: Fraction of the images of unknown classes that may get a class.
        picture: Draw the ROC curve and the reliability of the probabilities to this .png, .pdf or .svg.
        split: The images of a run.
        data: Folder of the run's images, if they have moved.
        json: Print what was measured as JSON.
    """
    from proxygml.embeddings import check_nonzero
    from proxygml.model import kind_of
    from proxygml.retrieval import Index
    from proxygml.tasks.calibrate import calibrate as measure
    from proxygml.tasks.classify import store_calibration
    from proxygml.vectors import open_vectors, read_all

    kind_of(index, ("index", "run"))
    if picture is not None and picture.suffix.lower() not in PICTURES:
        raise ValueError(f"expected a --picture that ends in {', '.join(PICTURES)}, got {picture}")
    with show_progress() as progress:
        opened = open_vectors(index, split=split, data=data, load=hardware.load, progress=progress)
    if not isinstance(opened, Index):
        raise ValueError("a calibration is stored with one index, and --split all has two: use --split test or train")
    items = read_all(opened)
    check_nonzero(items)
    measured = measure(items, false_accepts=false_accepts)
    if picture is not None:
        from proxygml.plots import draw_separation

        draw_separation(measured.known, measured.unknown, measured.probability, measured.right, picture)
    store_calibration(opened, measured.calibration)
    if json:
        output.print_json(data=measured.to_json())
    else:
        show_separation(index, measured, false_accepts)
    warn_of_trained_classes(opened)


def show_separation(location: str, measured: "Separation", false_accepts: float) -> None:
    """Print what was measured, with intervals, and next steps."""
    calibration = measured.calibration
    rates = sorted({*RATES, false_accepts})
    rows = [(f"{100 * rate:g}", f"{100 * measured.refused_at(rate):.1f}") for rate in rates]
    show_table(("unknown accepted, %", "known refused, %"), rows, left=())
    output.print(
        f"{calibration.images:,} images of {calibration.classes:,} classes, each as a known and as an unknown one; "
        "in brackets: 95 % intervals over the classes\n"
        f"AUROC {_percent(measured.auroc, measured.auroc_interval)}, "
        f"by the similarity of the nearest image alone {100 * measured.auroc_of_similarity:.1f}\n"
        f"threshold {calibration.threshold:.3f}: accepts "
        f"{_percent(calibration.false_accepts, measured.false_accepts_interval)} of the unknown, "
        f"refuses {_percent(measured.refused, measured.refused_interval)} of the known\n"
        f"{100 * measured.accuracy:.1f} % of the known get the right class; calibration error of the probabilities "
        f"{100 * measured.error_before:.1f} -> {100 * measured.error_after:.1f} % (temperature "
        f"{calibration.temperature:.2f})\n"
        f"stored in {location}"
    )
    if calibration.classes < FEW_CLASSES:
        messages.print(
            f"caution: with fewer than {FEW_CLASSES} classes, more unknown images are accepted than measured: "
            "each was searched for without its own class, in a smaller index"
        )
    if measured.auroc_interval[0] <= 0.5:
        messages.print(
            "caution: no significant difference between known and unknown classes: too few images, or wrong labels?"
        )
    elif measured.accuracy <= GUESSED / calibration.classes:
        messages.print("caution: the right class is found hardly more often than by guessing: wrong labels?")
    elif measured.refused > MOST_REFUSED and false_accepts < RATES[-1]:
        messages.print(f"caution: most known images are refused; --false-accepts {RATES[-1]} refuses fewer")
    show_next((["classify", location, "--image", "PHOTO"], "its class, or that it is unknown"))


def warn_of_trained_classes(index: "Index") -> None:
    """Say how many classes of an index its own network was trained on: new ones are harder to tell."""
    from proxygml.training.run import Run

    folder = index.model_folder()
    names = [] if folder is None else Run.open(folder).load_best().get("class_names", [])
    if trained := len({*names} & {*index.class_names.tolist()}):
        messages.print(
            f"caution: the network was trained on {trained} of these {len(index.class_names):,} classes and separates "
            "new ones less well: calibrate on classes that it has not seen"
        )


def _percent(value: float, interval: tuple[float, float]) -> str:
    return f"{100 * value:.1f} % ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"
