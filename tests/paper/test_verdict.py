"""The first screen of the page of results."""

from types import SimpleNamespace

from proxygml.paper.verdict import count_outcomes, verdict


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
    assert "| the paper's claims | cars-head | glyphs |" in text
    assert "| 2 / 1 / 1 (2 / 1 / 1) | 1 / 0 / 0 (1 / 0 / 0) |" in text
    assert verdict([OPEN]) == ""
