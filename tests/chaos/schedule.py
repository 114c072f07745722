"""What is broken in a run, and when: a function of the seed alone.

Owns: the kinds of faults, the components they strike, the commit points, the seeded choice, the features of the run.
Never touches: processes, S3. Invariant: the same seed and kinds give the same schedule; when exactly a fault strikes
is a matter of the machine's speed, which is why a seed that failed may need a few tries.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.chaos.features import FEATURES, features

WORKERS = ("orchestrator-worker", "ledger-worker", "rollout-worker", "train-worker")
PROCESSES = (*WORKERS, "engine", "engine-core", "trainer-rank", "trainer", "temporal", "s3")
"""engine: vLLM's server process; engine-core: the process under it that generates. trainer-rank: the process that
trains; trainer: the launcher above it, the whole group. With several engines or ranks it is the first one's."""


@dataclass(frozen=True)
class CommitPoint:
    """A PUT that decides something."""

    key: str
    """Glob."""
    writer: str
    """The component that writes it, and that is killed around it."""


COMMIT_POINTS = {
    "staged-group": CommitPoint("*/groups/*.parquet", "rollout-worker"),
    "batch-data": CommitPoint("*/batches/step=*/data-*.parquet", "orchestrator-worker"),
    "batch-stats": CommitPoint("*/batches/step=*/stats-*.parquet", "orchestrator-worker"),
    "batch-commit": CommitPoint("*/batches/step=*/_COMMIT.json", "orchestrator-worker"),
    "weights-file": CommitPoint("*/weights/v=*/*.safetensors", "trainer-rank"),
    "train-rows": CommitPoint("*/batches/step=*/train-*.parquet", "trainer-rank"),
    "checkpoint": CommitPoint("*/checkpoints/v=*/_COMPLETE.json", "trainer-rank"),
    "weights-manifest": CommitPoint("*/weights/v=*/manifest.json", "orchestrator-worker"),
    "latest-hint": CommitPoint("*/weights/LATEST", "orchestrator-worker"),
    "step-record": CommitPoint("*/steps/step=*.json", "orchestrator-worker"),
    "evaluated-prompt": CommitPoint("*/evals/v=*/groups/*.parquet", "rollout-worker"),
    "evaluation-data": CommitPoint("*/evals/v=*/data-*.parquet", "orchestrator-worker"),
    "evaluation-summary": CommitPoint("*/evals/v=*/summary.json", "orchestrator-worker"),
    "dead-letter": CommitPoint("*/dead-letters/*.json", "rollout-worker"),
}

STORE_FAULTS = ("store:errors", "store:delays", "store:lost-answers", "store:resets")
MACHINE = ("machine", "machine-db-lost", "machine-in-resume")
ORDERLY = ("stop", "sigterm", "ctrl-c")

KINDS: tuple[str, ...] = (
    *(f"kill:{name}" for name in PROCESSES),
    *(f"term:{name}" for name in PROCESSES if name not in {"engine-core", "trainer-rank"}),
    *(f"hang:{name}" for name in PROCESSES),
    *(f"pause:{name}" for name in PROCESSES),
    "kill:engine-1",
    "hang:engine-1",
    "kill:trainer-rank-1",
    "hang:trainer-rank-1",
    *(f"{moment}:{point}" for point in COMMIT_POINTS for moment in ("before", "after")),
    *(f"{moment}-machine:{point}" for point in COMMIT_POINTS for moment in ("before", "after")),
    *STORE_FAULTS,
    "connections:cut",
    "connections:freeze",
    *MACHINE,
    *ORDERLY,
)
"""kill: SIGKILL. term: SIGTERM to that process alone, which must end it within its window. hang: SIGSTOP until it is
found. pause: SIGSTOP for some seconds, which must be taken for nothing.
before, after: SIGKILL of the writer at a commit point, its PUT not sent or its answer lost; -machine: of everything.
store: the S3 server's answers, through a proxy. connections: between every process of the run and Temporal.
machine: SIGKILL of the host and all it started, and of both servers, then `roadstead resume`; machine-db-lost: and
Temporal's database is deleted, so that the resume has S3 alone; machine-in-resume: once more while it resumes.
stop, sigterm, ctrl-c: orderly ends, then a resume.
engine-1, trainer-rank-1: the second one."""

_NEEDS = (
    ("*:engine-1", "two-engines"),
    ("*:trainer-rank-1", "two-ranks"),
    ("*:evaluat*", "evaluation"),
    ("*:dead-letter", "dead-letters"),
)
"""Kinds that have nothing to strike without a feature. They are drawn in runs that have it."""

