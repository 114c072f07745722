"""rollout_group: what it stages, what it adopts, what it raises. The real engine runs in test_run.py."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from roadstead.activities.rollout import RolloutGroup
from roadstead.config import parse
from roadstead.environments.calls import CallFailed
from roadstead.environments.prompts import PromptSet
from roadstead.environments.protocol import Observation, Row
from roadstead.environments.single_turn import SingleTurn
from roadstead.environments.tools import Tool, ToolUse
from roadstead.inference.engine import (
    BadRequest,
    EngineDown,
    EngineInfo,
    GenerateRequest,
    Generation,
    GenerationAborted,
    OnPartial,
    Partial,
)
from roadstead.staleness import VersionSpan, check_cover, spans_of_tokens, versions_of_spans
from roadstead.storage import groups
from roadstead.storage.keys import RunKeys
from roadstead.storage.schema import table_from_rows
from roadstead.training.advantages import group_advantages
from roadstead.workflows.messages import GroupOrder
from tests.support.memory_store import MemoryStore
from tests.support.tiny import DigitsEnvironment
from tests.unit.environments.games import Talker, TalkerEpisode

KEYS = RunKeys("runs", "r")
ORDER = GroupOrder(attempt=1, version=3, reserved_at=1_790_000_000_000_000, position=5)


class FakeEngine:
    """Answers with tokens from two versions; fails for the members it is told to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0

    async def generate(self, req: GenerateRequest, on_partial: OnPartial | None = None) -> Generation:
        self.requests.append(req)
        if self.failure and "-m1-" in req.request_id:
            raise self.failure
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Generation(
            token_ids=(11, 12, 13),
            logprobs=(-0.5, -0.25, -0.125),
            version_spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
            finish_reason="stop",
        )

    async def info(self) -> EngineInfo:
        return EngineInfo("engine-0", "vllm test", 128)


class FakeFleet:
    stage = "engine-0: idle"

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.asked: list[int] = []
        self.in_flight = 0

    @contextlib.asynccontextmanager
    async def lease(self, version: int, timeout_s: float) -> AsyncIterator[FakeEngine]:
        self.asked.append(version)
        self.in_flight += 1
        try:
            yield self.engine
        finally:
            self.in_flight -= 1


class FakeCodec:
    def encode(self, prompt: str) -> tuple[int, ...]:
        return tuple(ord(c) % 50 for c in prompt)

    def decode(self, token_ids: Any) -> str:
        return "4a2"


def make(store: MemoryStore, engine: FakeEngine, fleet: FakeFleet | None = None) -> RolloutGroup:
    config = parse(
        {
            "name": "r",
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl"},
            "training": {"steps": 1},
            "rollout": {"group_size": 3, "max_tokens": 8},
        },
        "test",
    )
    return RolloutGroup(
        config=config,
        store=store,
        keys=KEYS,
        fleet=fleet or FakeFleet(engine),  # type: ignore[arg-type]
        prompts=PromptSet([{"prompt": f"{i}+1="} for i in range(8)], "test"),
        environment=SingleTurn.of(DigitsEnvironment()),
        codec=FakeCodec(),  # type: ignore[arg-type]
    )


async def run(rollout: RolloutGroup, order: GroupOrder = ORDER) -> Any:
    return await ActivityEnvironment().run(rollout.rollout_group, order)


