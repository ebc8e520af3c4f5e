"""The first screen of docs/results.md: how many of the paper's claims hold, by experiment and dataset."""

from collections import Counter
from collections.abc import Iterable, Sequence

from proxygml.paper.rendering import PROTOCOLS, Section
from proxygml.paper.results import METRICS
from proxygml.paper.tables import Table

CLAIMS = {  # what the paper claims, by experiment
    "modules": "each module helps, together they help most (Table 1)",
    "comparison": "ProxyGML is better than the other methods (Table 2)",
    "ratio": "few links suffice: r = 0.05 is best (Figure 5)",
    "proxies": "N = 12 is best, and few links make it stable (Figure 4)",
    "grid": "N = 12 with r = 0.05 is best (supplement)",
    "lambda": "lambda hardly matters (supplement)",
    "convergence": "ProxyGML ends higher (Figure 1)",
    "proxy-anchor": "ProxyGML is better than Proxy-Anchor in small batches (supplement)",
}
PHOTOS = ("cars-head", "cub-head", "cars-small", "cub-small")  # the paper's own photos
OUTCOMES = ("hold", "fail", "n.s.")


def count_outcomes(sections: Iterable[Section], measure: str) -> Counter[str]:
    """How many claims hold, fail or show no significant difference; those without enough seeds do not count."""
    verdicts = [verdict.get(measure, "") for section in sections for verdict in section.claims.values()]
    words = {"does not hold": "fail", "no significant difference": "n.s.", "holds": "hold"}
    outcomes = (next((what for word, what in words.items() if word in verdict), None) for verdict in verdicts)
    return Counter(outcome for outcome in outcomes if outcome)


def verdict(sections: Sequence[Section]) -> str:
    """A paragraph and a table; nothing without claims that were tested."""
    tested = [section for section in sections if section.name in CLAIMS and any(_counts(section).values())]
    if not tested:
        return ""
    text = "## does it hold?\n"
    photos = [section for section in tested if section.dataset in PHOTOS and section.protocol == "paper"]
    if photos:
        said = [_sentence(photos, measure) for measure in METRICS]
        text += f"On the paper's own photos, with a small network on a CPU: {'; '.join(said)}.\n\n"
    columns = list(dict.fromkeys((section.dataset, section.protocol) for section in tested))
    columns.sort(key=lambda column: column[0] not in PHOTOS)
    lines = []
    for name, claim in CLAIMS.items():
        own = [section for section in tested if section.name == name]
        cells = [[one for one in own if (one.dataset, one.protocol) == column] for column in columns]
        if own:
            lines.append((claim, *(_cell(cell) if cell else "open" for cell in cells)))
    header = ("the paper's claims", *(f"{dataset}{PROTOCOLS[protocol]}" for dataset, protocol in columns))
    text += "Claims that hold / fail / show no significant difference, by Recall@1 and, in brackets, by NMI:\n\n"
    return text + Table(header, tuple(lines)).to_markdown() + "\n"


def _counts(section: Section) -> Counter[str]:
    return sum((count_outcomes([section], measure) for measure in METRICS), Counter())


def _sentence(sections: Sequence[Section], measure: str) -> str:
    counts = count_outcomes(sections, measure)
    hold, fail, same = (counts[outcome] for outcome in OUTCOMES)
    total = hold + fail + same
    return f"by {measure}, {hold} of {total} claims hold, {fail} fail, {same} show no significant difference"


def _cell(sections: Sequence[Section]) -> str:
    recall, nmi = (" / ".join(str(count_outcomes(sections, each)[what]) for what in OUTCOMES) for each in METRICS)
    return f"{recall} ({nmi})"
