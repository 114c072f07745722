"""A report page as data: its tables, its JSON, its tags."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Parsed(HTMLParser):
    """`tables` by data-table: rows of cell texts, head first. `tags`: (name, attributes) in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data: Any = None
        self._table: list[list[str]] | None = None
        self._cell = self._json = self._raw = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self._raw = tag in {"script", "style"}
        self._json = attributes.get("id") == "data"
        if tag == "table":
            self._table = self.tables.setdefault(attributes.get("data-table") or "", [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in {"td", "th"} and self._table is not None:
            self._table[-1].append("")
        self._cell = (self._cell and tag not in {"table", "tr"}) or tag in {"td", "th"}

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._table, self._cell = None, False
        self._raw = self._raw and tag not in {"script", "style"}

    def handle_data(self, data: str) -> None:
        if self._json and self._raw:
            self.data = json.loads(data)
        elif not self._raw:
            self.text += data
            if self._cell and self._table:
                self._table[-1][-1] += data.strip()


def value(text: str) -> float | None:
    """A number as the page writes it."""
    return None if text == "–" else float(text.replace(",", "").replace("−", "-"))  # noqa: RUF001
