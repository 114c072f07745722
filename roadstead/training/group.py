"""How rank 0 moves all ranks at once.

Owns: the control group, the order of collective operations, the idle heartbeat.
Never touches: what an operation does, the store, the socket.
Invariant: every rank executes the same operations in the same order, on its main thread. Whatever goes wrong
inside one ends the process: a group whose ranks disagree can't be repaired, only restarted.
A crash leaves: ranks that fail in their next collective, at the latest after its timeout, and exit too.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=900)
"""Longest that one rank may wait for another inside an operation: a checkpoint's download is the longest."""
_CONTROL_TIMEOUT = timedelta(seconds=60)
"""Between operations ranks hear from rank 0 every `_HEARTBEAT_S`; a peer that is stopped is found after this."""
_HEARTBEAT_S = 2.0

Operation = dict[str, Any]
"""`{"op": name, ...}`, small and picklable. Names: idle and quit belong to the group, others to its user."""
Execute = Callable[[Operation, Any], Any]
"""(operation, rank 0's local argument or None) -> result, which rank 0's caller gets."""


@dataclass
class _Call:
    operation: Operation
    local: Any = None
    future: Future[Any] = field(default_factory=Future)


class RankGroup:
    """Made on every rank after `torch.distributed` is set up. Collective."""

    def __init__(self) -> None:
        self.control = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
        """A gloo group of its own: on CUDA the default group can't carry Python objects from the host."""
        self._calls: queue.Queue[_Call] = queue.Queue()

    def call(self, operation: Operation, local: Any = None) -> Any:
        """On rank 0, from any thread but the main one: execute on all ranks, return rank 0's result.

        Bounded by the collectives' timeouts: if one expires, this process ends.
        """
        call = _Call(operation, local)
        self._calls.put(call)
        return call.future.result()

    def quit(self) -> None:
        """On rank 0: let `serve` return on all ranks, after what was called before."""
        self._calls.put(_Call({"op": "quit"}))

    def serve(self, execute: Execute) -> None:
        """On every rank's main thread, until `quit`. Raises whatever an operation raised; then exit."""
        leader = dist.get_rank() == 0
        while True:
            call = self._next() if leader else None
            box = [call.operation if call else None]
            dist.broadcast_object_list(box, src=0, group=self.control)
            dist.barrier(group=self.control)  # a peer that is stopped, not dead, is only seen by its answer
            operation = box[0]
            assert operation is not None
            if operation["op"] == "quit":
                return
            if operation["op"] == "idle":
                continue
            result = execute(operation, call.local if call else None)
            # Ranks finish at different times (rank 0 writes files): wait under the long timeout, not the control one.
            dist.barrier()
            if call:
                call.future.set_result(result)

    def _next(self) -> _Call:
        try:
            return self._calls.get(timeout=_HEARTBEAT_S)
        except queue.Empty:
            return _Call({"op": "idle"})
