"""Signs of life of the trainer's ranks.

Owns: `<folder>/pulse/rank-<n>`, touched by a thread of each rank. Never touches: collectives, the socket.
Invariant: a pulse says that the rank's process runs, not that it makes progress: a rank that waits in a collective for
another one beats on, so the one that stands still is the one that hangs. Ranks of one machine.
A crash leaves: a file that stands still; files from before a rank 0 began say nothing to it.

Without it a hung rank other than 0, which nobody asks for its status, is noticed by the collective time-out alone:
minutes.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

_BEAT_S = 1.0


def beat(folder: Path, rank: int) -> None:
    """Touch the rank's file from now on, in a daemon thread."""
    file = _file(folder, rank)
    file.parent.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        while True:
            file.touch()
            time.sleep(_BEAT_S)

    threading.Thread(target=work, name="pulse", daemon=True).start()


def silence(folder: Path, ranks: int, began: float) -> dict[str, float]:
    """Seconds since the last beat of each rank, by its number as text (it travels as JSON). began: Unix seconds at
    which rank 0 did; ranks without a beat since then are still starting and left out."""
    now, found = time.time(), {}
    for rank in range(ranks):
        try:
            beaten = _file(folder, rank).stat().st_mtime
        except FileNotFoundError:
            continue
        if beaten >= began:
            found[str(rank)] = round(max(0.0, now - beaten), 1)
    return found


def _file(folder: Path, rank: int) -> Path:
    return folder / "pulse" / f"rank-{rank}"