async def test_what_is_staged_is_what_the_engine_said() -> None:
    store, fleet = MemoryStore(), FakeFleet(FakeEngine())
    report = await run(make(store, fleet.engine, fleet))
    assert fleet.asked == [3], "generation waits for an engine with the version the group was admitted under"
    assert fleet.in_flight == 0, "and gives it back"
    assert (report.oldest_version, report.newest_version, report.tokens, report.trajectories) == (3, 4, 9, 3)
    rows = groups.read(store, KEYS, "g00000005", 1, report.digest).to_pylist()
    assert [row["member"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["response_token_ids"] == [11, 12, 13] and row["behavior_logprobs"] == [-0.5, -0.25, -0.125]
        assert row["version_spans"] == [
            {"version": 3, "start": 0, "end": 2},
            {"version": 4, "start": 2, "end": 3},
        ]
        assert (row["head_version"], row["tail_version"], row["v_traj"]) == (3, 4, 3)
        assert row["reward"] == pytest.approx(2 / 3) and row["staleness"] is None
    assert len({row["seed"] for row in rows}) == 3


async def test_seeds_depend_on_the_prompt_and_not_on_the_try() -> None:
    first, second = FakeEngine(), FakeEngine()
    await run(make(MemoryStore(), first))
    await run(make(MemoryStore(), second))
    assert [r.seed for r in first.requests] == [r.seed for r in second.requests]
    third = FakeEngine()
    await run(make(MemoryStore(), third), ORDER.model_copy(update={"position": 6}))
    assert not {r.seed for r in first.requests} & {r.seed for r in third.requests}


async def test_a_group_that_is_staged_already_is_adopted_and_not_generated_again() -> None:
    store, again = MemoryStore(), FakeEngine()
    first = await run(make(store, FakeEngine()))
    assert await run(make(store, again)) == first
    assert again.requests == []


@pytest.mark.parametrize("failure", [BadRequest("the prompt is too long"), EngineDown("it crashed")])
async def test_a_failed_member_raises_its_own_error_and_cancels_the_others(failure: Exception) -> None:
    store, engine = MemoryStore(), FakeEngine(failure)
    with pytest.raises(type(failure), match=str(failure)):
        await run(make(store, engine))
    assert engine.cancelled == 2 and store.objects == {}, "nothing is staged of half a group"


class ScriptedEngine(FakeEngine):
    """Answers turn t of any member with `script[t]`, or as the script's function of member and turn says."""

    def __init__(self, *script: Generation, by_member: dict[int, list[Generation]] | None = None) -> None:
        super().__init__()
        self.script, self.by_member = list(script), by_member or {}

    async def generate(self, req: GenerateRequest, on_partial: OnPartial | None = None) -> Generation:
        self.requests.append(req)
        _, member, _, turn = req.request_id.split("-")
        await asyncio.sleep(0)
        return self.by_member.get(int(member[1:]), self.script)[int(turn[1:])]

    def of(self, member: int) -> list[GenerateRequest]:
        return [request for request in self.requests if f"-m{member}-" in request.request_id]


def says(*token_ids: int, versions: tuple[int, ...] = (), reason: Any = "stop") -> Generation:
    spans = spans_of_tokens(versions or (3,) * len(token_ids))
    return Generation(token_ids, tuple(-0.01 * i for i in token_ids), tuple(spans), reason)


class LetterCodec:
    """One token a character, told apart from sampled ones by being 1000 and more."""

    def encode(self, prompt: str) -> tuple[int, ...]:
        return tuple(1000 + ord(c) for c in prompt)

    def observe(self, observation: Observation, last: int) -> tuple[int, ...]:
        return observation.token_ids if observation.token_ids is not None else self.encode(observation.text)

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(t - 1000) if t >= 1000 else f"[{t}]" for t in token_ids)


def multi(engine: FakeEngine, environment: Any, store: MemoryStore | None = None, **changes: Any) -> RolloutGroup:
    data, codec = {"prompts": "p.jsonl", "rewards": changes.pop("rewards", [])}, changes.pop("codec", LetterCodec())
    filters = changes.pop("filters", {})
    rollout = {"group_size": 3, "max_tokens": 40, "environment_timeout_s": 2.0, **changes}
    return RolloutGroup(
        config=parse(
            {
                "name": "r",
                "model": {"path": "m"},
                "data": data,
                "training": {"steps": 1},
                "rollout": rollout,
                "filters": filters,
            },
            "test",
        ),
        store=store or MemoryStore(),
        keys=KEYS,
        fleet=FakeFleet(engine),  # type: ignore[arg-type]
        prompts=PromptSet([{"prompt": f"{i}+1="} for i in range(8)], "test"),
        environment=environment,
        codec=codec,
    )


async def rows_of(rollout: RolloutGroup) -> list[dict[str, Any]]:
    """What is staged, read back, so that the schema's own checks have passed."""
    report = await run(rollout)
    return groups.read(rollout._store, KEYS, "g00000005", 1, report.digest).to_pylist()


async def test_turns_are_appended_masked_and_stamped_with_what_sampled_them() -> None:
    """Weights move from 3 to 5 between the turns, and to 6 within the second."""
    engine = ScriptedEngine(says(11, 12, 2), says(13, 14, 2, versions=(5, 6, 6)))
    for row in await rows_of(multi(engine, Talker("ab", None))):
        assert row["response_token_ids"] == [11, 12, 2, 1097, 1098, 13, 14, 2]
        assert row["loss_mask"] == [True, True, True, False, False, True, True, True]
        assert row["behavior_logprobs"] == pytest.approx([-0.11, -0.12, -0.02, 0.0, 0.0, -0.13, -0.14, -0.02])
        assert row["turns"] == [
            {"role": "assistant", "start": 0, "end": 3},
            {"role": "user", "start": 3, "end": 5},
            {"role": "assistant", "start": 5, "end": 8},
        ]
        assert row["version_spans"] == [
            {"version": 3, "start": 0, "end": 5},
            {"version": 5, "start": 5, "end": 6},
            {"version": 6, "start": 6, "end": 8},
        ]
        assert (row["head_version"], row["tail_version"], row["v_traj"]) == (3, 6, 3)
        assert (row["finish_reason"], row["reward"]) == ("stop", 2.0)
        assert row["response_text"] == "[11][12][2]ab[13][14][2]" and row["prompt_text"] == "begin"


async def test_a_later_turn_is_sent_every_token_so_far_to_the_id() -> None:
    engine = ScriptedEngine(says(11, 2), says(12, 2), says(13, 2))
    (row, *_) = await rows_of(multi(engine, Talker("a", Observation("-", "tool", token_ids=(7, 8)), None)))
    first, second, third = engine.of(0)
    prompt = LetterCodec().encode("begin")
    assert first.prompt_token_ids == prompt
    assert second.prompt_token_ids == (*prompt, 11, 2, 1097)
    assert third.prompt_token_ids == (*second.prompt_token_ids, 12, 2, 7, 8)
    assert (*prompt, *row["response_token_ids"]) == (*third.prompt_token_ids, 13, 2)
    assert [r.max_tokens for r in (first, second, third)] == [40, 37, 33]
    assert len({r.seed for r in engine.requests}) == 9 and len({r.request_id for r in engine.requests}) == 9
    assert first.seed == row["seed"]


async def test_an_engine_that_fell_back_between_turns_lowers_the_group() -> None:
    """It was restarted with older weights: the spans say so, whatever the version of the first turn was."""
    engine = ScriptedEngine(says(11, versions=(4,)), says(12, versions=(4,)))
    engine.by_member = {1: [says(11, versions=(4,)), says(12, versions=(2,))]}
    rows = await rows_of(multi(engine, Talker("a", None)))
    assert [row["head_version"] for row in rows] == [4, 2, 4] and {row["v_traj"] for row in rows} == {2}


async def test_members_have_episodes_of_their_own_with_one_seed() -> None:
    environment = Talker("a", None)
    engine = ScriptedEngine(says(11), says(12))
    await run(multi(engine, environment))
    assert len(environment.episodes) == 3 and len(set(environment.seeds)) == 1
    assert [response.token_ids for response in environment.episodes[2].heard] == [(11,), (12,)]
    other = Talker("a", None)
    await run(multi(ScriptedEngine(says(11), says(12)), other), ORDER.model_copy(update={"position": 6}))
    assert environment.seeds[0] != other.seeds[0]


@pytest.mark.parametrize(
    ("changes", "generations", "reason", "tokens", "heard"),
    [
        ({"max_turns": 2}, [says(11), says(12)], "max_turns", [11, 1097, 12], 2.0),
        ({"max_turns": 1}, [says(11)], "max_turns", [11], 1.0),
        ({"max_tokens": 3}, [says(11), says(12, reason="length")], "length", [11, 1097, 12], 1.0),
        ({"max_tokens": 2}, [says(11)], "length", [11], 1.0),
        ({"max_tokens": 1}, [says(11, reason="length")], "length", [11], 0.0),
    ],
)
async def test_budgets_end_a_trajectory_in_a_turn_of_the_model(
    changes: dict[str, int], generations: list[Generation], reason: str, tokens: list[int], heard: float
) -> None:
    """`heard`: what the environment was shown. A turn cut by the budget isn't; the last of max_turns is."""
    engine = ScriptedEngine(*generations)
    for row in await rows_of(multi(engine, Talker("a", "a", "a"), **changes)):
        assert (row["finish_reason"], row["response_token_ids"]) == (reason, tokens)
        assert row["reward"] == heard and row["turns"][-1]["role"] == "assistant"


async def test_a_tool_that_hangs_and_one_that_raises_are_observations() -> None:
    async def hangs() -> None:
        await asyncio.sleep(3600)

    def breaks() -> None:
        raise OSError("the disk is full")

    tools = (Tool("hangs", "", hangs, timeout_s=0.05), Tool("breaks", "", breaks))
    environment = ToolUse("tools", tools, lambda row, said: 1.0)

    class Codec(LetterCodec):
        def encode(self, prompt: Any) -> tuple[int, ...]:
            return super().encode(prompt if isinstance(prompt, str) else prompt[-1]["content"])

        def decode(self, token_ids: Any) -> str:
            names = {11: '<tool_call>{"name": "hangs"}</tool_call>', 12: '<tool_call>{"name": "breaks"}</tool_call>'}
            return "".join(names.get(t) or super(Codec, self).decode([t]) for t in token_ids)

    engine = ScriptedEngine(says(13), by_member={1: [says(11), says(12), says(13)]})
    rollout = multi(engine, environment, max_tokens=200, codec=Codec())
    fine, bad, _ = await rows_of(rollout)
    assert "timeout: hangs: no answer in 0.05 s" in bad["response_text"]
    assert "error: breaks: OSError: the disk is full" in bad["response_text"]
    assert [turn["role"] for turn in bad["turns"]] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert dict(bad["reward_components"]) == {"tool_calls": 2.0, "tool_timeout": 1.0, "tool_error": 1.0}
    assert bad["reward"] == fine["reward"] == 1.0 and dict(fine["reward_components"]) == {"tool_calls": 0.0}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (KeyError("answer"), "step: KeyError: 'answer'"),
        (60.0, "step: no answer in 2 s"),
        (3, "step: returned int; expected text, an Observation or None"),
    ],
)
async def test_a_step_that_fails_excludes_its_member_and_no_other(said: Any, reason: str) -> None:
    class OneBad(Talker):
        async def reset(self, row: Row, seed: int) -> TalkerEpisode:
            episode = await super().reset(row, seed)
            if len(self.episodes) == 2:
                episode.says[0] = said
            return episode

    engine = ScriptedEngine(says(11), says(12))
    rows = await rows_of(multi(engine, OneBad("a", None)))
    bad = rows.pop(1)
    assert bad["reward"] is None and bad["finish_reason"] == "error"
    assert bad["reward_components"] == [(f"error: {reason}", None)]
    assert bad["response_token_ids"] == [11] and bad["head_version"] == 3
    assert [row["reward"] for row in rows] == [2.0, 2.0] and {row["finish_reason"] for row in rows} == {"stop"}
    assert group_advantages([2.0, None, 2.0], normalize=True) == [0.0, 0.0, 0.0]