_FAMILIES: tuple[tuple[str, ...], ...] = (
    ("kill:*-worker", "term:*-worker", "before:*", "after:*"),
    ("machine-db-lost", "*-machine:*"),
    ("kill:engine*", "kill:trainer*", "term:engine", "term:trainer"),
    ("kill:temporal", "kill:s3", "term:temporal", "term:s3", "store:*", "connections:*"),
    ("hang:*",),
    ("stop", "sigterm", "ctrl-c"),
    ("machine", "machine-in-resume", "*-machine:*"),
)
"""Consecutive seeds take their first fault from consecutive families, so that a few of them reach everywhere."""
_QUICK: tuple[tuple[str, ...], ...] = (
    ("kill:*-worker", "kill:temporal", "kill:s3", "term:*-worker"),
    ("before:*", "after:*"),
    ("pause:*",),
    ("store:*",),
    ("connections:*",),
)
"""The other faults of a run. The rest is slow: each costs half a minute or more, of waiting or of loading a model; more
than one a run would take minutes."""


@dataclass(frozen=True)
class Fault:
    kind: str
    gap: int
    """Steps to be recorded since the fault before (or the start) until it strikes."""
    delay_s: float
    """Then this long."""
    for_s: float
    """Of those that end by themselves."""

    @property
    def component(self) -> str:
        """Whose recovery it measures."""
        verb, _, what = self.kind.partition(":")
        if verb in {"before", "after"}:
            return COMMIT_POINTS[what].writer
        if verb.endswith("-machine"):
            return "machine"
        return what if verb in {"kill", "term", "hang", "pause"} else self.kind


@dataclass(frozen=True)
class Schedule:
    seed: int
    steps: int
    faults: tuple[Fault, ...]
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f.kind for f in self.faults)


def schedule(
    seed: int, kinds: Sequence[str], *, steps: int, count: int, given: Sequence[str] | None = None
) -> Schedule:
    """`count` faults for one run of `steps` steps, from `kinds`. given: the run's features; None: the seed's own.

    Raises ValueError when there are no kinds.
    """
    if not kinds:
        raise ValueError("no kind of fault is left to choose from; see --list")
    have = features(seed) if given is None else tuple(given)
    choice = random.Random(f"chaos/{seed}")
    if not count:
        return Schedule(seed, steps, (), have)
    offered = [kind for kind in kinds if needs(kind) in {None, *have}] or kinds
    first = _one(choice, offered, _FAMILIES[seed % len(_FAMILIES)])
    picked = [first, *(_one(choice, offered, choice.choice(_QUICK)) for _ in range(count - 1))]
    choice.shuffle(picked)
    # The steps after the last fault must be enough to see that the run goes on: S + 1 of them.
    room = max(0, steps - 3 - count)
    faults = []
    for kind in picked:
        gap = 1 + choice.randint(0, 1) if room else 1
        room -= gap - 1
        faults.append(
            Fault(kind, gap, round(choice.uniform(0.0, 1.5), 2), _seconds(kind, choice)),
        )
    needed = {*have, *(needs(kind) for kind in picked)}
    return Schedule(seed, steps, tuple(faults), tuple(name for name in FEATURES if name in needed))


def needs(kind: str) -> str | None:
    """The feature without which a run has nothing for it to strike."""
    return next((feature for glob, feature in _NEEDS if fnmatchcase(kind, glob)), None)


def _one(choice: random.Random, kinds: Sequence[str], globs: Sequence[str]) -> str:
    """First a glob, then a kind of it: the many commit points would leave no room for the rest."""
    pools = [pool for glob in globs if (pool := [kind for kind in kinds if fnmatchcase(kind, glob)])]
    return choice.choice(choice.choice(pools or [list(kinds)]))


def _seconds(kind: str, choice: random.Random) -> float:
    low, high = {"connections:freeze": (15.0, 25.0), "machine-in-resume": (1.0, 40.0)}.get(kind, (2.0, 8.0))
    return round(choice.uniform(low, high), 1)


def _in(kind: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(kind, glob) for glob in globs)


def select(globs: Sequence[str]) -> list[str]:
    """Kinds that match any of the globs. Raises ValueError for a glob that matches none."""
    for glob in globs:
        if not _in_any(glob):
            raise ValueError(f"--kinds {glob}: no such kind; see --list")
    return [kind for kind in KINDS if _in(kind, globs)]


def _in_any(glob: str) -> bool:
    return any(fnmatchcase(kind, glob) for kind in KINDS)
