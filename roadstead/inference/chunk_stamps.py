"""Version stamps on every streamed chunk.

Owns: one adjustment to vLLM 0.32 in the API server's process, the same for its CPU and its CUDA build. Never touches:
the engine core, weights.
Invariant: the spans on a chunk are those that vLLM would put on the last one, of what has arrived so far; the label was
stamped by the core on each step.
A crash leaves: nothing; but what was streamed before a crash of the core is not lost, which stock vLLM can't say: it
sets the spans on the last chunk only.
"""

from __future__ import annotations

from typing import Any


def stamp_every_chunk() -> None:
    """Apply to this process. Imports vLLM; the environment must be set before."""
    from vllm.v1.engine.output_processor import RequestState

    new_completion_output = RequestState._new_completion_output

    def stamped(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = new_completion_output(self, *args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    RequestState._new_completion_output = stamped
