"""evaluate_group and close_evaluation: what they stage, adopt, refuse and put on record. The engine is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from roadstead.activities.close_evaluation import CloseEvaluation
from roadstead.activities.evaluate import Evaluate, WrongVersion
from roadstead.activities.members import Players
from roadstead.config import RunConfig, parse
from roadstead.environments.calls import CallFailed
from roadstead.environments.prompts import DatasetError, PromptSet
from roadstead.environments.protocol import Row
from roadstead.environments.single_turn import SingleTurn
from roadstead.inference.engine import BadRequest, EngineDown, EngineInfo, EngineStalled, GenerateRequest, Generation
from roadstead.inference.evaluation_hold import VersionPassed
from roadstead.inference.fleet import Ejection, Fleet, Replica
from roadstead.staleness import spans_of_tokens
from roadstead.storage import evals
from roadstead.storage.evals import EvaluationSettings, EvaluationSummary
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import canonical_json
from roadstead.storage.runs import Fenced
from roadstead.storage.weights import WeightsManifest
from roadstead.workflows.evaluation_messages import EvaluationClose, EvaluationGroupOrder
from roadstead.workflows.messages import EvaluationOrder
from tests.support.memory_store import MemoryStore
from tests.support.tiny import DigitsEnvironment

KEYS = RunKeys("runs", "r")
PROMPTS = 3


class Engine:
    """Samples three tokens of `versions` and fails as `fails` says of a request."""

    def __init__(self, versions: Callable[[], tuple[int, int, int]]) -> None:
        self.versions = versions
        self.fails: Callable[[GenerateRequest], Exception | None] = lambda req: None
        self.requests: list[GenerateRequest] = []

    async def generate(self, req: GenerateRequest, on_partial: Any = None) -> Generation:
        self.requests.append(req)
        await asyncio.sleep(0)
        if (failure := self.fails(req)) is not None:
            raise failure
        return Generation((11, 12, 2), (-0.5, -0.25, -0.125), tuple(spans_of_tokens(self.versions())), "stop")

    async def info(self) -> EngineInfo:
        return EngineInfo("engine-0", "vllm test", 128)


class Watcher:
    """What it reports is what the test says."""

    stage = "idle"

    def __init__(self, version: int | None) -> None:
        self.version = version


class Codec:
    def encode(self, prompt: str) -> tuple[int, ...]:
        return tuple(ord(c) % 50 for c in prompt)

    def decode(self, token_ids: Any) -> str:
        return "4a2"


class Stand:
    """An evaluation of version 3 of a run, its first engine at that version, a second one ahead."""

    def __init__(self, store: MemoryStore | None = None, seed: int = 0, version: int = 3) -> None:
        self.store, self.version = store or MemoryStore(), version
        self.watcher, ahead = Watcher(version), Watcher(version + 2)
        self.engine = Engine(lambda: (self.watcher.version or 0,) * 3)
        engines: Any = [(self.engine, self.watcher), (Engine(lambda: (9, 9, 9)), ahead)]
        self.replicas = [Replica(f"e{i}", e, w, ejected=None) for i, (e, w) in enumerate(engines)]
        self.config: RunConfig = parse(
            {
                "name": "r",
                "seed": seed,
                "model": {"path": "m"},
                "data": {"prompts": "p.jsonl"},
                "training": {"steps": 8},
                "rollout": {"group_size": 4, "max_tokens": 20, "temperature": 0.9},
                "evaluation": {
                    "prompts": "e.jsonl",
                    "group_size": 2,
                    "temperature": 0.5,
                    "max_tokens": 8,
                },
            },
            "test",
        )
        prompts = PromptSet([{"prompt": f"{i}+1=", "prompt_id": f"q{i}"} for i in range(PROMPTS)], "test")
        assert self.config.evaluation is not None
        self.settings: EvaluationSettings = evals.settings_of(
            self.config, self.config.evaluation, prompts.digest, PROMPTS
        )
        limits = {"temperature": self.settings.temperature, "max_tokens": self.settings.max_tokens}
        codec: Any = Codec()
        players = Players(SingleTurn.of(DigitsEnvironment()), codec, [], self.config.rollout.model_copy(update=limits))
        self.activity = Evaluate(self.store, KEYS, Fleet(self.replicas), prompts, players, self.settings)
        self.order = EvaluationOrder(
            run_id="r", attempt=1, version=version, prompts=PROMPTS, timeout_s=0.2, group_attempts=2
        )

    async def evaluate(self, first: int = 0, count: int = PROMPTS) -> None:
        order = EvaluationGroupOrder(evaluation=self.order, first=first, count=count)
        await ActivityEnvironment().run(self.activity.evaluate_group, order)

    async def open(self) -> bool:
        return bool(await ActivityEnvironment().run(self.activity.open_evaluation, self.order))

    async def close(self, **changes: Any) -> EvaluationSummary:
        message: dict[str, Any] = {"evaluation": self.order, "failures": {}, "share": 1, "skipped": None, "seconds": 1}
        closing = CloseEvaluation(self.store, KEYS, self.settings).close_evaluation
        await ActivityEnvironment().run(closing, EvaluationClose(**{**message, **changes}))
        found = evals.find(self.store, KEYS, self.version)
        assert found is not None
        return found

    def publish(self) -> None:
        manifest = WeightsManifest(
            run_id="r",
            version=self.version,
            digest=f"weights-{self.version}",
            files=(),
            parent_digest=None,
            batch_digest=None,
        )
        self.store.create(KEYS.weights_manifest(self.version), canonical_json(manifest.model_dump(mode="json")))

    def rows(self) -> list[dict[str, Any]]:
        tables = evals.staged(self.store, KEYS, self.settings, self.version)
        return [row for table in tables.values() for row in table.to_pylist()]


async def test_what_is_staged_is_what_the_engine_said_of_exactly_this_version() -> None:
    stand = Stand()
    assert await stand.open()
    await stand.evaluate()
    rows = stand.rows()
    assert [(row["position"], row["member"]) for row in rows] == [(p, m) for p in range(PROMPTS) for m in range(2)]
    assert {row["prompt_id"] for row in rows} == {"q0", "q1", "q2"}, "every prompt once"
    for row in rows:
        assert row["version"] == 3 and row["version_spans"] == [{"version": 3, "start": 0, "end": 3}]
        assert row["response_token_ids"] == [11, 12, 2] and row["behavior_logprobs"] == [-0.5, -0.25, -0.125]
        assert row["reward"] == pytest.approx(2 / 3) and dict(row["reward_components"])["digits"] > 0
        assert (row["sampling"]["temperature"], row["sampling"]["max_tokens"], row["engine_id"]) == (0.5, 8, "engine-0")
    assert {(r.temperature, r.max_tokens) for r in stand.engine.requests} == {(0.5, 8)}, "not those of rollouts"


async def test_seeds_are_the_same_for_every_version_and_others_for_every_prompt_member_and_run() -> None:
    async def seeds(**changes: Any) -> list[int]:
        stand = Stand(**changes)
        await stand.evaluate()
        assert sorted(r.seed for r in stand.engine.requests) == sorted(row["seed"] for row in stand.rows())
        return [row["seed"] for row in stand.rows()]

    third, fifth, other = await seeds(version=3), await seeds(version=5), await seeds(seed=1)
    assert third == fifth and len(set(third)) == len(third)
    assert not set(third) & set(other)


async def test_a_prompt_that_is_staged_is_adopted_and_not_generated_again() -> None:
    stand = Stand()
    await stand.evaluate(first=1, count=1)
    again = Stand(stand.store)
    await again.evaluate()
    assert {row["position"] for row in again.rows()} == {0, 1, 2}
    assert len(again.engine.requests) == 4 and not any("-p1-" in r.request_id for r in again.engine.requests)


@pytest.mark.parametrize("versions", [(3, 3, 4), (2, 3, 3), (4, 4, 4)])
async def test_tokens_of_another_version_are_refused_and_generated_again(versions: tuple[int, int, int]) -> None:
    stand = Stand()
    stand.engine.versions = lambda: versions
    with pytest.raises(WrongVersion, match="expected 3 alone"):
        await stand.evaluate()
    assert stand.rows() == []
    stand.engine.versions = lambda: (3, 3, 3)
    await stand.evaluate()
    assert len(stand.rows()) == 2 * PROMPTS


async def test_an_engine_that_is_past_the_version_ends_it_at_once_and_another_one_is_not_asked() -> None:
    stand = Stand()
    stand.watcher.version = 4
    with pytest.raises(VersionPassed, match="version 3 can't be evaluated any more; e0: version 4"):
        await stand.open()
    with pytest.raises(VersionPassed):
        await stand.evaluate()
    assert stand.engine.requests == [] and stand.rows() == []


@pytest.mark.parametrize("version", [None, 2])
async def test_an_engine_that_does_not_come_to_the_version_is_waited_for_a_bounded_time(version: int | None) -> None:
    stand = Stand()
    stand.watcher.version = version
    with pytest.raises(EngineStalled, match=f"version 3 to evaluate.*e0: version {version}"):
        await stand.open()
    stand.order = stand.order.model_copy(update={"timeout_s": 5.0})
    waiting = asyncio.create_task(stand.open())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    stand.watcher.version = 3
    assert await waiting


async def test_an_engine_that_fails_under_an_evaluation_is_ejected_like_under_a_rollout() -> None:
    stand = Stand()
    stand.engine.fails = lambda req: EngineDown("it crashed")
    with pytest.raises(EngineDown):
        await stand.evaluate(count=1)
    assert isinstance(stand.replicas[0].ejected, Ejection) and stand.replicas[0].in_flight == 0
    assert stand.replicas[1].ejected is None


async def test_one_prompt_that_fails_costs_no_other() -> None:
    stand = Stand()
    stand.engine.fails = lambda req: BadRequest("too long") if "-p1-" in req.request_id else None
    with pytest.raises(BadRequest):
        await stand.evaluate()
    assert {row["position"] for row in stand.rows()} == {0, 2}


async def test_an_environment_that_can_t_begin_a_prompt_is_that_prompt_s_failure() -> None:
    class Picky(SingleTurn):
        def reset(self, row: Row, seed: int) -> Any:
            if row["prompt_id"] == "q1":
                raise KeyError("answer")
            return super().reset(row, seed)

    stand = Stand()
    picky = Picky("picky", lambda row, said: 1.0)
    stand.activity._players = Players(picky, stand.activity._players.codec, [], stand.config.rollout)
    with pytest.raises(CallFailed, match="KeyError: 'answer'"):
        await stand.evaluate()
    assert {row["prompt_id"] for row in stand.rows()} == {"q0", "q2"}


async def test_another_prompt_file_than_the_run_s_is_refused() -> None:
    stand = Stand()
    stand.order = stand.order.model_copy(update={"prompts": 5})
    with pytest.raises(DatasetError, match=r"evaluation\.prompts: this machine's file has 3 rows.*5"):
        await stand.open()


async def test_a_closed_evaluation_is_whole_on_record_and_not_begun_again() -> None:
    stand = Stand()
    stand.publish()
    await stand.evaluate()
    summary = await stand.close()
    assert summary.complete and summary.weights_digest == "weights-3" and summary.samples == 6
    assert summary.mean_reward == pytest.approx(2 / 3) and summary.components == {"digits": pytest.approx(2 / 3)}
    assert (summary.mean_tokens, summary.finish_reasons, summary.failures) == (3.0, {"stop": 6}, {})
    assert evals.read(stand.store, summary).to_pylist() == stand.rows()
    assert not await stand.open()
    stand.watcher.version = 9
    assert not await stand.open(), "whatever the engine serves by then"


async def test_what_is_missing_is_on_record_with_its_reason() -> None:
    stand = Stand()
    stand.publish()
    await stand.evaluate(first=2, count=1)
    summary = await stand.close(failures={0: "BadRequest: too long"}, share=2)
    assert not summary.complete and (summary.evaluated, summary.samples) == (1, 2)
    assert summary.failures == {"BadRequest: too long": 2} and summary.skipped is None


async def test_a_skipped_evaluation_has_no_numbers() -> None:
    stand = Stand()
    stand.publish()
    summary = await stand.close(skipped="VersionPassed: the engine serves version 5")
    assert summary.skipped == "VersionPassed: the engine serves version 5"
    assert (summary.samples, summary.mean_reward, summary.data, summary.complete) == (0, None, None, False)
    assert evals.read(stand.store, summary).num_rows == 0


async def test_an_attempt_that_was_fenced_off_puts_nothing_on_record() -> None:
    stand = Stand()
    stand.publish()
    await stand.evaluate()
    stand.store.create(KEYS.attempt(2), b"{}")
    with pytest.raises(Fenced):
        await stand.close()
    assert not evals.is_closed(stand.store, KEYS, 3)
