"""The optimizer steps of a batch, on a model of bigrams: passes, mini-batches, ranks, batches without a gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from roadstead.training.batch_rows import TrainingBatch  # noqa: E402
from roadstead.training.losses import token_loss  # noqa: E402
from roadstead.training.metrics import OptimizerStep, step_metrics, train_row  # noqa: E402
from roadstead.training.optimization import Optimization  # noqa: E402
from tests.unit.training import bigrams  # noqa: E402
from tests.unit.training.bigrams import Bigrams, Engine, batch_of, rows_of  # noqa: E402

MIXED = [[1.0, -1.0, 0.5], [-0.7, 0.7], [2.0, -1.0, -1.0], [0.3, -0.3]]
"""Advantages of four groups."""
CONSTANT = [[0.0, 0.0], [0.0, 0.0]]
ALL_OPTIONS: dict[str, Any] = {
    "minibatches": 2,
    "clip_low": 0.05,
    "clip_high": 0.1,
    "importance_level": "sequence",
    "importance_cap": 1.2,
    "aggregation": "sequence_mean",
    "kl_coefficient": 0.3,
    "mask_older_than": 1,
}


def optimize(
    batch: TrainingBatch, engine: Engine, reference: Any = None, always_step: bool = False, **training: Any
) -> tuple[Optimization, list[OptimizerStep]]:
    section = bigrams.settings(**training)
    optimization = Optimization(engine, reference, section, always_step=always_step)
    return optimization, optimization.run(batch.without_older_than(section.mask_older_than))


def metrics_of(batch: TrainingBatch, engine: Engine, reference: Any = None, **training: Any) -> Any:
    optimization, steps = optimize(batch, engine, reference, **training)
    section = bigrams.settings(**training)
    rows = batch.without_older_than(section.mask_older_than).rows
    tokens = [optimization.tokens[i] for i in range(len(rows))]
    return step_metrics(rows, tokens, steps, section, learning_rate=0.05)


def gradients(batch: TrainingBatch, ranks: int, budget: int, **training: Any) -> list[Any]:
    """The gradient of each mini-batch as all ranks together have it; the weights stay."""
    section = bigrams.settings(**training).model_copy(update={"micro_batch_tokens": budget})
    seen: list[list[Any]] = []
    for rank in range(ranks):
        engine = Engine(Bigrams(), learning_rate=0.0)
        mine: list[Any] = []
        engine.before_step = lambda engine=engine, mine=mine: mine.append(engine.model.table.grad.clone())
        reference = Bigrams(1) if section.kl_coefficient else None
        Optimization(engine, reference, section, rank=rank, ranks=ranks).run(
            batch.without_older_than(section.mask_older_than)
        )
        seen.append(mine)
    return [torch.stack(parts).mean(0) for parts in zip(*seen, strict=True)]  # DeepSpeed averages over ranks


# -- the whole of a step, written apart from it -----------------------------------------------------------------


def plain_step(rows: list[dict[str, Any]], model: Bigrams, reference: Bigrams, t: dict[str, Any]) -> list[float]:
    """The optimizer steps under ALL_OPTIONS in plain torch, row after row, from the batch's columns. Their losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2, weight_decay=0.0)

    def logprobs(table: Any, row: dict[str, Any]) -> Any:
        ids = [row["prompt_token_ids"][-1], *row["response_token_ids"]]
        logits = table[torch.tensor(ids[:-1])] / row["sampling"]["temperature"]
        return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]

    def loss_tokens(row: dict[str, Any]) -> Any:
        versions = [s["version"] for s in row["version_spans"] for _ in range(s["start"], s["end"])]
        young = [row["step"] - version <= t["mask_older_than"] for version in versions]
        return torch.tensor([keep and fresh for keep, fresh in zip(row["loss_mask"], young, strict=True)])

    start = model.table.detach().clone()
    losses = []
    for part in range(t["minibatches"]):
        terms = []
        for row in rows:
            mask = loss_tokens(row)
            if row["slot"] % t["minibatches"] != part or not mask.any():
                continue
            now, then = logprobs(model.table, row), logprobs(start, row)
            weight = float(torch.exp((then - torch.tensor(row["behavior_logprobs"]))[mask].mean()))
            ratio = torch.exp(now - then)
            bounded = ratio.clamp(1 - t["clip_low"], 1 + t["clip_high"])
            policy = torch.minimum(ratio * row["advantage"], bounded * row["advantage"])
            other = logprobs(reference.table.detach(), row) - now
            token = -policy * min(weight, t["importance_cap"]) + t["kl_coefficient"] * (other.exp() - other - 1)
            terms.append(token[mask].mean())
        loss = torch.stack(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_option_at_once_is_the_plain_computation(seed: int) -> None:
    rows = rows_of(MIXED, seed=seed)
    want = Bigrams(seed)
    losses = plain_step(rows, want, Bigrams(9), ALL_OPTIONS)
    engine = Engine(Bigrams(seed), learning_rate=0.2)
    metrics = metrics_of(batch_of(rows), engine, Bigrams(9), **ALL_OPTIONS)
    torch.testing.assert_close(engine.model.table, want.table, rtol=1e-4, atol=1e-5)
    assert metrics.loss == pytest.approx(np.mean(losses), rel=1e-4, abs=1e-6)
    assert metrics.optimizer_steps == 2
    assert metrics.masked_over_age > 0 and metrics.kl_to_reference > 0 and metrics.clip_share > 0


# -- ranks and micro-batches ----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 60), st.booleans())
def test_the_gradient_is_the_same_however_the_rows_are_spread(seed: int, ranks: int, budget: int, all_on: bool) -> None:
    """The divisor is that of the whole mini-batch."""
    batch = batch_of(rows_of(MIXED, seed=seed))
    options = ALL_OPTIONS if all_on else {}
    alone, spread = gradients(batch, 1, 10_000, **options), gradients(batch, ranks, budget, **options)
    assert len(alone) == len(spread) == (2 if all_on else 1)
    for one, other in zip(alone, spread, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.randoms(use_true_random=False), st.sampled_from(["token_mean", "sequence_mean"]))
def test_the_order_of_the_rows_does_not_matter(seed: int, random: Any, aggregation: str) -> None:
    rows = rows_of(MIXED, seed=seed)
    batch = batch_of(rows)
    mixed = list(range(len(rows)))
    random.shuffle(mixed)
    one = metrics_of(batch, Engine(Bigrams()), aggregation=aggregation)
    other = metrics_of(batch.subset(mixed), Engine(Bigrams()), aggregation=aggregation)
    assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-6)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_a_long_row_weighs_by_its_tokens_or_as_a_row() -> None:
    """Two rows, 6 tokens and 2, advantage +1 and -1, behaviour equal to the trainer: losses -A lp."""
    rows = rows_of([[1.0, -1.0]])
    model = Bigrams()
    for row, n in zip(rows, (6, 2), strict=True):
        row |= {
            "prompt_token_ids": [1],
            "response_token_ids": [1] * n,
            "loss_mask": [True] * n,
            "version_spans": [{"version": 3, "start": 0, "end": n}],
            **{"head_version": 3, "tail_version": 3, "staleness": 0},
        }
        lp = torch.log_softmax(model.table[1] / 0.7, -1)[1].item()
        row["behavior_logprobs"] = [lp] * n
    batch = batch_of(rows)
    assert metrics_of(batch, Engine(Bigrams()), aggregation="token_mean").loss == pytest.approx(-4 * lp / 8, rel=1e-5)
    assert metrics_of(batch, Engine(Bigrams()), aggregation="sequence_mean").loss == pytest.approx(0.0, abs=1e-6)


