"""New weights into a vLLM server that is serving.

Owns: the order of a weight update, the deadline of each stage, and the version label.
Never touches: requests (but for ending them under `on_update: abort`), the files of a version: the worker reads those.
Invariant: while the engine's label is a version, its weights are that version. Before weights are touched the label
becomes `loading-<version>`; it becomes a version when the worker has acknowledged, and the model, asked by a probe
while everything is still paused, computes something else than before. Cached KV never serves a request of another load
than the one that made it (see `PauseMode`).
A crash leaves: an engine that may be paused or labelled `loading-...`. `attach` ends the first and reports the second,
and the next update cures it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from roadstead.inference.engine import EngineError, UpdateFailed
from roadstead.inference.folders import version_folder
from roadstead.inference.labels import loading_label, new_label, version_of
from roadstead.inference.vllm_http import VllmHttp

log = structlog.get_logger(__name__)

PauseMode = Literal["recompute", "keep", "wait", "abort"]
"""What becomes of requests in flight. recompute: they stay, their KV is dropped and computed anew by the new weights.
keep: they stay with their KV; new requests are kept from old KV by salting the prefix cache with the label. wait: they
end first. abort: they are ended. In all but `keep` the prefix cache is emptied."""


@dataclass(frozen=True)
class _Proven:
    """Weights that were certainly in the engine, and what they compute."""

    label: str
    digest: str | None
    """Of their tensors; None while it is unknown."""
    logits: str | None


class Updater:
    """`drain_timeout_s`: under `wait`, how long the requests in flight may take to end."""

    def __init__(self, http: VllmHttp, mode: PauseMode, drain_timeout_s: float) -> None:
        self._http, self._mode, self._drain_timeout_s = http, mode, drain_timeout_s
        self._proven: _Proven | None = None
        self._aborts_begun = self._aborts_ended = 0

    # -- was it an update? ----------------------------------------------------------------------------------

    def mark(self) -> int:
        """A moment, for `aborted_since`."""
        return self._aborts_ended

    def aborted_since(self, mark: int) -> bool:
        """Whether an update was ending requests at some time since `mark`."""
        return self._aborts_begun > mark

    # -- the update -----------------------------------------------------------------------------------------

    async def load(self, folder: Path, version: int, in_flight: int) -> str:
        """Replace the weights; returns their label. `in_flight`: requests that would see the version fall."""
        manifest = read_manifest(folder)
        if manifest["version"] != version:
            raise UpdateFailed(f"{folder}: its manifest says version {manifest['version']}, expected {version}")
        before = await self._http.label()
        now = version_of(before)
        if in_flight and now is not None and version < now:
            raise UpdateFailed(
                f"{self._http.engine_id}: version {version} is older than {now}, which serves {in_flight} requests; "
                "wait for those"
            )
        label = new_label(version)
        try:
            await self._pause()
            await self._replace(folder, manifest, before, label)
        except BaseException as error:
            try:
                await self._http.stage("resume", "/resume")
            except EngineError as second:
                error.add_note(f"and it could not be resumed: {second}")
            raise
        await self._http.stage("resume", "/resume")
        if (read := await self._http.label()) != label:
            raise UpdateFailed(f"{self._http.engine_id}: acknowledged {label!r}, reads back {read!r}")
        return label

    async def _pause(self) -> None:
        if self._mode == "wait":
            path, note = "/pause?mode=wait&clear_cache=true", " (until the requests in flight have ended)"
            async with self._http.deadline("drain", self._drain_timeout_s, f"POST {path}{note}"):
                # Longer than any other stage may take; the core must show meanwhile that it lives.
                response = await self._http.while_alive(self._http.send("POST", path))
            self._http.require_stage(response, "drain")
        elif self._mode == "abort":
            self._aborts_begun += 1
            try:
                await self._http.stage("pause", "/pause?mode=abort&clear_cache=true")
            finally:
                self._aborts_ended = self._aborts_begun
        else:
            clear = "false" if self._mode == "keep" else "true"
            await self._http.stage("pause", f"/pause?mode=keep&clear_cache={clear}")

    async def _replace(self, folder: Path, manifest: dict[str, Any], before: str, label: str) -> None:
        await self._start()
        await self._note_proven(before, folder)
        digests = {f["name"]: f["sha256"] for f in manifest["files"] if f["name"].endswith(".safetensors")}
        await self._label("update", loading_label(manifest["version"]))
        try:
            await self._http.stage(
                "update", "/update_weights", {"update_info": {"path": str(folder.resolve()), "sha256": digests}}
            )
        except UpdateFailed:
            # Refused by the worker, which does so only before it touches a parameter.
            await self._label("update", before)
            raise
        logits = await self._probe()
        self._require_change(manifest, logits)
        await self._http.stage("finish", "/finish_weight_update", {"weight_version": label})
        self._proven = _Proven(label, manifest["digest"], logits)

    async def _start(self) -> None:
        try:
            await self._http.stage("start", "/start_weight_update")
        except UpdateFailed:
            # A client that died or gave up left its update open: close it. The worker's finish does no more.
            await self._http.stage("start", "/finish_weight_update")
            await self._http.stage("start", "/start_weight_update")

    async def _label(self, stage: str, label: str) -> None:
        await self._http.stage(stage, "/update_weight_version", {"new_version": label})

    # -- the probe ------------------------------------------------------------------------------------------

    async def _note_proven(self, before: str, folder: Path) -> None:
        """What the weights that serve now compute. After a broken-off update: what those before it did."""
        version = version_of(before)
        if version is None or (self._proven and self._proven.label == before):
            return
        try:
            digest = read_manifest(version_folder(folder.parent, version))["digest"]
        except UpdateFailed:
            digest = None  # removed meanwhile: then this one update goes unproved
        self._proven = _Proven(before, digest, await self._probe())

    async def _probe(self) -> str | None:
        response = await self._http.stage("probe", "/collective_rpc", {"method": "logits_digest"})
        known = [result for result in response.json()["results"] if result is not None]
        return " ".join(known) or None

    def _require_change(self, manifest: dict[str, Any], logits: str | None) -> None:
        old = self._proven
        if old is None or old.digest is None or old.logits is None or logits is None:
            log.warning("engine.update_unproved", engine=self._http.engine_id, version=manifest["version"])
        elif old.digest != manifest["digest"] and old.logits == logits:
            raise UpdateFailed(
                f"{self._http.engine_id}: acknowledged version {manifest['version']} (weights "
                f"{manifest['digest'][:16]}), but its logits are, to the bit, those of {old.label} (weights "
                f"{old.digest[:16]}): it still serves the old ones. It gets no requests until an update passes; "
                "restart it if this goes on"
            )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a local version. Raises UpdateFailed when there is none."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UpdateFailed(
            f"{folder / 'manifest.json'}: {error}; download the version again, or show "
            "this folder to the machine of the engine under the same path"
        ) from error
    return manifest
