"""`roadstead simulate` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from roadstead.benchmarks.simulator.policies import POLICIES
from roadstead.cli import simulate
from roadstead.cli.main import app
from roadstead.cli.session import Interrupted
from roadstead.storage.objects import ObjectMissing

QUICK = ("--batches", "2", "--seeds", "2")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def answer(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.jsonl"
    path.write_text("".join(f'{{"length": {100 + 37 * n % 900}}}\n' for n in range(64)))
    return path


def test_all_policies_by_default_in_a_table_that_fits_80_columns() -> None:
    result = call(*QUICK, "--max-staleness", "1")
    assert result.exit_code == 0
    for name in POLICIES:
        assert any(line.startswith(f"1 {name}") for line in result.stdout.splitlines()), name
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert "…" not in result.stdout
    assert "not calibrated" in result.stderr


def test_help_names_every_policy_and_has_examples() -> None:
    result = call("--help")
    for name in POLICIES:
        assert name in result.stdout
    assert "roadstead simulate --lengths" in result.stdout


def test_json_has_every_case_and_the_bound_holds_in_it() -> None:
    found = answer(
        *QUICK,
        *("--policy", "reserve_occupy", "--policy", "in_order"),
        *("--max-staleness", "0", "--max-staleness", "2"),
    )
    cases = [(row["max_staleness"], row["policy"]) for row in found["rows"]]
    assert cases == [(0, "reserve_occupy"), (0, "in_order"), (2, "reserve_occupy"), (2, "in_order")]
    assert all(row["age"]["max"] <= row["max_staleness"] for row in found["rows"])
    assert found["trace"]["responses"] == 8192


def test_own_lengths_engines_and_costs_are_used(lengths: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"train_fixed": 100.0}')
    options = (*QUICK, "--lengths", str(lengths), "--group-size", "4", "--batch-size", "2", "--policy", "in_order")
    plain, slow = answer(*options), answer(*options, "--costs", str(costs))
    assert plain["trace"]["groups"] == 16
    assert plain["batch_size"] == 2
    assert slow["costs"]["train_fixed"] == 100
    assert slow["rows"][0]["batch_seconds"]["mean"] > plain["rows"][0]["batch_seconds"]["mean"] + 50


def test_several_concurrencies_are_compared_and_drawn(tmp_path: Path) -> None:
    options = (*QUICK, "--policy", "reserve_occupy", "--max-staleness", "2", "--plot", str(tmp_path / "a.png"))
    found = answer(*options, "--concurrency", "10", "--concurrency", "40")
    few, many = found["rows"]
    assert (few["concurrency"], many["concurrency"]) == (10, 40)
    assert few["throughput"]["mean"] < many["throughput"]["mean"]
    assert (tmp_path / "a.png").stat().st_size > 5_000


def test_a_policy_that_can_not_run_is_left_out_with_a_note_unless_it_was_asked_for() -> None:
    result = call(*QUICK, "--max-staleness", "0")
    assert result.exit_code == 0
    assert "left out: max_staleness: 0 makes trl admit nothing" in result.stderr
    asked = call(*QUICK, "--max-staleness", "0", "--policy", "trl")
    assert isinstance(asked.exception, ValueError)
    assert "use 1 or more" in str(asked.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "fifo"), r"--policy: 'fifo' is unknown; use reserve_occupy, in_order"),
        (("--lengths", "/no/such"), r"'/no/such' matches no file; give a path or glob"),
        (("--lengths", "x", "--long-tail"), r"--lengths and --long-tail each say .*; give one"),
        (("--plot", "a.pdf"), r"a.pdf is neither .png nor .svg"),
        (("--costs", "/no/such"), r"costs: /no/such can't be read as JSON"),
    ],
)
def test_bad_input_is_a_value_error_that_names_key_value_and_remedy(arguments: tuple[str, ...], message: str) -> None:
    """`main` prints a ValueError on stderr and exits with 2."""
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("option", ["--seeds", "--batches", "--engines", "--concurrency", "--batch-size"])
def test_zero_of_anything_is_refused(option: str) -> None:
    result = call(option, "0")
    assert result.exit_code == 2
    assert option in result.stderr


def test_a_finished_run_gives_its_lengths_and_its_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {
        step: pa.table(
            {
                "group_id": [f"{step}-{n // 2}" for n in range(6)],
                "prompt_token_ids": [[1] * 5] * 6,
                "response_token_ids": [[1] * (20 + n) for n in range(6)],
            }
        )
        for step in range(2)
    }
    keys = SimpleNamespace(run_id="mine")
    monkeypatch.setattr(simulate, "with_run", lambda name, data, read: read(None, keys))
    monkeypatch.setattr(
        simulate.batch_log,
        "find",
        lambda store, keys, step: SimpleNamespace(step=step, groups=(1, 2, 3)) if step in tables else None,
    )
    monkeypatch.setattr(simulate.batch_log, "read", lambda store, commit: tables[commit.step])
    found = answer(*QUICK, "--from-run", "mine", "--policy", "reserve_occupy")
    assert (found["trace"]["groups"], found["trace"]["responses"], found["batch_size"]) == (6, 12, 3)
    tables.clear()
    with pytest.raises(ObjectMissing, match="run 'mine' has no committed batch yet; see `roadstead batch list`"):
        CliRunner().invoke(app, ["simulate", "--from-run", "mine"], catch_exceptions=False)


def test_ctrl_c_is_the_interruption_that_main_answers_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("roadstead.benchmarks.simulator.run.simulate", interrupt)
    assert isinstance(call(*QUICK).exception, Interrupted)


def test_other_commands_do_not_wait_for_the_simulator() -> None:
    code = "import sys, roadstead.cli.main; print([m for m in sys.modules if 'simulator' in m or m == 'matplotlib'])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"
