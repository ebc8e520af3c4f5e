"""Tables as Markdown, CSV and LaTeX, whatever a cell holds."""

import csv
import io

from proxygml.paper.tables import Table

TABLE = Table(("method", "R@1, %"), (("S^pos & M_x", "81.0 ± 2.5"), ("a|b", "-")))


def test_markdown_keeps_its_columns_whatever_a_cell_holds() -> None:
    assert TABLE.to_markdown() == ("| method | R@1, % |\n|---|---:|\n| S^pos & M_x | 81.0 ± 2.5 |\n| a\\|b | - |\n")


def test_csv_reads_back_as_it_was() -> None:
    assert [tuple(row) for row in csv.reader(io.StringIO(TABLE.to_csv()))] == [TABLE.columns, *TABLE.rows]


def test_latex_escapes_what_has_a_meaning_there() -> None:
    lines = TABLE.to_latex().splitlines()
    assert lines[0] == r"\begin{tabular}{lr}"
    assert r"method & R@1, \% \\" in lines
    assert r"S\^{}pos \& M\_x & 81.0 $\pm$ 2.5 \\" in lines


HOSTILE = Table(
    ("name", "=1+1"), (("<script>alert(1)</script>\n# heading", "-0.3"), ("@SUM(A1)", "+cmd"), ("-", "+.5"))
)


def test_csv_has_no_formulas() -> None:
    read = list(csv.reader(io.StringIO(HOSTILE.to_csv())))
    assert read[0] == ["name", "'=1+1"]
    assert read[1][1] == "-0.3"
    assert read[2] == ["'@SUM(A1)", "'+cmd"]
    assert read[3] == ["-", "+.5"]


def test_markdown_holds_no_tag_and_no_line_of_a_cell() -> None:
    shown = HOSTILE.to_markdown()
    assert "<" not in shown
    assert len(shown.splitlines()) == 2 + len(HOSTILE.rows)