async def test_null_and_nan_rewards_are_recorded_with_their_reason() -> None:
    engine = ScriptedEngine(says(11, 12))
    functions = [{"function": f"tests.unit.environments.games:{name}"} for name in ("length", "not_a_number")]
    for row in await rows_of(multi(engine, Talker(), rewards=functions)):
        assert row["reward"] is None and row["finish_reason"] == "stop"
        assert dict(row["reward_components"]) == {
            "heard": 1.0,
            "length": 8.0,
            "not_a_number": None,
            "error: not_a_number: returned nan, not a finite number": None,
        }


async def test_a_reward_that_changes_its_row_changes_no_others() -> None:
    functions = [{"function": "tests.unit.environments.games:spoils"}]
    rollout = multi(ScriptedEngine(says(11)), Talker(), rewards=functions)
    await run(rollout)
    assert all(rollout._prompts.at(i, 0)["prompt"] for i in range(8))


async def test_a_reset_that_fails_fails_the_group_before_anything_is_generated() -> None:
    class Broken(Talker):
        async def reset(self, row: Row, seed: int) -> TalkerEpisode:
            raise OSError("no game server")

    engine = ScriptedEngine(says(11))
    with pytest.raises(CallFailed, match="reset: OSError: no game server"):
        await run(multi(engine, Broken()))
    assert engine.requests == []


