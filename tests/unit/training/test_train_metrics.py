"""Results of older releases are still read."""

from __future__ import annotations

from roadstead.storage.train_rows import TrainResult
from roadstead.training.service import stepped_always

OLD = """{"format":1,"step":3,"batch_digest":"b","weights":{"version":4,"digest":"w","files":[]},
"metrics":{"loss":0.5,"grad_norm":1.0,"grad_clipped":false,"applied":true,"learning_rate":1e-06,"loss_tokens":7,
"importance_mean":1.0,"importance_max":1.5,"capped_share":0.0,"kl_to_behavior":0.01},"training":null}"""
"""Written before mini-batches, entropy and the rest were recorded."""


def test_a_result_without_the_newer_numbers_is_read_and_says_that_it_has_none() -> None:
    result = TrainResult.model_validate_json(OLD)
    metrics = result.metrics
    assert (metrics.loss, metrics.loss_tokens, metrics.masked_over_age) == (0.5, 7, 0)
    unknown = ("optimizer_steps", "trainable_rows", "zero_advantage_share", "reward_mean", "reward_std")
    unknown += ("clip_share", "kl_to_reference", "entropy")
    assert {getattr(metrics, name) for name in unknown} == {None}
    assert stepped_always(result), "a replay steps the optimizer as that release did"
    assert TrainResult.model_validate_json(result.model_dump_json()) == result
    newer = result.model_copy(update={"metrics": metrics.model_copy(update={"trainable_rows": 0})})
    assert not stepped_always(newer)