# -- passes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minibatches", "passes"),
    [(1, [True]), (2, [False, True, True]), (4, [False] * 3 + [True] * 4)],
)
def test_forward_passes_are_those_that_are_needed(minibatches: int, passes: list[bool]) -> None:
    """One a mini-batch for the gradient, and one before for each mini-batch that meets moved weights."""
    engine = Engine(Bigrams())
    reference = Bigrams(1)
    section = bigrams.settings(minibatches=minibatches).model_copy(update={"micro_batch_tokens": 10_000})
    Optimization(engine, None, section).run(batch_of(rows_of(MIXED)))
    assert engine.model.passes == passes
    assert len(engine.norms) == minibatches
    Optimization(engine, reference, section.model_copy(update={"kl_coefficient": 0.1})).run(batch_of(rows_of(MIXED)))
    assert reference.passes == [False] * minibatches
    assert reference.table.grad is None


def test_what_is_recorded_is_of_the_weights_before_the_step() -> None:
    batch = batch_of(rows_of(MIXED))
    one, _ = optimize(batch, Engine(Bigrams()))
    many, steps = optimize(batch, Engine(Bigrams()), minibatches=4)
    assert [step.applied for step in steps] == [True] * 4
    for i in range(len(batch.rows)):
        for name in ("logprobs", "entropy", "importance"):
            np.testing.assert_array_equal(getattr(one.tokens[i], name), getattr(many.tokens[i], name))


