"""The answer of a run that goes, for tests and pictures of `roadstead status`."""

from __future__ import annotations

from roadstead.workflows.messages import BufferView, RunStatus, StepSummary

_REWARDS, _AGES = (0.41, 0.47, 0.52, 0.55, 0.64), (1, 2, 2, 1, 2)


def running() -> RunStatus:
    """S = 2, B = 4: buffer 12 trains, 13 waits for one group, 14 has two free slots."""
    return RunStatus(
        run_id="arithmetic",
        attempt=1,
        phase="running",
        version=12,
        target_steps=40,
        training=12,
        in_flight=2,
        waiting=4,
        admitted=58,
        trained=48,
        filtered=3,
        discarded=0,
        expired=0,
        dead_lettered=1,
        max_staleness=2,
        window=(
            BufferView(buffer=13, state="stuck", slots="OOOR"),
            BufferView(buffer=14, state="pending", slots="O..R"),
        ),
        recent=tuple(
            StepSummary(
                step=7 + i,
                rows=32,
                response_tokens=6000 + 40 * i,
                max_staleness=age,
                mean_reward=reward,
                loss=0.02 - 0.011 * i,
                grad_norm=0.9 - 0.07 * i,
                applied=True,
                weights_digest="0" * 64,
            )
            for i, (reward, age) in enumerate(zip(_REWARDS, _AGES, strict=True))
        ),
    )
