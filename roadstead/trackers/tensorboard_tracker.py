"""TensorBoard: event files in a folder of the run's own.

Owns: the files it writes. Never touches: event files that are there; each opening begins another, and TensorBoard
reads them as one.
Invariant: a point is one event with all of its values, so that a file torn by a crash holds it whole or not at all.
A crash leaves: a file whose last event may be torn; TensorBoard and `logged` end before it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILES = "events.out.tfevents.*"


class TensorBoardTracker:
    def __init__(self, folder: Path) -> None:
        self._parent = folder
        self._folder: Path | None = None
        self._writer: Any = None

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        # Without TensorFlow and without torch: the library's own writer, on its own copies of the messages.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = self._parent / run
        self._writer = EventFileWriter(str(self._folder))

    def logged(self, name: str) -> set[int]:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        assert self._folder is not None, "opened"
        return {
            event.step
            for file in self._folder.glob(_FILES)
            for event in LegacyEventFileLoader(str(file)).Load()
            if any(value.tag == name for value in event.summary.value)
        }

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