def test_one_mini_batch_is_the_truncated_loss_bit_for_bit() -> None:
    """The default objective, as it was when the first results were recorded: one pass, one divisor, one sum."""
    batch = batch_of(rows_of(MIXED))
    engine = Engine(Bigrams())
    got: list[Any] = []
    engine.before_step = lambda: got.append(engine.model.table.grad.clone())
    section = bigrams.settings().model_copy(update={"micro_batch_tokens": 10_000})
    optimization = Optimization(engine, None, section)
    optimization.run(batch)
    model = Bigrams()
    order = sorted(range(len(batch.rows)), key=lambda i: (-len(batch.rows[i].tokens), i))
    rows = [batch.rows[i] for i in order]
    ids = [torch.from_numpy(row.tokens).long() for row in rows]
    logits = torch.cat([model.table[t[row.prompt_length - 1 : -1]] for t, row in zip(ids, rows, strict=True)]) / 0.7
    targets = torch.cat([t[row.prompt_length :] for t, row in zip(ids, rows, strict=True)])
    lp = logits.gather(-1, targets[:, None]).squeeze(-1) - torch.logsumexp(logits, -1)
    behavior = torch.cat([torch.from_numpy(row.behavior) for row in rows])
    mask = torch.cat([torch.from_numpy(row.mask) for row in rows])
    a = torch.cat([torch.full((len(row.mask),), row.advantage) for row in rows])
    each = -a[mask] * torch.exp(lp.detach() - behavior)[mask].clamp(max=2.0) * lp[mask]
    (each.sum() * (1 / batch.loss_tokens)).backward()
    torch.testing.assert_close(got[0], model.table.grad, rtol=1e-6, atol=1e-8)
    per_token = token_loss(lp.detach(), behavior, a, mask, 2.0).per_token
    assert torch.equal(per_token[mask], each.detach())
    recorded = np.concatenate([optimization.tokens[i].loss for i in order])
    np.testing.assert_array_equal(recorded, per_token.numpy())


# -- nothing to learn from ------------------------------------------------------------------------------------


def trained(engine: Engine) -> Any:
    """An engine whose Adam has momentum, and its weights."""
    optimize(batch_of(rows_of(MIXED)), engine)
    return engine.model.table.detach().clone()


def test_constant_rewards_move_nothing() -> None:
    """tinker #507, TRL #3452. Adam has momentum and decay, so a step of gradient 0 would move the weights."""
    engine = Engine(Bigrams(), decay=0.1)
    before = trained(engine)
    metrics = metrics_of(batch_of(rows_of(CONSTANT)), engine)
    assert torch.equal(engine.model.table, before)
    assert (metrics.applied, metrics.optimizer_steps, metrics.grad_norm) == (False, 0, 0.0)
    assert (metrics.trainable_rows, metrics.zero_advantage_share, metrics.loss) == (0, 1.0, 0.0)
    assert metrics.loss_tokens > 0 and metrics.entropy > 0, "it is measured all the same"


