"""The unix socket of rank 0.

Owns: the socket file, one thread a connection, JSON lines. Never touches: steps, torch.
Invariant: every line gets one line back; an exception becomes an error line and never ends the server. A client
that goes away changes nothing: its step goes on.
A crash leaves: the socket file, which the next incarnation replaces; connecting to it is refused meanwhile.
"""

from __future__ import annotations

import json
import logging
import socketserver
import threading
from pathlib import Path
from typing import Any

from roadstead.training.protocol import wire_name
from roadstead.training.service import TrainerState, TrainService

log = logging.getLogger(__name__)

_LONGEST_PATH = 107
"""Linux's limit for the path of a unix socket, in bytes."""


def serve(path: Path, state: TrainerState, service: TrainService) -> None:
    """Listen in daemon threads for as long as the process lives. The caller holds the folder's lock.

    Raises ValueError for a path that is too long.
    """
    if (size := len(str(path).encode())) > _LONGEST_PATH:
        raise ValueError(f"socket path {path} has {size} bytes, Linux allows {_LONGEST_PATH}; choose a shorter one")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    server = _Server(str(path), _Handler)
    server.state, server.service = state, service
    threading.Thread(target=server.serve_forever, name="socket", daemon=True).start()


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64
    state: TrainerState
    service: TrainService


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        for line in self.rfile:
            try:
                answer = self._answer(json.loads(line))
            except Exception as error:  # becomes the answer
                log.warning("command %s failed: %s: %s", line[:200], type(error).__name__, error)
                answer = {"error": wire_name(error), "message": str(error)}
            try:
                self.wfile.write(json.dumps(answer).encode() + b"\n")
            except OSError:
                return  # the client went away

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"op": "status"}:
                return dict(self.server.state.read())
            case {"op": "train", "step": int(step), "digest": str(digest)}:
                return self.server.service.train(step, digest)
            case {"op": "checkpoint", "version": int(version)}:
                return self.server.service.checkpoint(version)
            case {"op": "quit"}:
                self.server.service.quit()
                return {"quitting": True}
        raise ValueError(
            f"no such command: {request!r}; known: status, train {{step, digest}}, checkpoint {{version}}, quit"
        )