async def test_members_that_begin_differently_are_refused() -> None:
    with pytest.raises(ValueError, match="begin with different prompts"):
        await run(multi(ScriptedEngine(says(11)), Talker(begin=lambda count: f"begin {count}")))


async def test_messages_are_recorded_as_json() -> None:
    class Codec(LetterCodec):
        def encode(self, prompt: Any) -> tuple[int, ...]:
            return (1001,)

    environment = Talker(begin=lambda count: [{"role": "user", "content": "é"}])
    rollout = multi(ScriptedEngine(says(11)), environment, codec=Codec())
    (row, *_) = await rows_of(rollout)
    assert row["prompt_text"] == '[{"role": "user", "content": "é"}]' and row["prompt_token_ids"] == [1001]


_TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(2, 9), min_size=1, max_size=5),  # sampled tokens
        st.lists(st.integers(0, 3), min_size=5, max_size=5),  # version of each
        st.text("ab", max_size=4),  # what is said after them
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_TURNS, st.integers(1, 30), st.integers(1, 6))
async def test_lists_masks_turns_and_spans_agree_for_any_game_and_budget(
    turns: list[tuple[list[int], list[int], str]], max_tokens: int, max_turns: int
) -> None:
    class Engine(ScriptedEngine):
        async def generate(self, req: GenerateRequest, on_partial: OnPartial | None = None) -> Generation:
            self.requests.append(req)
            ids, versions, _ = turns[int(req.request_id.rpartition("-t")[2])]
            ids = ids[: req.max_tokens]
            reason = "length" if len(ids) == req.max_tokens else "stop"
            return says(*ids, versions=tuple(versions[: len(ids)]), reason=reason)

    engine = Engine()
    environment = Talker(*(said for _, _, said in turns[:-1]), None)
    rollout = multi(engine, environment, group_size=2, max_tokens=max_tokens, max_turns=max_turns)
    row, _ = await rows_of(rollout)
    ids, mask = row["response_token_ids"], row["loss_mask"]
    assert 1 <= len(ids) == len(mask) == len(row["behavior_logprobs"]) <= max_tokens
    assert row["turns"][0]["start"] == 0 and row["turns"][-1]["end"] == len(ids)
    assert all(a["end"] == b["start"] for a, b in pairwise(row["turns"]))
    assert all(turn["start"] < turn["end"] for turn in row["turns"])
    for turn in row["turns"]:
        assert set(mask[turn["start"] : turn["end"]]) == {turn["role"] == "assistant"}
    models = [turn for turn in row["turns"] if turn["role"] == "assistant"]
    assert row["turns"][-1] == models[-1] and len(models) == len(engine.of(0)) <= max_turns
    check_cover([VersionSpan(**span) for span in row["version_spans"]], len(ids))
    versions = versions_of_spans(VersionSpan(**span) for span in row["version_spans"])
    sampled = [version for version, keep in zip(versions, mask, strict=True) if keep]
    said = [v for (tokens, labels, _), turn in zip(turns, models, strict=False) for v in labels[: len(tokens)]][
        : len(sampled)
    ]
    assert sampled == said, "each model token has the engine's own version"
    assert (min(sampled), max(sampled)) == (row["head_version"], row["tail_version"])
    assert min(versions) == row["v_traj"], "environment tokens bring in no version of their own"
    sent = [request.prompt_token_ids for request in engine.of(0)]
    whole = (*row["prompt_token_ids"], *ids)
    assert all(whole[: len(prompt)] == prompt for prompt in sent)
    assert [len(prompt) - len(sent[0]) for prompt in sent] == [turn["start"] for turn in models]