def test_as_older_results_were_made_adam_moves_without_a_gradient() -> None:
    engine = Engine(Bigrams(), decay=0.1)
    before = trained(engine)
    _, steps = optimize(batch_of(rows_of(CONSTANT)), engine, always_step=True)
    assert [(step.applied, step.grad_norm) for step in steps] == [(True, 0.0)]
    assert not torch.equal(engine.model.table, before)


def test_a_batch_whose_rewards_all_failed_moves_nothing_even_with_a_divergence_term() -> None:
    engine = Engine(Bigrams())
    before = trained(engine)
    rows = [row | {"reward": None} for row in rows_of(MIXED)]
    metrics = metrics_of(batch_of(rows), engine, Bigrams(1), kl_coefficient=0.1)
    assert torch.equal(engine.model.table, before)
    assert (metrics.loss_tokens, metrics.trainable_rows, metrics.applied) == (0, 0, False)
    assert (metrics.reward_mean, metrics.entropy, metrics.kl_to_reference) == (None, None, None)


def test_a_divergence_term_is_a_gradient_of_its_own() -> None:
    engine = Engine(Bigrams())
    before = trained(engine)
    metrics = metrics_of(batch_of(rows_of(CONSTANT)), engine, Bigrams(), kl_coefficient=0.1)
    assert (metrics.trainable_rows, metrics.applied) == (0, True)
    assert not torch.equal(engine.model.table, before)


def test_only_the_mini_batch_without_a_gradient_is_left_out() -> None:
    """Groups 0 and 2 are constant and make the first of two mini-batches."""
    rows = rows_of([[0.0, 0.0], [1.0, -1.0], [0.0, 0.0], [0.5, -0.5]])
    engine = Engine(Bigrams())
    optimization, steps = optimize(batch_of(rows), engine, minibatches=2)
    assert [(step.applied, step.grad_norm == 0.0) for step in steps] == [(False, True), (True, False)]
    assert len(engine.norms) == 1
    assert engine.model.passes.count(True) == len(engine.model.passes) // 2, "the second one needs no pass before it"
    assert sorted(optimization.tokens) == list(range(8))


def test_a_mini_batch_that_is_not_finite_is_skipped_and_shows() -> None:
    rows = rows_of([[1.0, -1.0], [1.0, -1.0]])
    rows[0]["behavior_logprobs"] = [math.nan] * len(rows[0]["behavior_logprobs"])
    engine = Engine(Bigrams())
    metrics = metrics_of(batch_of(rows), engine, minibatches=2)
    assert (metrics.grad_norm, metrics.applied, metrics.optimizer_steps) == (None, True, 1)
    assert math.isfinite(metrics.loss)
    both = metrics_of(batch_of(rows), Engine(Bigrams()))
    assert (both.grad_norm, both.applied, both.optimizer_steps) == (None, False, 0)


def test_empty_responses_give_no_nan() -> None:
    """verl #5899, slime #2134."""
    rows = rows_of([[1.0, -1.0], [0.5, -0.5]])
    empty = {name: [] for name in ("response_token_ids", "loss_mask", "behavior_logprobs", "version_spans", "turns")}
    none = [row | empty for row in rows]
    for options in ({}, ALL_OPTIONS):
        metrics = metrics_of(batch_of([rows[0] | empty, *rows[1:]]), Engine(Bigrams()), Bigrams(1), **options)
        assert metrics.applied and math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)
        metrics = metrics_of(batch_of(none), Engine(Bigrams()), Bigrams(1), **options)
        assert not metrics.applied
        assert [v for v in metrics.model_dump().values() if isinstance(v, float) and not math.isfinite(v)] == []


