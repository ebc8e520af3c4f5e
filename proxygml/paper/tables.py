"""A table as Markdown, CSV and LaTeX."""

import csv
import io
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of cells under column names."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """For GitHub; all columns but the first are right-aligned."""
        header, *rows = (" | ".join(map(_for_markdown, line)) for line in (self.columns, *self.rows))
        rule = "|".join(["---", *["---:"] * (len(self.columns) - 1)])
        return f"| {header} |\n|{rule}|\n" + "".join(f"| {row} |\n" for row in rows)

    def to_csv(self) -> str:
        text = io.StringIO()
        lines = [map(_for_csv, line) for line in (self.columns, *self.rows)]
        csv.writer(text, lineterminator="\n").writerows(lines)
        return text.getvalue()

    def to_latex(self) -> str:
        """A tabular for the package booktabs."""
        lines = [" & ".join(map(_for_latex, line)) + r" \\" for line in (self.columns, *self.rows)]
        shape = "l" + "r" * (len(self.columns) - 1)
        body = "\n".join([lines[0], r"\midrule", *lines[1:]])
        return f"\\begin{{tabular}}{{{shape}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"


SPECIAL = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "^": r"\^{}", "±": r"$\pm$", "~": r"\~{}"}
SPECIAL |= {"{": r"\{", "}": r"\}", "\\": r"\textbackslash{}", "λ": r"$\lambda$", "≥": r"$\ge$"}


def _for_latex(text: str) -> str:
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def _for_markdown(text: str) -> str:
    """Escape what would end a cell or start a line or an HTML tag."""
    return " ".join(text.replace("|", r"\|").replace("<", "&lt;").split("\n"))


def _for_csv(text: str) -> str:
    """Escape what a spreadsheet would take for a formula; signed numbers are none."""
    return f"'{text}" if re.match(r"[=@\t\r]|[+-][^\d.\s]", text) else text
