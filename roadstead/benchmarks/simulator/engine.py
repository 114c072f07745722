"""One inference engine: a concurrency limit, a FIFO queue, and decoding whose speed depends on what runs.

Owns: which requests run, when they finish, and which version made which token. Never touches: groups, policies.
Invariant: whatever comes from outside (a request, an abort, new weights) takes effect at the next boundary between
decode steps, as in an engine that decodes token by token; nothing happens inside a step.

All running requests gain one token a step. So the engine keeps one count of steps, its clock in tokens; a request that
starts at count s ends at s + length, whoever comes and goes meanwhile. The ends are in a heap, the time until the next
one is a closed form, and a change of membership costs O(log running), not a token.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any

from roadstead.benchmarks.simulator.costs import Costs


@dataclass(slots=True, eq=False)
class Request:
    """One response. `owner` is the caller's; the engine never looks at it."""

    prompt: int
    length: int
    owner: Any = None
    start: int = -1
    """The engine's step count when it started; -1 while it waits."""
    left: bool = False
    done: int = 0
    """Tokens generated, known once it has left the engine."""
    spans: tuple[tuple[int, int], ...] = ()
    """(version, tokens) in order, known once it has left the engine."""


class Engine:
    def __init__(self, costs: Costs, concurrency: int, *, partial: bool = True) -> None:
        """concurrency: requests decoding at once. partial: running requests survive a weight update (`load`)."""
        self._costs = costs
        self._concurrency = concurrency
        self._partial = partial
        self._waiting: deque[Request] = deque()
        self._ends: list[tuple[int, int, Request]] = []
        self._started = 0
        self._running = 0
        self._context = 0
        self._steps = 0
        self._clock = 0.0
        """Time of the last boundary; later than now while the engine prefills or loads."""
        self._planned = 0
        """Steps from the last boundary to the next one."""
        self._aborting: list[Request] = []
        self._pending: int | None = None
        self._marks: list[int] = [0]
        self._versions: list[int] = [0]
        """From step count `_marks[i]` on, version `_versions[i]` decodes."""
        self.next_time = math.inf
        """When this engine next wants `advance`."""
        self._slot_seconds = 0.0
        self.tokens = 0
        """Generated since the start."""

    @property
    def held(self) -> int:
        """Requests running and waiting."""
        return self._running + len(self._waiting)

    def occupied(self, now: float) -> float:
        """Running requests, integrated over time until `now`, in seconds."""
        return self._slot_seconds + self._running * max(0.0, now - self._clock)

    def submit(self, request: Request, now: float) -> None:
        """Queue a request."""
        self._waiting.append(request)
        if self._running < self._concurrency and self._may_start():
            self._interrupt(now)

    def abort(self, request: Request, now: float) -> None:
        """Take a request out at the next boundary; `advance` returns it then, unless it has finished by itself."""
        self._aborting.append(request)
        self._interrupt(now)

    def load(self, version: int, now: float) -> None:
        """New weights. Partial rollout: at the next boundary, running requests go on with them. Else: nothing starts
        any more, the running ones finish with the old weights, and then it loads."""
        self._pending = version
        self._interrupt(now)

    def advance(self) -> list[Request]:
        """Go to `next_time`; return the requests that left, finished or aborted."""
        self._forward(self._planned)
        left: list[Request] = []
        while self._ends and self._ends[0][0] <= self._steps:
            self._leave(heapq.heappop(self._ends)[2], left)
        for request in self._aborting:
            self._leave(request, left)
        self._aborting.clear()
        if self._pending is not None and (self._partial or not self._running):
            self._marks.append(self._steps)
            self._versions.append(self._pending)
            self._clock += self._costs.load
            self._slot_seconds += self._running * self._costs.load
            self._pending = None
            # The end of the load is a boundary of its own: what comes meanwhile is there when it ends.
            self._planned, self.next_time = 0, self._clock
            return left
        self._start()
        self._plan()
        return left

    def _may_start(self) -> bool:
        return self._partial or self._pending is None

    def _start(self) -> None:
        prompts = 0
        while self._waiting and self._running < self._concurrency and self._may_start():
            request = self._waiting.popleft()
            request.start = self._steps
            self._started += 1
            heapq.heappush(self._ends, (self._steps + request.length, self._started, request))
            self._running += 1
            prompts += request.prompt
        if prompts:
            self._context += prompts
            self._clock += prompts * self._costs.prefill
            self._slot_seconds += self._running * prompts * self._costs.prefill

    def _leave(self, request: Request, left: list[Request]) -> None:
        if request.left:
            return
        request.left = True
        if request.start < 0:
            self._waiting.remove(request)
        else:
            request.done = self._steps - request.start
            request.spans = self._spans(request.start, self._steps)
            self._running -= 1
            self._context -= request.prompt + request.done
        left.append(request)

    def _spans(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        first = bisect_right(self._marks, start) - 1
        spans = []
        for index in range(first, len(self._marks)):
            begin = max(start, self._marks[index])
            stop = min(end, self._marks[index + 1]) if index + 1 < len(self._marks) else end
            if stop > begin:
                spans.append((self._versions[index], stop - begin))
        return tuple(spans)

    def _forward(self, steps: int) -> None:
        if steps:
            seconds = self._costs.decode(steps, self._running, self._context)
            self._clock += seconds
            self._slot_seconds += self._running * seconds
            self._steps += steps
            self._context += steps * self._running
            self.tokens += steps * self._running

    def _plan(self) -> None:
        """The next boundary that matters is the first end."""
        while self._ends and self._ends[0][2].left:
            heapq.heappop(self._ends)
        if self._ends:
            self._planned = self._ends[0][0] - self._steps
            self.next_time = self._clock + self._costs.decode(self._planned, self._running, self._context)
        else:
            self._planned, self.next_time = 0, math.inf

    def _interrupt(self, now: float) -> None:
        """Make the end of the step in progress the next boundary."""
        if not self._running:
            self._clock = max(self._clock, now)
        if self._clock < now:
            elapsed = self._costs.whole_steps(now - self._clock, self._running, self._context)
            self._forward(min(elapsed, self._planned))
        self._planned = 0 if self._clock >= now else min(1, self._ends[0][0] - self._steps)
        self.next_time = self._clock + self._costs.decode(self._planned, self._running, self._context)
