"""The catalogue as a table for people: `python -m roadstead.metrics.table docs/metrics.md` puts it there.

Owns: what stands between the two marks in that file. Never touches: the rest of it.
Invariant: the page has what the catalogue has; a test compares them.
A crash leaves: the old page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from roadstead.metrics.catalogue import CATALOGUE, Metric

BEGIN = "<!-- metrics: made by `python -m roadstead.metrics.table docs/metrics.md` -->"
END = "<!-- metrics: end -->"
_ROLES = {
    "orchestrator": "Orchestrator worker",
    "ledger": "Ledger worker",
    "rollout": "Rollout worker",
    "train": "Train worker",
    "every": "Every worker",
}
_FEW = 6
"""Label values that are listed."""


def table() -> str:
    """Markdown: a heading and a table for each role."""
    parts = []
    for role, title in _ROLES.items():
        rows = [_row(metric) for metric in CATALOGUE if metric.role == role]
        parts += [f"### {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(parts)


def written(page: str) -> str:
    """`page` with the table of today. Raises ValueError when it has not the two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs two lines for the table: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


def _row(metric: Metric) -> str:
    labels = ", ".join(_label(name, values) for name, values in metric.labels.items())
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def _label(name: str, values: tuple[str, ...]) -> str:
    listed = f" ({', '.join(values)})" if 0 < len(values) <= _FEW else ""
    return f"`{name}`{listed}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(written(file.read_text()))
