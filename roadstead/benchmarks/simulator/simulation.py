"""The event loop: admit, generate, complete, take a batch, train, publish, sync.

Owns: time, the engines, the trainer, and what became of each group. Never touches: how a policy decides.
Invariants: a batch trains version `step` -> `step` + 1 and the new version is public at the END of training plus the
time of publication, never before; one batch trains at a time; a group is admitted only while an engine has a slot free,
so at most one group's responses wait. The same policy, trace, costs, setup and seed give the same run.

Events are the ends of responses, the boundaries at which something joins or leaves an engine, and the ends of training:
a few for each trajectory, whatever its length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from roadstead.benchmarks.simulator.costs import Costs
from roadstead.benchmarks.simulator.engine import Engine, Request
from roadstead.benchmarks.simulator.policies import Group, Policy
from roadstead.benchmarks.simulator.workload import Trace


class Stalled(RuntimeError):
    """Nothing can happen any more, and the batches are not trained."""


@dataclass(frozen=True)
class Setup:
    """The machines. Raises ValueError on ones that can't work."""

    engines: int = 2
    concurrency: int = 40
    """Responses decoding at once, an engine."""
    partial_rollout: bool = True
    """Responses in flight go on with new weights; else an engine lets them finish before it loads."""

    def __post_init__(self) -> None:
        for key, value in (("engines", self.engines), ("concurrency", self.concurrency)):
            if value < 1:
                raise ValueError(f"{key}: {value} can't generate; use at least 1")


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    step: int
    groups: tuple[int, ...]
    versions: tuple[int, ...]
    """Policy version at admission of each group."""
    trajectories: int
    tokens: int
    """Response tokens that the loss saw."""
    masked: int
    """Response tokens that it did not."""
    ages: dict[int, int]
    """Step minus oldest version among the tokens that the loss saw -> trajectories."""
    train_seconds: float
    published: float
    """Time at which version `step` + 1 became public."""
    discarded: int
    """Tokens thrown away until then, since the start."""
    occupied: float
    """Slot-seconds of the engines until then, since the start."""


@dataclass(slots=True, eq=False)
class _Rollout:
    group: Group
    placed: list[tuple[Engine, Request]] = field(default_factory=list)
    running: int = 0


class Simulation:
    def __init__(self, policy: Policy, trace: Trace, costs: Costs, setup: Setup, seed: int) -> None:
        self.policy = policy
        self.costs = costs
        self.setup = setup
        self.engines = [Engine(costs, setup.concurrency, partial=setup.partial_rollout) for _ in range(setup.engines)]
        self.now = 0.0
        self.batches: list[TrainedBatch] = []
        self.admitted = 0
        self.dropped = 0
        self.discarded_tokens = 0
        self.events = 0
        self._groups = trace.draw(seed)
        self._next = next(self._groups)
        self._rollouts: dict[int, _Rollout] = {}
        self._training: list[Group] | None = None
        self._trained_at = math.inf
        self._train_seconds = 0.0
        self._oldest = 0

    @property
    def held(self) -> int:
        """Groups admitted, and neither trained nor dropped."""
        return len([rollout for rollout in self._rollouts.values() if not rollout.group.dropped])

    def run(self, batches: int, on_batch: Callable[[], None] = lambda: None) -> list[TrainedBatch]:
        """Until so many batches are published; raises Stalled when that can't be."""
        self._settle()
        while len(self.batches) < batches:
            self.events += 1
            self.now = min(self._trained_at, *(engine.next_time for engine in self.engines))
            if self.now == math.inf:
                policy = self.policy
                raise Stalled(
                    f"policy: {policy.name} with max_staleness: {policy.max_staleness} stopped before batch "
                    f"{policy.version}: {self.held} groups held, none running; this rule can't feed this trainer"
                )
            for engine in self.engines:
                if engine.next_time <= self.now:
                    for request in engine.advance():
                        self._left(request)
            if self._trained_at <= self.now:
                self._publish()
                on_batch()
            self._settle()
        return self.batches

    def _settle(self) -> None:
        """Everything that takes no time: hand a batch to an idle trainer, drop, admit."""
        if self._training is None and (batch := self.policy.take()) is not None:
            self._train(batch)
        for group in self.policy.collect_dropped():
            self._drop(self._rollouts[group.id])
        self._admit()

    def _admit(self) -> None:
        room = self.setup.engines * self.setup.concurrency - sum(engine.held for engine in self.engines)
        while room > 0:
            prompt, lengths = self._next
            group = Group(self.admitted, len(lengths), self.policy.version)
            if not self.policy.admit(group):
                return
            self.admitted += 1
            room -= len(lengths)
            rollout = _Rollout(group, running=len(lengths))
            self._rollouts[group.id] = rollout
            for length in lengths:
                engine = min(self.engines, key=lambda engine: engine.held)
                request = Request(prompt, length, rollout)
                rollout.placed.append((engine, request))
                engine.submit(request, self.now)
            self._next = next(self._groups)

    def _left(self, request: Request) -> None:
        rollout: _Rollout = request.owner
        rollout.running -= 1
        group = rollout.group
        if group.dropped:
            self.discarded_tokens += request.done
        if not rollout.running:
            if group.dropped:
                del self._rollouts[group.id]
            else:
                group.finished = True
                self.policy.finish(group)

    def _drop(self, rollout: _Rollout) -> None:
        self.dropped += 1
        if not rollout.running:
            del self._rollouts[rollout.group.id]
        for engine, request in rollout.placed:
            if request.left:
                self.discarded_tokens += request.done
            else:
                engine.abort(request, self.now)

    def _train(self, batch: list[Group]) -> None:
        self._training = batch
        self._oldest = self.policy.oldest_trained()
        requests = [request for group in batch for _, request in self._rollouts[group.id].placed]
        self._train_seconds = self.costs.training(request.prompt + request.length for request in requests)
        self._trained_at = self.now + self._train_seconds + self.costs.publish

    def _publish(self) -> None:
        batch, step = self._training, self.policy.version
        assert batch is not None, "nothing is published without training"
        tokens = masked = trajectories = 0
        ages: Counter[int] = Counter()
        for group in batch:
            for _, request in self._rollouts.pop(group.id).placed:
                seen = [(version, count) for version, count in request.spans if version >= self._oldest]
                visible = sum(count for _, count in seen)
                tokens += visible
                masked += request.length - visible
                trajectories += 1
                if seen:
                    ages[step - seen[0][0]] += 1
        self.batches.append(
            TrainedBatch(
                step=step,
                groups=tuple(group.id for group in batch),
                versions=tuple(group.version for group in batch),
                trajectories=trajectories,
                tokens=tokens,
                masked=masked,
                ages=dict(ages),
                train_seconds=self._train_seconds,
                published=self.now,
                discarded=self.discarded_tokens,
                occupied=sum(engine.occupied(self.now) for engine in self.engines),
            )
        )
        self._training, self._trained_at = None, math.inf
        self.policy.publish()
        for engine in self.engines:
            engine.load(self.policy.version, self.now)
