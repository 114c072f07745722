"""The engine in closed form equals one that decodes token by token."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadstead.benchmarks.simulator.costs import Costs, h20_qwen3_8b, load_costs
from roadstead.benchmarks.simulator.engine import Engine, Request
from tests.unit.benchmarks.token_engine import TokenRequest, decode_all

# No round numbers: which of two events at the same instant is first is nobody's business, so there must be none.
COSTS = Costs(
    overhead=0.0031415926,
    weights=0.0071828182,
    per_sequence=0.0025772156,
    per_context=0.0001141421,
    prefill=0.0004317320,
    train=0.001,
    train_square=0.0,
    train_fixed=0.0,
    publish=0.0,
    load=0.5649803,
)


def closed_form(
    costs: Costs, concurrency: int, requests: list[TokenRequest], loads: list[tuple[float, int]], partial: bool
) -> dict[int, tuple[float, list[tuple[int, int]], int]]:
    """number -> (end, spans, tokens) from the engine, fed with the same schedule."""
    engine = Engine(costs, concurrency, partial=partial)
    made = {r.number: Request(r.prompt, r.length, r.number) for r in requests}
    todo: list[tuple[float, int, str, int]] = [(r.arrives, r.number, "submit", r.number) for r in requests]
    todo += [(time, 0, "load", version) for time, version in loads]
    todo += [(r.aborts, r.number, "abort", r.number) for r in requests if r.aborts is not None]
    todo.sort(key=lambda action: action[:2])
    result: dict[int, tuple[float, list[tuple[int, int]], int]] = {}
    while todo or engine.next_time < float("inf"):
        if todo and todo[0][0] < engine.next_time:
            now, _, action, number = todo.pop(0)
            if action == "load":
                engine.load(number, now)
            elif action == "submit":
                engine.submit(made[number], now)
            elif not made[number].left:
                engine.abort(made[number], now)
            continue
        now = engine.next_time
        for request in engine.advance():
            result[request.owner] = (now, list(request.spans), request.done)
    return result


times = st.floats(0, 6, allow_nan=False).map(lambda t: round(t, 4))


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(
        st.tuples(times, st.integers(0, 30), st.integers(1, 60)), min_size=1, max_size=12, unique_by=lambda row: row[0]
    ),
    loads=st.lists(times.map(lambda t: t + 0.00003), max_size=4, unique=True),
    concurrency=st.integers(1, 5),
    partial=st.booleans(),
)
def test_ends_and_versions_are_those_of_decoding_token_by_token(
    rows: list[tuple[float, int, int]], loads: list[float], concurrency: int, partial: bool
) -> None:
    requests = [TokenRequest(n, at, prompt, length) for n, (at, prompt, length) in enumerate(sorted(rows))]
    versions = [(time, index + 1) for index, time in enumerate(sorted(loads))]
    found = closed_form(COSTS, concurrency, requests, versions, partial)
    decode_all(COSTS, concurrency, requests, versions, partial)
    for request in requests:
        end, spans, tokens = found[request.number]
        assert end == pytest.approx(request.ended, abs=1e-7)
        assert tokens == request.length
        assert spans == [(version, len(list(run))) for version, run in groupby(request.versions)]


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(
        st.tuples(times, st.integers(1, 60), st.none() | times), min_size=1, max_size=10, unique_by=lambda row: row[0]
    ),
    concurrency=st.integers(1, 4),
)
def test_aborts_take_effect_at_the_next_step(rows: list[tuple[float, int, float | None]], concurrency: int) -> None:
    requests = [
        TokenRequest(n, at, 3, length, None if abort is None else at + abort + 0.00007)
        for n, (at, length, abort) in enumerate(sorted(rows, key=lambda row: row[0]))
    ]
    found = closed_form(COSTS, concurrency, requests, [], partial=True)
    decode_all(COSTS, concurrency, requests, [], partial=True)
    for request in requests:
        end, _, tokens = found[request.number]
        assert tokens == len(request.versions)
        assert end == pytest.approx(request.ended, abs=1e-7)


@given(seconds=st.floats(0, 1e5, allow_nan=False), running=st.integers(1, 512), context=st.integers(0, 10**7))
def test_whole_steps_is_the_inverse_of_decode(seconds: float, running: int, context: int) -> None:
    costs = h20_qwen3_8b()
    steps = costs.whole_steps(seconds, running, context)
    assert costs.decode(steps, running, context) <= seconds < costs.decode(steps + 1, running, context)


def test_a_step_of_many_is_slower_than_one_of_few_but_cheaper_a_token() -> None:
    costs = h20_qwen3_8b()
    assert costs.decode(1, 1, 9000) < costs.decode(1, 40, 40 * 9000)
    assert costs.decode(1, 40, 40 * 9000) / 40 < costs.decode(1, 1, 9000)


def test_bad_costs_name_key_and_remedy(tmp_path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"overhed": 1}')
    with pytest.raises(ValueError, match=r"overhed.*use overhead, weights"):
        load_costs(path, h20_qwen3_8b())
    path.write_text('{"load": -1}')
    with pytest.raises(ValueError, match=r"load: -1 is no cost; give seconds"):
        load_costs(path, h20_qwen3_8b())
    path.write_text('{"load": 1.5}')
    assert load_costs(path, h20_qwen3_8b()).load == 1.5
