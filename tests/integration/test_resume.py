"""A run that is killed, robbed of its Temporal, stopped, and taken up again, on real parts.

What must come out is the same as for a run that nothing happened to: check_run judges it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from roadstead.cli.hosting import Beat
from roadstead.storage import alive, batches, runs, steps
from roadstead.storage.alive import BEAT_S
from tests.support.workplace import LIMIT_S, Workplace, check_run, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]
STEPS = 9


def forget_temporal(place: Workplace) -> None:
    """Temporal's database is gone; S3 is what is left."""
    place.roadstead("down")
    databases = list((place.data / "temporal").glob("*.db*"))
    assert databases
    for file in databases:
        file.unlink()
    place.roadstead("up")


def changed(place: Workplace, name: str, **values: object) -> Path:
    """The run's YAML with other values, by dotted key with double underscores."""
    given = yaml.safe_load((place.folder / f"{name}.yaml").read_text())
    for key, value in values.items():
        section, _, leaf = key.partition("__")
        given[section][leaf] = value
    file = place.folder / f"{name}-changed.yaml"
    file.write_text(yaml.safe_dump(given))
    return file


def test_a_run_that_lost_machine_and_temporal_goes_on_from_s3_alone(workplace: Workplace) -> None:
    process = workplace.start("robbed", training__steps=STEPS)
    store, keys = workplace.store("robbed")
    wait_for_step(store, keys, 1, process)
    process.kill()
    process.wait(10)
    forget_temporal(workplace)
    store, keys = workplace.store("robbed")
    recorded = steps.count(store, keys)
    assert 2 <= recorded < STEPS

    refusals(workplace)
    assert runs.last_attempt(store, keys) == 1, "a refusal leaves no attempt behind"

    resumed = workplace.begin("resume", "robbed")
    wait_for_step(store, keys, recorded + 1, resumed)
    began = time.monotonic()
    resumed.send_signal(signal.SIGTERM)
    output, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 3 and "roadstead resume robbed" in output, output
    assert time.monotonic() - began < 25, "inside its grace"
    assert not [line for line in workplace.processes() if "runs/robbed" in line]
    assert f"goes on from S3 as attempt 2: version {recorded}" in output
    second = runs.attempts(store, keys)[1]
    assert second.from_version == recorded and second.terminal == {}
    end = runs.find_end(store, keys, 2)
    assert end is not None and end.how == "stopped" and end.version == steps.count(store, keys) > recorded
    committed = batches.find(store, keys, end.version)
    assert committed is None, "the step in training was published, no other begun"

    more = changed(workplace, "robbed", training__steps=STEPS + 1)
    finished = workplace.roadstead("resume", "robbed", "--config", str(more))
    assert f"goes on from S3 as attempt 3: version {end.version}" in finished.stdout
    check_run(workplace, "robbed", steps_=STEPS + 1, bound=2)
    assert {group.group_id for group in runs.attempts(store, keys)[2].carried} >= set(end.carried)

    before = set(store.keys(keys.root))
    again = workplace.roadstead("resume", "robbed")
    assert "nothing to do" in again.stdout and f"{STEPS + 1} of {STEPS + 1}" in again.stdout
    assert set(store.keys(keys.root)) == before, "a finished run is not touched"


def refusals(workplace: Workplace) -> None:
    """What can't be resumed says why and what to do, and starts nothing."""
    store, keys = workplace.store("robbed")

    def refused(*arguments: str, code: int = 2) -> str:
        answer = workplace.roadstead("resume", "robbed", *arguments, check=False)
        assert answer.returncode == code, answer.stdout + answer.stderr
        assert "starting engine" not in answer.stdout
        return answer.stderr

    prompts = workplace.folder / "reordered.jsonl"
    lines = (workplace.folder / "prompts.jsonl").read_text().splitlines()
    prompts.write_text("\n".join(reversed(lines)) + "\n")
    text = refused("--config", str(changed(workplace, "robbed", data__prompts=str(prompts))))
    assert "data.prompts" in text and "the same file" in text
    for key, value in (("rollout.group_size", 8), ("staleness.max_staleness", 5)):
        file = changed(workplace, "robbed", **{key.replace(".", "__"): value})
        text = refused("--config", str(file))
        assert key in text and str(value) in text and f"--allow {key}" in text
    assert "training.steps: 1" in refused("--config", str(changed(workplace, "robbed", training__steps=1)))
    assert "seed" in refused("--config", str(reseeded(workplace)))

    # Somebody hosts it on another machine: its beat moves.
    elsewhere = Beat(host="another-machine", pid=1, token="t", number=0)
    alive.write(store, keys, elsewhere)
    answer = subprocess.Popen(
        workplace.command("resume", "robbed"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    number = 0
    while answer.poll() is None and number < 60:
        time.sleep(BEAT_S / 5)
        number += 1
        alive.write(store, keys, elsewhere.model_copy(update={"number": number}))
    out, text = answer.communicate(timeout=10)
    assert answer.returncode == 1 and "another-machine" in text and "starting engine" not in out
    alive.write(store, keys, elsewhere.model_copy(update={"ended": True}))


def reseeded(place: Workplace) -> Path:
    given = yaml.safe_load((place.folder / "robbed.yaml").read_text())
    file = place.folder / "reseeded.yaml"
    file.write_text(yaml.safe_dump({**given, "seed": 1}))
    return file


def test_drain_stop_and_pause_of_a_run_that_is_not_there_say_so(workplace: Workplace) -> None:
    for command in ("drain", "stop", "pause", "unpause"):
        answer = workplace.roadstead(command, "nobody", check=False)
        assert answer.returncode == 1 and "nobody" in answer.stderr, command
    bad = workplace.roadstead("stop", "nobody", "--within", "soon", check=False)
    assert bad.returncode == 2 and "--within" in bad.stderr and "soon" in bad.stderr


def test_a_stop_kills_what_does_not_stop(workplace: Workplace) -> None:
    """The run's orchestrator worker is frozen, so nothing can act on the request; the window holds all the same."""
    process = workplace.start("frozen", training__steps=50)
    store, keys = workplace.store("frozen")
    wait_for_step(store, keys, 0, process)
    frozen = [int(x.split()[0]) for x in workplace.processes() if "workers.orchestrator" in x and "runs/frozen" in x]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    answer = workplace.roadstead("stop", "frozen", "--within", "6s", check=False)
    assert time.monotonic() - began < 15 and answer.returncode == 75 and "was killed" in answer.stderr
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while left := [line for line in workplace.processes() if "runs/frozen" in line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    status = json.loads(workplace.roadstead("status", "frozen", "--json").stdout)
    recorded = steps.count(store, keys)
    assert status["recorded"]["steps"] == recorded >= 1

    # The same Temporal still has the steps of the terminated run, open: they are ended, and the new attempt goes on.
    shorter = changed(workplace, "frozen", training__steps=recorded + 2)
    resumed = workplace.roadstead("resume", "frozen", "--config", str(shorter))
    assert f"goes on from S3 as attempt 2: version {recorded}" in resumed.stdout
    check_run(workplace, "frozen", steps_=recorded + 2, bound=2)