# -- what is recorded -----------------------------------------------------------------------------------------


def test_rows_add_up_to_the_loss() -> None:
    for options in ({}, {"minibatches": 3}, {"minibatches": 2, "aggregation": "sequence_mean"}):
        batch = batch_of(rows_of(MIXED))
        section = bigrams.settings(**options)
        optimization, steps = optimize(batch, Engine(Bigrams()), **options)
        tokens = [optimization.tokens[i] for i in range(len(batch.rows))]
        divisors = {i: step.divisor * len(steps) for step in steps for i in step.rows}
        rows = [train_row(row, t, 2.0, divisors[i]) for i, (row, t) in enumerate(zip(batch.rows, tokens, strict=True))]
        metrics = step_metrics(batch.rows, tokens, steps, section, learning_rate=0.05)
        assert sum(row["loss"] for row in rows) == pytest.approx(metrics.loss, rel=1e-6)


def test_columns_of_a_row_follow_from_its_logprobs_whatever_the_options_are() -> None:
    """`verify` computes them again from the batch's loss mask."""
    rows = rows_of(MIXED)
    batch = batch_of(rows).without_older_than(ALL_OPTIONS["mask_older_than"])
    optimization, _ = optimize(batch_of(rows), Engine(Bigrams()), Bigrams(1), **ALL_OPTIONS)
    for i, (row, raw) in enumerate(zip(batch.rows, rows, strict=True)):
        written = train_row(row, optimization.tokens[i], 1.2, 1)
        mask = np.array(raw["loss_mask"])
        gaps = (np.array(raw["behavior_logprobs"]) - written["trainer_logprobs"])[mask]
        assert written["importance_mean"] == pytest.approx(np.exp(-gaps).mean(), rel=1e-5)
        assert written["importance_max"] == pytest.approx(np.exp(-gaps).max(), rel=1e-5)
        assert written["kl_to_behavior"] == pytest.approx(gaps.mean(), rel=1e-4, abs=1e-6)
        used = np.exp(-gaps[np.asarray(row.mask)[mask]].mean()) if row.mask.any() else 0.0
        assert written["capped_share"] == float(used > 1.2)


def test_a_weight_that_explodes_is_found_by_row_and_token() -> None:
    """TRL #4772: the ratio exploded and nobody could see where."""
    rows = rows_of(MIXED)
    long = max(range(len(rows)), key=lambda i: len(rows[i]["response_token_ids"]))
    at = len(rows[long]["response_token_ids"]) - 1
    rows[long]["loss_mask"] = [True] * (at + 1)
    rows[long]["behavior_logprobs"] = [*rows[long]["behavior_logprobs"][:at], -30.0]
    batch = batch_of(rows)
    optimization, _ = optimize(batch, Engine(Bigrams()))
    written = [train_row(row, optimization.tokens[i], 2.0, 1) for i, row in enumerate(batch.rows)]
    assert int(np.argmax([row["importance_max"] for row in written])) == long
    gaps = written[long]["trainer_logprobs"] - np.array(rows[long]["behavior_logprobs"])
    assert int(np.argmax(gaps)) == at
    assert written[long]["importance_max"] == pytest.approx(math.exp(gaps[at]), rel=1e-4)


def test_numbers_of_the_batch() -> None:
    rows = rows_of([[1.0, -1.0], [0.0, 0.0]])
    for row, reward in zip(rows, (1.0, 0.0, 2.0, None), strict=True):
        row["reward"] = reward
    metrics = metrics_of(batch_of(rows), Engine(Bigrams()))
    assert metrics.reward_mean == pytest.approx(1.0)
    assert metrics.reward_std == pytest.approx(math.sqrt(2 / 3))
    assert (metrics.trainable_rows, metrics.zero_advantage_share) == (2, 0.5)
    assert metrics.kl_to_reference is None and metrics.clip_share == 0.0
