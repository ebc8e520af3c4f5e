"""The first screen of the page of results."""

from collections import Counter
from types import SimpleNamespace

from proxygml.paper.results import Results
from proxygml.paper.verdict import best_methods, count_outcomes, in_words, verdict


def section(dataset: str, *verdicts: str) -> SimpleNamespace:
    claims = {str(number): {"R@1": text, "NMI": text} for number, text in enumerate(verdicts)}
    return SimpleNamespace(name="ratio", dataset=dataset, protocol="paper", claims=claims)


CARS = section(
    "cars-head",
    "holds (+2.0 ± 1.0)",
    "N 4 is: **does not hold** (-2.0 ± 1.0)",
    "N 4 is: no significant difference (+0.1 ± 1.0)",
    "holds (highest mean)",
)
OPEN = section("cub-head", "not run with the same seeds", "one seed cannot tell (+3.0)")


def test_only_claims_that_were_tested_count() -> None:
    assert count_outcomes([CARS], "R@1") == {"hold": 2, "fail": 1, "n.s.": 1}
    assert count_outcomes([OPEN], "NMI") == count_outcomes([CARS], "time") == {}


def test_the_papers_photos_come_first() -> None:
    text = verdict([section("glyphs", "holds (+2.0 ± 1.0)"), CARS, OPEN])
    assert "by R@1, 2 of 4 claims hold, 1 fail, 1 show no significant difference" in text
    assert "| the paper's claims | on its own photos | cars-head | glyphs |" in text
    assert "| **mixed** | 2 / 1 / 1 (2 / 1 / 1) | 1 / 0 / 0 (1 / 0 / 0) |" in text
    assert verdict([OPEN]) == ""


def test_most_outcomes_decide_the_words() -> None:
    assert in_words(Counter(hold=3, fail=1)) == "**mostly holds**"
    assert in_words(Counter({"n.s.": 2})) == "**no difference**"
    assert in_words(Counter(hold=1, fail=1)) == "**mixed**"
    assert in_words(Counter()) == "open"


def test_best_other_method_stands_beside_ours() -> None:
    scores = {"proxygml": 0.3, "proxygml, 64": 0.9, "ms": 0.2, "proxy-anchor": 0.4}
    runs = [{"row": name, "seed": 0, "scores": {"recall@1": value, "nmi": 0.5}} for name, value in scores.items()]
    compared = SimpleNamespace(dataset="cars-head", protocol="paper", results=Results.of(runs, scores))
    assert "| cars-head | 30.0 / 50.0 | - / - | - / - | proxy-anchor: 40.0 / 50.0 |" in best_methods([compared])
    assert best_methods([SimpleNamespace(**vars(compared) | {"dataset": "glyphs"})]) == ""
