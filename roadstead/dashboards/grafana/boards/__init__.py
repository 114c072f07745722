"""The six dashboards, a module each: what of a run is shown where, and in whose words.

Owns: panels and their order. Never touches: Grafana, the look of a panel.
Invariant: a panel is written once, in the dashboard of its subject; the overview shows some of them again.
"""

from __future__ import annotations

from roadstead.dashboards.grafana.board import Board
from roadstead.dashboards.grafana.boards import data, engines, faults, overview, staleness, trainer

BOARDS: tuple[Board, ...] = (
    *(overview.BOARD, staleness.BOARD, engines.BOARD, trainer.BOARD, data.BOARD, faults.BOARD),
)
