"""An engine that decodes token by token: slow, obvious, and what the closed form must equal."""

from __future__ import annotations

from dataclasses import dataclass, field

from roadstead.benchmarks.simulator.costs import Costs


@dataclass
class TokenRequest:
    number: int
    arrives: float
    prompt: int
    length: int
    aborts: float | None = None
    versions: list[int] = field(default_factory=list)
    """One a token."""
    ended: float = -1.0


def decode_all(
    costs: Costs, concurrency: int, requests: list[TokenRequest], loads: list[tuple[float, int]], partial: bool
) -> None:
    """Run to the end; `loads` are (time, version). Fills `versions` and `ended` of every request."""
    coming = sorted(requests, key=lambda request: (request.arrives, request.number))
    loads = sorted(loads)
    waiting: list[TokenRequest] = []
    running: list[TokenRequest] = []
    clock, version = 0.0, 0
    pending: int | None = None
    while coming or waiting or running or pending is not None or loads:
        # A boundary: everything that came until now takes effect.
        while coming and coming[0].arrives <= clock:
            waiting.append(coming.pop(0))
        while loads and loads[0][0] <= clock:
            pending = loads.pop(0)[1]
        for request in [*running, *waiting]:
            if request.aborts is not None and request.aborts <= clock:
                request.ended = clock
                (running if request in running else waiting).remove(request)
        if pending is not None and (partial or not running):
            version, pending = pending, None
            clock += costs.load
            continue
        if partial or pending is None:
            started = waiting[: concurrency - len(running)]
            del waiting[: len(started)]
            running += started
            if started and (prefill := sum(request.prompt for request in started) * costs.prefill):
                clock += prefill
                continue
        if not running:
            upcoming = [request.arrives for request in coming] + [time for time, _ in loads]
            if not upcoming:
                return
            clock = max(clock, min(upcoming))
            continue
        context = sum(request.prompt + len(request.versions) for request in running)
        clock += costs.base(len(running)) + context * costs.per_context
        for request in list(running):
            request.versions.append(version)
            if len(request.versions) == request.length:
                request.ended = clock
                running.remove(request)
