"""The client against a socket that plays the trainer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roadstead.training.client import TrainerClient
from roadstead.training.protocol import (
    ReplayMismatch,
    TrainerBadBatch,
    TrainerConflict,
    TrainerError,
    TrainerOutOfOrder,
    TrainerUnavailable,
)

RESULT = {
    "step": 0,
    "batch_digest": "d",
    "weights": {"version": 1, "digest": "w", "files": []},
    "metrics": {
        "loss": 0.5,
        "grad_norm": None,
        "grad_clipped": False,
        "applied": False,
        "learning_rate": 1e-6,
        "loss_tokens": 3,
        "importance_mean": 1.0,
        "importance_max": 1.0,
        "capped_share": 0.0,
        "kl_to_behavior": 0.0,
    },
}
DONE = {"result": RESULT, "seconds": {"train": 0.1}}
Answer = Callable[[dict[str, Any]], dict[str, Any] | None]
"""None closes the connection without an answer."""


async def listen(path: Path, answer: Answer, hang: bool = False) -> asyncio.Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if hang:
            await asyncio.sleep(30)
        reply = answer(json.loads(line)) if line else None
        if reply is not None:
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        writer.close()

    path.unlink(missing_ok=True)
    return await asyncio.start_unix_server(handle, str(path))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Conflict", TrainerConflict),
        ("OutOfOrder", TrainerOutOfOrder),
        ("BadBatch", TrainerBadBatch),
        ("ReplayMismatch", ReplayMismatch),
        ("StoreError", TrainerUnavailable),
    ],
)
async def test_errors_keep_their_type(tmp_path: Path, name: str, kind: type[TrainerError]) -> None:
    server = await listen(tmp_path / "s", lambda _: {"error": name, "message": "why"})
    with pytest.raises(kind, match="why") as caught:
        await TrainerClient(tmp_path / "s").train(0, "d", lambda _: None, deadline_s=10)
    assert type(caught.value) is kind
    server.close()


async def test_asks_again_while_the_trainer_restarts(tmp_path: Path) -> None:
    client, seen = TrainerClient(tmp_path / "s"), list[dict[str, Any]]()
    first = await listen(tmp_path / "s", lambda _: None)
    work = asyncio.create_task(client.train(0, "d", seen.append, deadline_s=20))
    await asyncio.sleep(0.3)
    first.close()
    (tmp_path / "s").unlink()
    await asyncio.sleep(1.2)
    second = await listen(tmp_path / "s", lambda _: DONE)
    result, seconds = await work
    assert (result.weights.version, seconds) == (1, {"train": 0.1})
    assert any(status["phase"].startswith("down or restarting") for status in seen)
    second.close()


async def test_deadline_names_what_was_last_seen(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(TrainerUnavailable, match=r"no result .* within 1 s; last seen: down or restarting"):
        await TrainerClient(tmp_path / "s").train(0, "d", lambda _: None, deadline_s=1)
    assert time.monotonic() - began < 5


async def test_hang_is_named_with_its_time(tmp_path: Path) -> None:
    server = await listen(tmp_path / "s", lambda _: None, hang=True)
    with pytest.raises(TrainerUnavailable, match=r"hangs: no answer to status since \d{4}-"):
        await TrainerClient(tmp_path / "s", hang_s=0.5).train(0, "d", lambda _: None, deadline_s=20)
    with pytest.raises(TrainerUnavailable, match="hangs"):
        await TrainerClient(tmp_path / "s", hang_s=0.5).status()
    server.close()


async def test_what_on_wait_raises_ends_the_wait(tmp_path: Path) -> None:
    def stop(_: dict[str, Any]) -> None:
        raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        await TrainerClient(tmp_path / "s").train(0, "d", stop, deadline_s=20)
