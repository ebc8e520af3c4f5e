"""The first screen of docs/results.md: what holds of the paper's claims, by dataset, and what is best."""

from collections import Counter
from collections.abc import Iterable, Sequence

from proxygml.paper.comparison import OURS, VARIANTS
from proxygml.paper.drawing import starred
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
            answer = in_words(count_outcomes([one for one in own if one in photos], "R@1"))
            lines.append((claim, answer, *(_cell(cell) if cell else "open" for cell in cells)))
    datasets = (f"{dataset}{PROTOCOLS[protocol]}" for dataset, protocol in columns)
    text += "Claims that hold / fail / show no significant difference, by Recall@1 and, in brackets, by NMI:\n\n"
    text += Table(("the paper's claims", "on its own photos", *datasets), tuple(lines)).to_markdown() + "\n"
    return text + best_methods([section for section in sections if section.name == "comparison"])


def in_words(outcomes: Counter[str]) -> str:
    """What most outcomes say."""
    total = outcomes.total()
    for outcome, word in (("hold", "holds"), ("fail", "fails"), ("n.s.", "no difference")):
        if outcomes[outcome] > total / 2:
            return f"**{word if outcomes[outcome] == total else f'mostly {word}'}**"
    return "**mixed**" if total else "open"


def best_methods(comparisons: Iterable[Section]) -> str:
    """A table of ProxyGML, as in the paper and with more links, beside the best other method by Recall@1."""
    lines = []
    for section in comparisons:
        results = section.results
        others = [name for name in results.rows if name not in (*OURS, *VARIANTS)]
        if "proxygml" in results.rows and others and section.dataset in PHOTOS:
            best = max(others, key=lambda name: results.range(name, "recall@1").mean)
            cells = (" / ".join(results.cells(name, "recall@1", "nmi")) for name in ("proxygml", *VARIANTS))
            shown = f"{starred(best)}: {' / '.join(results.cells(best, 'recall@1', 'nmi'))}"
            lines.append((section.dataset + PROTOCOLS[section.protocol], *cells, shown))
    if not lines:
        return ""
    header = ("R@1 / NMI", "proxygml (r = 0.05)", *(name.removeprefix("proxygml, ") for name in VARIANTS), "best other")
    return Table(header, tuple(lines)).to_markdown() + "\n"


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
