"""The run report: one self-contained page, from S3 alone.

Owns: `write_report`, the way from a run's objects to a file. Never touches: the log; it writes nothing to the store
but the index hint, as every query does.
Invariant: a page is a function of the run's objects; a number on it can be asked for with `roadstead batch query`.
A crash leaves: the file of before; the page is written beside it and renamed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roadstead.dashboards.report.data import read_run
from roadstead.dashboards.report.numbers import numbers_of
from roadstead.dashboards.report.page import render
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore

__all__ = ["write_report"]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def write_report(
    store: ObjectStore,
    keys: RunKeys,
    to: Path,
    *,
    with_audit: bool = True,
    progress: Progress = lambda what, done, total: None,
) -> int:
    """Write the page of a run to `to`; its size in bytes.

    with_audit: read every batch and check it, which costs about as much as `roadstead audit`.
    Raises ObjectMissing without such a run, StoreError when the store does not answer, OSError when `to` can't be
    written.
    """
    run = read_run(store, keys, with_audit=with_audit, progress=progress)
    body = render(run, numbers_of(run)).encode()
    beside = to.with_name(f".{to.name}.part")
    beside.write_bytes(body)
    beside.replace(to)
    return len(body)
