"""The trainer as its commander sees it.

Owns: the connection, its retries, the watch over a trainer that hangs. Never touches: torch, S3.
Invariant: `train` ends in one of: the result, an error that asking again can't cure, or TrainerUnavailable. Asking
again is always safe, because training a step is idempotent by (step, digest).
A crash leaves: a step that goes on; whoever asks next joins it or gets its result.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from roadstead.storage.train_rows import TrainResult
from roadstead.training.protocol import ERRORS, Status, TrainerUnavailable

_POLL_S = 1.0
"""Between two looks at the status: the caller's heartbeat."""
_PATIENCE_S = 5.0
"""For one status; imports during boot hold the interpreter for a second or two."""
_RECONNECT_S = 0.2
_LINE_BYTES = 16 << 20
"""A result names every weight file; asyncio's default of 64 KiB is too short for a sharded model."""
_DOWN = (ConnectionError, FileNotFoundError)
"""Nobody listens on the socket, or whoever did is gone: the group restarts."""


class TrainerClient:
    """Commands the trainer that listens on `socket`. Holds no connection between calls."""

    def __init__(self, socket: Path, *, hang_s: float = 60.0) -> None:
        """hang_s: seconds without an answer to `status` after which a trainer that still holds its socket hangs."""
        self._socket = socket
        self._hang_s = hang_s

    async def status(self) -> Status:
        """Raises TrainerUnavailable when nobody answers within `hang_s`."""
        try:
            answer = await asyncio.wait_for(self._ask({"op": "status"}), self._hang_s)
        except _DOWN as error:
            raise TrainerUnavailable(f"{self._socket}: nobody listens ({error}); is the trainer started?") from error
        except TimeoutError as error:
            raise TrainerUnavailable(
                f"{self._socket}: no answer to status for {self._hang_s:.0f} s; the trainer hangs"
            ) from error
        return cast(Status, answer)

    async def train(
        self, step: int, digest: str, on_wait: Callable[[dict[str, Any]], None], *, deadline_s: float
    ) -> tuple[TrainResult, dict[str, float]]:
        """Train version `step` on the committed batch `digest`; the result, and seconds a phase.

        on_wait: called about once a second with the trainer's status, or with {"phase", "since"} while it is down;
        what it raises ends the wait. deadline_s: for the whole call, restarts included.
        Raises TrainerConflict, TrainerOutOfOrder, TrainerBadBatch, ReplayMismatch: asking again can't help.
        Raises TrainerUnavailable: ask again. Cancelling the call does not cancel the step.
        """
        watch = _Watch(step, self._socket, deadline_s, self._hang_s)
        request = {"op": "train", "step": step, "digest": digest}
        work = asyncio.ensure_future(self._ask(request))
        try:
            while True:
                await asyncio.wait({work}, timeout=watch.until_poll())
                if work.done():
                    try:
                        return _result(work.result())
                    except _DOWN as error:  # it restarts: the same command again, once it listens
                        watch.down(error)
                        await asyncio.sleep(_RECONNECT_S)
                        work = asyncio.ensure_future(self._ask(request))
                if watch.until_poll() > 0:
                    continue
                try:
                    watch.answered(await asyncio.wait_for(self._ask({"op": "status"}), watch.patience()))
                except _DOWN as error:
                    watch.down(error)
                except TimeoutError:
                    pass  # it holds its socket and says nothing: check() knows for how long
                on_wait(watch.polled())
                watch.check()
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, *_DOWN):
                await work

    async def checkpoint(self, version: int, *, deadline_s: float) -> None:
        """Have a complete checkpoint of a published version. Idempotent. Raises as `train` does."""
        try:
            answer = await asyncio.wait_for(self._ask({"op": "checkpoint", "version": version}), deadline_s)
        except _DOWN as error:
            raise TrainerUnavailable(f"{self._socket}: nobody listens ({error}); it restarts") from error
        except TimeoutError as error:
            raise TrainerUnavailable(
                f"{self._socket}: no checkpoint of version {version} within {deadline_s:.0f} s"
            ) from error
        _raise_refusal(answer)

    async def quit(self) -> None:
        """Let the group end after what it is doing. Raises TrainerUnavailable."""
        try:
            await asyncio.wait_for(self._ask({"op": "quit"}), self._hang_s)
        except (*_DOWN, TimeoutError) as error:
            raise TrainerUnavailable(f"{self._socket}: could not ask the trainer to quit: {error}") from error

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request on a connection of its own. Raises OSError kinds; the caller sets the deadline."""
        reader, writer = await asyncio.open_unix_connection(str(self._socket), limit=_LINE_BYTES)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
        finally:
            writer.close()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the trainer closed the connection before it answered")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _result(answer: dict[str, Any]) -> tuple[TrainResult, dict[str, float]]:
    _raise_refusal(answer)
    return TrainResult.model_validate(answer["result"]), answer["seconds"]


def _raise_refusal(answer: dict[str, Any]) -> None:
    if (name := answer.get("error")) is not None:
        kind = ERRORS.get(name)
        if kind is None:
            raise TrainerUnavailable(f"{name}: {answer['message']}")
        raise kind(answer["message"])


class _Watch:
    """What is known of the trainer during one `train`, and when to give up."""

    def __init__(self, step: int, socket: Path, deadline_s: float, hang_s: float) -> None:
        now = time.monotonic()
        self._step, self._socket, self._hang_s = step, socket, hang_s
        self._deadline, self._deadline_s = now + deadline_s, deadline_s
        self._heard = now
        self._polled = now
        self._seen: dict[str, Any] = {"phase": "connecting", "since": time.time()}

    def until_poll(self) -> float:
        """Seconds until the status is due, or until the deadline."""
        return max(0.0, min(self._polled + _POLL_S, self._deadline) - time.monotonic())

    def patience(self) -> float:
        """Seconds to wait for one status: short enough for the caller's heartbeats to go on."""
        return min(_PATIENCE_S, self._hang_s)

    def answered(self, status: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        self._seen = status

    def down(self, error: Exception) -> None:
        """Nobody listens: no hang, the deadline alone bounds it."""
        self._heard = time.monotonic()
        if not str(self._seen["phase"]).startswith("down"):
            self._seen = {
                "phase": f"down or restarting ({error})",
                "since": time.time(),
                "last_failure": self._seen.get("last_failure"),
            }

    def polled(self) -> dict[str, Any]:
        """What is known now; the next poll is due in a second."""
        self._polled = time.monotonic()
        return self._seen

    def check(self) -> None:
        now = time.monotonic()
        since = f"{self._seen['phase']} since {_clock(self._seen['since'])}"
        if now - self._heard >= self._hang_s:
            raise TrainerUnavailable(
                f"step {self._step}: the trainer at {self._socket} hangs: no answer to status since "
                f"{_clock(time.time() - (now - self._heard))} ({self._hang_s:.0f} s); last seen: {since}"
            )
        if now >= self._deadline:
            failure = self._seen.get("last_failure")
            raise TrainerUnavailable(
                f"step {self._step}: no result from the trainer at {self._socket} within {self._deadline_s:.0f} s; "
                f"last seen: {since}" + (f"; its last failure: {failure}" if failure else "")
            )


def _clock(when: float) -> str:
    """UTC, for messages."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))
