"""Nothing is dropped; tokens that are too old when they are trained are masked out of the loss, only those.

Source: proposed for prime-rl (pull requests 2957 and 2329) and xtuner (2003); admission and order as in the admission
gate. With partial rollout a long response keeps its newer tokens; masked ones cost generation and training like others.
Simplified: GRPO's advantage is not recomputed; a group whose tokens are all masked still fills its slot.
"""

from __future__ import annotations

from roadstead.benchmarks.simulator.policies.base import QueuePolicy


class MaskOverAge(QueuePolicy):
    name = "mask_over_age"
    strict = True
    discards = True

    def quota(self) -> int:
        return (self.max_staleness + self.version + 1) * self.batch_size

    def oldest_trained(self) -> int:
        return self.version - self.max_staleness
