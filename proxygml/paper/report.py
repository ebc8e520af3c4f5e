"""docs/results.md: every experiment in results/, with its verdicts on the paper's claims."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from proxygml.files import atomic_write
from proxygml.paper import EXPERIMENTS, find, frozen
from proxygml.paper.rendering import PROTOCOLS, Section, sections_of
from proxygml.paper.settings import SETTINGS
from proxygml.paper.tables import Table
from proxygml.paper.verdict import verdict

BRIEF = ("glyphs", "omniglot")  # datasets that the page only links to
HEAD = """# Results

Written by `proxygml paper --report` from `results/`; do not edit. `proxygml paper NAME --dataset DATASET --data ROOT`
makes a section; glyphs needs no `--data`.

"""
METHOD = """## how we measured
Every score is a mean over seeds with its 95 % interval (Student's t). Differences are paired by seed: a claim holds or
fails where their interval excludes 0; otherwise there is no significant difference (n.s.). No method is tuned, except
by the fair protocol ([paper.md](paper.md)). On glyphs and omniglot the epoch with the best Recall@1 on test classes
counts, as in the paper; everywhere else the last epoch. A star marks a method with a [note](#notes). [Runs](#runs)
lists seeds, hours and commits.

"""


def write_report() -> Path:
    """Draw every experiment in results/ of this checkout, and write its docs/results.md and the README's table."""
    folder, page, readme = Path("results"), Path("docs/results.md"), Path("README.md")
    if not folder.is_dir() or not page.parent.is_dir():
        raise FileNotFoundError("no results/ and docs/ here: --report is for a checkout of proxygml")
    for experiment in EXPERIMENTS:
        for section in sections_of(experiment, folder):
            section.render()
    with atomic_write(page) as draft:
        draft.write_text(report(folder))
    if Section("comparison", "cars-head", "paper", folder).path.exists():
        text = update_readme(readme.read_text(), folder)
        with atomic_write(readme) as draft:
            draft.write_text(text)
    return page


def update_readme(text: str, folder: Path) -> str:
    """The README with the scores on Cars196 from results/ in its table."""
    table = Section("comparison", "cars-head", "paper", folder).table
    method, recall, nmi = (table.columns.index(name) for name in ("method", "R@1", "NMI"))
    rows = [row for row in table.rows if not row[method].startswith("proxygml, ")]
    lines = [
        f"| | {'nothing' if row[method] == frozen.FROZEN else 'linear head'} "
        f"| {row[method]} | {row[recall]} | {row[nmi]} |\n"
        for row in sorted(rows, key=lambda row: -float(row[recall].split()[0]))
    ]
    before, first_line, rest = text.partition("| Cars196, 144 px | | | | |\n")
    return before + first_line + "".join(lines) + rest[rest.index("\n\n") + 1 :]


def report(folder: Path, *, quick: bool = False) -> str:
    """The text of docs/results.md, in the order of the experiments."""
    by_experiment = {name: sections_of(name, folder, quick=quick) for name in EXPERIMENTS}
    sections = [section for own in by_experiment.values() for section in own]
    text = HEAD + verdict(sections) + METHOD + _datasets(sections)
    for name, own in by_experiment.items():
        text += f"## {name}\n{EXPERIMENTS[name].title} In the paper: {EXPERIMENTS[name].in_the_paper}.\n\n"
        if own and (remark := find(name).remark):
            text += f"{remark}\n\n"
        if not own:
            dataset = "cars-head" if name == "frozen" else "glyphs"  # glyphs starts from random weights
            text += f"Not run here so far: `{Section(name, dataset, 'paper', folder).command}`.\n\n"
        full = [section for section in own if section.dataset not in BRIEF]
        for number, section in enumerate(full):
            text += _in_full(section, quoted=number == 0)
        if brief := [section for section in own if section.dataset in BRIEF]:
            text += _in_brief(brief)
    return text + _notes(sections) + _runs(sections)


def _named(section: Section) -> str:
    return section.dataset + PROTOCOLS[section.protocol]


def _link(section: Section, ending: str) -> str:
    """Link from the page to a file of the section."""
    return replace(section, folder=Path("../results")).path.with_suffix(ending).as_posix()


def _datasets(sections: Iterable[Section]) -> str:
    used = {section.dataset for section in sections}
    rows = tuple((name, setting.about) for name, setting in SETTINGS.items() if name in used)
    return f"## datasets\n{Table(('name', 'setting'), rows).to_markdown()}\n" if rows else ""


def _in_full(section: Section, *, quoted: bool) -> str:
    """Table, figure and claims; the paper's numbers only where `quoted`."""
    table = section.table
    if not quoted:
        kept = [place for place, name in enumerate(table.columns) if not name.startswith(("paper", "quoted"))]
        columns, *rows = (tuple(line[place] for place in kept) for line in (table.columns, *table.rows))
        table = Table(columns, tuple(rows))
    title = f"{section.name} on {_named(section)}"
    text = f"### {title}\n{table.to_markdown()}\n![{title}]({_link(section, '.png')})\n\n"
    text += "".join(f"{remark}\n\n" for remark in section.mixed_times)
    if not section.claims:
        return text
    verdicts = section.claims_table.to_markdown()
    return text + verdicts.replace("no significant difference", "n.s.").replace("does not hold", "fails") + "\n"


def _in_brief(sections: Sequence[Section]) -> str:
    """Links to the tables, claims and figures of these datasets."""
    links = [f"[{_named(one)}]({_link(one, '.md')}) ([figure]({_link(one, '.png')}))" for one in sections]
    return f"Scores and claims on other datasets: {', '.join(links)}.\n\n"


def _notes(sections: Iterable[Section]) -> str:
    notes = dict.fromkeys(note for section in sections for note in section.caveats)
    return "".join(["## notes\n", *(f"- {note[2:]}\n" for note in notes), "\n"]) if notes else ""


def _runs(sections: Sequence[Section]) -> str:
    """Runs, seeds, hours and commits behind each section."""
    if not sections:
        return ""
    rows = []
    for section in sections:
        seeds = sorted({run["seed"] for run in section.results.runs})
        seconds = sum(run.get("seconds", 0.0) for run in section.results.runs)
        commits = sorted({str(run["made_by"]["commit"]) for run in section.results.runs})
        cells = (len(section.results.runs), ",".join(map(str, seeds)), f"{seconds / 3600:.1f}" if seconds else "-")
        rows.append((section.name, _named(section), *map(str, cells), str(len(section.missing)), " ".join(commits)))
    columns = ("experiment", "dataset", "runs", "seeds", "hours of training", "rows not run yet", "commits")
    machines = sorted({str(run["made_by"]["machine"]) for section in sections for run in section.results.runs})
    text = f"## runs\nMachine: {'; '.join(machines)}. A commit with -dirty had uncommitted changes.\n\n"
    return text + Table(columns, tuple(rows)).to_markdown()
