"""A table of words, as Markdown, CSV and LaTeX."""

import csv
import io
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of cells under column names."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """As GitHub shows it; numbers stand to the right of the first column."""
        lines = [self.columns, tuple("---" if place == 0 else "---:" for place in range(len(self.columns))), *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)

    def to_csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def to_latex(self) -> str:
        """A tabular of the package booktabs."""
        lines = [" & ".join(map(_escape, line)) + r" \\" for line in (self.columns, *self.rows)]
        shape = "l" + "r" * (len(self.columns) - 1)
        body = "\n".join([lines[0], r"\midrule", *lines[1:]])
        return f"\\begin{{tabular}}{{{shape}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"


SPECIAL = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "^": r"\^{}", "±": r"$\pm$", "~": r"\~{}"}
SPECIAL |= {"{": r"\{", "}": r"\}", "\\": r"\textbackslash{}", "λ": r"$\lambda$", "≥": r"$\ge$"}


def _escape(text: str) -> str:
    return "".join(SPECIAL.get(letter, letter) for letter in text)
