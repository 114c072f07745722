"""A whole synthetic run in a store, healthy but for what a test plants in it.

The noise is that of real runs: engines and trainer scatter by 0.01 nats a token, older policies by more and with a
positive mean, lengths are log-normal and grow, rewards are right or wrong with a share that rises and depends on the
prompt, some responses are cut off, some cross a weight update, some groups are all right or all wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from roadstead.storage import batches, runs, schema, steps, train_rows, weights
from roadstead.storage.batches import BatchCommit, BatchGroup
from roadstead.storage.digest import table_digest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.parquet import encode
from roadstead.storage.runs import AttemptEnd, AttemptRecord, RunRecord
from roadstead.storage.steps import StepRecord
from roadstead.storage.train_rows import TrainMetrics, TrainResult
from roadstead.storage.weights import WeightFile, WeightsRef
from tests.support.rows import NOW, group_rows

Row = dict[str, Any]
TEMPLATES = (
    ("arithmetic", "What is {} plus {}?"),
    ("arithmetic", "Compute {} minus {}."),
    ("arithmetic", "{} times {} equals"),
    ("words", "How many letters are in a word of {} and {} letters?"),
)
GROUPS, MEMBERS = 8, 8
BOUND = 2
MOST_TOKENS = 128
_CAP = 2.0


class SyntheticRun:
    """`rows`, `train`: called with (step, rows) before anything is written; they plant faults by changing rows."""

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        *,
        seed: int = 0,
        rows: Callable[[int, list[Row]], None] = lambda step, rows: None,
        train: Callable[[int, list[Row], list[Row]], None] = lambda step, rows, train: None,
    ) -> None:
        self._store, self._keys = store, keys
        self._plant, self._plant_train = rows, train
        self._random = np.random.default_rng(seed)

    def write(self, count: int = 12) -> list[StepRecord]:
        store, keys = self._store, self._keys
        runs.create(
            store,
            keys,
            RunRecord(
                run_id=keys.run_id,
                config={"staleness": {"max_staleness": BOUND}},
                versions={},
                model_digest="m",
                dataset_digest="d",
                dataset_rows=100_000,
                created_at="2026-01-01T00:00:00Z",
            ),
        )
        runs.open_attempt(
            store,
            keys,
            AttemptRecord(
                run_id=keys.run_id,
                attempt=1,
                reason="start",
                from_version=0,
                fencing_token="t",
                started_at="2026-01-01T00:00:00Z",
            ),
        )
        weights.publish(store, keys, self._weights(0), parent=None, batch_digest=None)
        records = [self._step(step) for step in range(count)]
        runs.end_attempt(
            store,
            keys,
            AttemptEnd(
                run_id=keys.run_id,
                attempt=1,
                how="finished",
                version=count,
                cursor=count * GROUPS,
                terminal={},
                carried=(),
                ended_at="2026-01-01T01:00:00Z",
            ),
        )
        return records

    # -- one step -----------------------------------------------------------------------------------------

    def _step(self, step: int) -> StepRecord:
        store, keys = self._store, self._keys
        rows = [row for slot in range(GROUPS) for row in self._group(step, slot)]
        self._plant(step, rows)
        commit, batch = self._commit(step, rows)
        train = [self._train_row(step, row) for row in batch]
        self._plant_train(step, batch, train)
        metrics = TrainMetrics(
            loss=0.01,
            grad_norm=float(np.exp(self._random.normal(-1, 0.3))),
            grad_clipped=False,
            applied=True,
            learning_rate=1e-4,
            loss_tokens=1,
            importance_mean=1.0,
            importance_max=1.2,
            capped_share=0.0,
            kl_to_behavior=0.001,
        )
        result = train_rows.write(
            store,
            keys,
            train,
            TrainResult(step=step, batch_digest=commit.digest, weights=self._weights(step + 1), metrics=metrics),
        )
        parent = weights.manifest_of(store, keys, step)
        manifest = weights.publish(store, keys, result.weights, parent=parent, batch_digest=commit.digest)
        return steps.write(
            store,
            keys,
            StepRecord(
                run_id=keys.run_id,
                attempt=1,
                step=step,
                batch_digest=commit.digest,
                weights_in=parent.digest,
                weights_out=manifest.digest,
                rows=commit.rows,
                response_tokens=commit.response_tokens,
                max_staleness=commit.max_staleness,
                mean_reward=0.5,
                terminal={f"g{step * GROUPS + slot:08d}": "trained" for slot in range(GROUPS)},
                ledger={},
                cursor=(step + 1) * GROUPS,
                metrics=result.metrics,
            ),
        )

    def _commit(self, step: int, rows: list[Row]) -> tuple[BatchCommit, list[Row]]:
        """Stage the groups, then the batch of exactly these."""
        store, keys = self._store, self._keys
        by_slot = [rows[slot * MEMBERS : (slot + 1) * MEMBERS] for slot in range(GROUPS)]
        staged, batch = [], []
        for slot, group in enumerate(by_slot):
            # What belongs to the batch only is planted there and not in the staged group.
            extra = {name: [row.pop(name, None) for row in group] for name in ("advantage", "staleness")}
            table, name = schema.table_from_rows(group, batch=False), group[0]["group_id"]
            store.create(keys.group(name, 1), encode(table))
            staged.append(BatchGroup(slot=slot, group_id=name, attempt=1, digest=table_digest(table), v_traj=step))
            rewards = np.array([np.nan if row["reward"] is None else row["reward"] for row in group])
            deviation = float(np.nanstd(rewards))
            for member, row in enumerate(group):
                advantage = (rewards[member] - np.nanmean(rewards)) / (deviation + 1e-6) if deviation else 0.0
                planted, age = extra["advantage"][member], extra["staleness"][member]
                batch.append(
                    {
                        **row,
                        "step": step,
                        "slot": slot,
                        "staleness": step - row["head_version"] if age is None else age,
                        "advantage": (0.0 if np.isnan(advantage) else advantage) if planted is None else planted,
                        "occupied_at": NOW + 3,
                    }
                )
        table = schema.table_from_rows(batch, batch=True)
        return batches.commit(store, keys, table, attempt=1, groups=tuple(staged)), batch

    def _group(self, step: int, slot: int) -> list[Row]:
        random, position = self._random, step * GROUPS + slot
        environment, template = TEMPLATES[position % len(TEMPLATES)]
        hardness = random.beta(2, 2)
        versions = sorted(random.choice([max(0, step - lag) for lag in (0, 0, 1, 2)], size=2))
        made = group_rows(f"g{position:08d}", members=MEMBERS, run_id=self._keys.run_id)
        for row in made:
            tokens = int(np.clip(np.exp(random.normal(3.4 + 0.01 * step, 0.4)), 4, MOST_TOKENS))
            cut = random.random() < 0.04
            tokens = MOST_TOKENS // 2 if cut else tokens
            crossing = versions[0] != versions[1] and random.random() < 0.5
            at = tokens // 2
            spans = (
                [
                    {"version": int(versions[0]), "start": 0, "end": at},
                    {"version": int(versions[1]), "start": at, "end": tokens},
                ]
                if crossing
                else [{"version": int(versions[0]), "start": 0, "end": tokens}]
            )
            reward = float(random.random() < np.clip(hardness + 0.02 * step, 0.02, 0.98))
            row.update(
                prompt_id=f"p{position}",
                prompt_text=template.format(position % 97, position % 89),
                response_token_ids=[int(t) for t in random.integers(3, 400, tokens)],
                loss_mask=[True] * tokens,
                behavior_logprobs=[float(x) for x in -random.gamma(0.6, 1.2, tokens).astype(np.float32)],
                version_spans=spans,
                v_traj=int(versions[0]),
                head_version=int(versions[0]),
                tail_version=int(versions[1] if crossing else versions[0]),
                reward=reward,
                reward_components=[("correct", reward)],
                finish_reason="length" if cut else "stop",
                turns=[{"role": "assistant", "start": 0, "end": tokens}],
                engine_id=f"engine-{random.integers(2)}",
                environment=environment,
                seed=int(random.integers(1 << 30)),
            )
        return made

    def _train_row(self, step: int, row: Row) -> Row:
        random = self._random
        behavior = np.array(row["behavior_logprobs"], dtype=np.float64)
        lag = np.concatenate([np.full(s["end"] - s["start"], step - s["version"]) for s in row["version_spans"]])
        gap = random.normal(0, 0.01, len(behavior)) + lag * random.normal(0.003, 0.06, len(behavior))
        return self.trained(row, (behavior - gap).astype(np.float32))

    @staticmethod
    def trained(row: Row, trainer: np.ndarray) -> Row:
        """A train row that follows from its logprobs."""
        behavior = np.array(row["behavior_logprobs"], dtype=np.float32)
        mask = np.array(row["loss_mask"], dtype=bool) & (row["reward"] is not None)
        importance = np.exp(trainer - behavior)[mask].astype(np.float64)
        some = importance.size > 0
        return {
            "group_id": row["group_id"],
            "member": row["member"],
            "trainer_logprobs": trainer,
            "importance_mean": float(importance.mean()) if some else 1.0,
            "importance_max": float(importance.max()) if some else 1.0,
            "capped_share": float((importance > _CAP).mean()) if some else 0.0,
            "kl_to_behavior": float((behavior - trainer)[mask].astype(np.float64).mean()) if some else 0.0,
            "loss": -row["advantage"] * 0.001,
        }

    @staticmethod
    def _weights(version: int) -> WeightsRef:
        file = WeightFile(name="model.safetensors", key=f"weights-{version}", bytes=1, sha256=f"w{version}")
        return WeightsRef(version=version, digest=f"w{version}", files=(file,))