async def test_the_loss_sees_the_models_tokens_of_a_multi_turn_batch_only() -> None:
    """From the staged rows to the trainer's own loss: no value of an environment token moves it."""
    import torch

    from roadstead.training.batch_rows import TrainingBatch
    from roadstead.training.collate import collate
    from roadstead.training.losses import token_loss

    engine = ScriptedEngine(says(11, 12), says(13), by_member={1: [says(14), says(15)]})
    rows = await rows_of(multi(engine, Talker("ab", None)))
    for row, advantage in zip(rows, (1.0, -2.0, 0.5), strict=True):
        row.update(step=3, slot=0, staleness=0, advantage=advantage, occupied_at=row["finished_at"])
    rows[2]["reward"] = None
    batch = TrainingBatch.from_table(table_from_rows(rows, batch=True), vocabulary=2000)
    assert batch.loss_tokens == 3 + 2, "an excluded member has no loss tokens, an observation never has"
    micro = collate(batch.rows, "cpu")
    assert micro.targets[micro.mask].tolist() == [11, 12, 13, 14, 15]

    def loss_and_gradient(there: float) -> tuple[float, list[float]]:
        logprobs = torch.where(micro.mask, torch.linspace(-1, -0.1, len(micro.mask)), torch.tensor(there))
        logprobs.requires_grad_()
        total = token_loss(logprobs, micro.behavior, micro.advantages, micro.mask, cap=2.0).total
        total.backward()
        return total.item(), logprobs.grad.tolist()

    loss, gradient = loss_and_gradient(0.0)
    assert loss_and_gradient(float("nan")) == (loss, gradient) == loss_and_gradient(50.0)
    assert [g != 0 for g in gradient] == micro.mask.tolist()


