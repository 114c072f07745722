"""A scraper of a run's targets, as Prometheus would be: it finds them by their files and keeps what they say."""

from __future__ import annotations

import functools
import json
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from prometheus_client.parser import text_string_to_metric_families

_INTERVAL_S = 0.25

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    labels: dict[str, str]
    """Of the target."""
    text: str

    @functools.cached_property
    def values(self) -> dict[tuple[str, Labels], float]:
        """Read only when asked for: the Temporal server's page is so long that the next scrape would wait for it."""
        return _values(self.text)

    def value(self, name: str, **labels: str) -> float:
        return self.values[(name, tuple(sorted(labels.items())))]

    def names(self) -> set[str]:
        return {name for name, _ in self.values}


@dataclass
class Scraper:
    """Scrapes every target in `folder` until the block ends."""

    folder: Path
    scrapes: dict[str, list[Scrape]] = field(default_factory=dict)
    """By the name of the target's file, in order."""
    files: set[str] = field(default_factory=set)
    """Of all targets that there were."""

    def __enter__(self) -> Scraper:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            for file in sorted(self.folder.glob("*.json")):
                self.files.add(file.stem)
                try:
                    (group,) = json.loads(file.read_text())
                    with urllib.request.urlopen(f"http://{group['targets'][0]}/metrics", timeout=5) as answer:
                        text = answer.read().decode()
                except (OSError, urllib.error.URLError):
                    continue  # it is still starting, or has just ended
                self.scrapes.setdefault(file.stem, []).append(Scrape(group["labels"], text))


def _values(text: str) -> dict[tuple[str, Labels], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