# -- over-sampling, time-outs, updates in mid-turn, filters ------------------------------------------------------------


class PacedEngine(FakeEngine):
    """Member m takes seconds[m] for a turn, and streams a token each tenth of it."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.aborted: set[int] = set()

    async def generate(self, req: GenerateRequest, on_partial: OnPartial | None = None) -> Generation:
        self.requests.append(req)
        member = int(req.request_id.split("-")[1][1:])
        tokens = tuple(range(11, 21))
        whole = Generation(tokens, (-0.5,) * 10, (VersionSpan(3, 0, 4), VersionSpan(4, 4, 10)), "stop")
        try:
            for n in range(1, 11):
                await asyncio.sleep(self.seconds[member] / 10)
                if on_partial is not None:
                    spans = (VersionSpan(3, 0, n),) if n <= 4 else (VersionSpan(3, 0, 4), VersionSpan(4, 4, n))
                    on_partial(Partial(tokens[:n], whole.logprobs[:n], spans))
        except asyncio.CancelledError:
            self.aborted.add(member)
            raise
        return whole


ONE_TURN = SingleTurn("digits", lambda row, said: float(len(said.response)))


async def test_the_first_members_to_finish_are_the_group_and_the_rest_is_aborted() -> None:
    engine = PacedEngine(0.05, 60.0, 0.3, 0.05, 60.0)
    store = MemoryStore()
    rows = await rows_of(multi(engine, ONE_TURN, store, extra_members=2))
    staged = groups.find(store, KEYS, "g00000005", 1)
    assert staged is not None and staged.aborted_members == 2
    assert [row["member"] for row in rows] == [0, 1, 2] and len(engine.requests) == 5
    started = {request.seed: index for index, request in enumerate(engine.requests)}
    assert [started[row["seed"]] for row in rows] == [0, 2, 3], "in the order they were started"
    assert engine.aborted == {1, 4}


@pytest.mark.parametrize("extra", [0, 1])
async def test_members_that_finish_at_once_are_never_more_than_the_group(extra: int) -> None:
    rows = await rows_of(multi(ScriptedEngine(says(11)), ONE_TURN, extra_members=extra))
    assert len(rows) == 3


@pytest.mark.parametrize(("on_timeout", "kind"), [("retry", "GroupOverdue"), ("discard", "GroupDiscarded")])
async def test_an_overdue_group_is_aborted_and_says_what_becomes_of_it(on_timeout: str, kind: str) -> None:
    store, engine = MemoryStore(), PacedEngine(0.05, 60.0, 60.0)
    with pytest.raises(ApplicationError, match=r"rollout.group_timeout_s 0\.3") as failure:
        await run(multi(engine, ONE_TURN, store, group_timeout_s=0.3, on_timeout=on_timeout))
    assert failure.value.type == kind and failure.value.non_retryable == (on_timeout == "discard")
    assert engine.aborted == {1, 2} and store.objects == {}


async def test_a_truncated_group_keeps_what_was_sampled_with_its_versions() -> None:
    engine = PacedEngine(0.05, 6.0, 3.0)
    fine, slow, slower = await rows_of(multi(engine, ONE_TURN, group_timeout_s=2.0, on_timeout="truncate"))
    assert fine["finish_reason"] == "stop" and len(fine["response_token_ids"]) == 10
    for row in (slow, slower):
        n = len(row["response_token_ids"])
        assert row["finish_reason"] == "timeout" and 0 < n < 10
        assert row["response_token_ids"] == list(range(11, 11 + n)) and len(row["behavior_logprobs"]) == n
        assert row["version_spans"][-1]["end"] == n and row["version_spans"][0]["version"] == 3
        assert row["reward"] is not None, "it is judged as it is"
    assert engine.aborted == {1, 2}


async def test_a_group_without_a_token_cannot_be_truncated() -> None:
    with pytest.raises(ApplicationError, match="on_timeout: truncate") as failure:
        await run(multi(PacedEngine(0.05, 600.0, 600.0), ONE_TURN, group_timeout_s=0.3, on_timeout="truncate"))
    assert failure.value.type == "GroupOverdue" and not failure.value.non_retryable


async def test_a_trajectory_cut_off_between_turns_ends_with_the_model() -> None:
    """The second turn brings no token in time: what the environment said last is not the end of a trajectory."""

    class Stops(ScriptedEngine):
        async def generate(self, req: GenerateRequest, on_partial: OnPartial | None = None) -> Generation:
            if req.request_id.endswith("-t1"):
                await asyncio.sleep(600)
            return await super().generate(req, on_partial)

    engine = Stops(says(11, 12))
    for row in await rows_of(multi(engine, Talker("ab", None), group_timeout_s=0.5, on_timeout="truncate")):
        assert row["response_token_ids"] == [11, 12] and row["finish_reason"] == "timeout"
        assert [turn["role"] for turn in row["turns"]] == ["assistant"]


async def test_a_turn_that_an_update_aborted_is_asked_again_as_it_was() -> None:
    class Updating(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(says(11), says(12))
            self.aborts = 0

        async def generate(self, req: GenerateRequest, on_partial: OnPartial | None = None) -> Generation:
            if "-m0-" in req.request_id and "-t1" in req.request_id and self.aborts < 2:
                self.requests.append(req)
                self.aborts += 1
                raise GenerationAborted("version 4 came")
            request = dataclasses.replace(req, request_id="-".join(req.request_id.split("-")[:4]))
            return await super().generate(request, on_partial)

    engine = Updating()
    first, *_ = await rows_of(multi(engine, Talker("a", None)))
    assert first["response_token_ids"] == [11, 1097, 12]
    asked = [r for r in engine.requests if "-m0-" in r.request_id and "-t1" in r.request_id]
    assert len(asked) == 3 and len({(r.prompt_token_ids, r.seed) for r in asked}) == 1


async def test_kept_kv_is_recorded_by_token_and_null_without_it() -> None:
    spans = tuple(spans_of_tokens((3, 4, 4)))
    kept = Generation((11, 12, 2), (-0.1,) * 3, spans, "stop", kv_version_spans=(VersionSpan(4, 0, 3),))
    engine = ScriptedEngine(says(13), by_member={1: [kept]})
    rows = await rows_of(multi(engine, ONE_TURN))
    assert [row["kv_version_spans"] for row in rows] == [None, [{"version": 4, "start": 0, "end": 3}], None]


async def test_what_the_filters_say_is_staged_with_the_group_and_read_back_by_a_retry() -> None:
    store = MemoryStore()
    config = {"filters": {"zero_variance": True}}
    constant = ScriptedEngine(says(11))
    first = await run(multi(constant, ONE_TURN, store, **config))
    assert (first.filtered, first.trainable, first.note) == ("zero_variance", False, "reward constant 4")
    again = await run(multi(ScriptedEngine(says(11)), ONE_TURN, store))
    assert again == first, "the verdict is the group's, not the retry's"
    varied = ScriptedEngine(says(11), by_member={1: [says(11, 12)]})
    fine = await run(multi(varied, ONE_TURN, **config))
    assert (fine.filtered, fine.trainable, fine.note) == (None, True, None)


async def test_a_constant_reward_without_a_filter_is_told_and_not_filtered() -> None:
    report = await run(multi(ScriptedEngine(says(11)), ONE_TURN))
    assert (report.filtered, report.trainable, report.note) == (None, False, "reward constant 4")


async def test_a_group_whose_every_reward_failed_says_why() -> None:
    def broken(row: Row, said: Any) -> float:
        raise ConnectionError("the judge is down")

    report = await run(multi(ScriptedEngine(says(11)), SingleTurn("judged", broken)))
    assert not report.trainable and report.note == "no reward: reward: ConnectionError: the judge is down"
