"""The token loss: by hand, against a reference written apart from it, and by its laws."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from roadstead.training.losses import (  # noqa: E402
    chosen_logprobs,
    entropies,
    scaled_logits,
    sequence_weights,
    token_loss,
)

SEEDS = st.integers(0, 2**31)


def tensors(seed: int, rows: int = 5, longest: int = 9) -> dict[str, Any]:
    """Random tokens of `rows` rows; the last row has no loss token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (rows,), generator=generator)
    sequences = torch.repeat_interleave(torch.arange(rows), lengths)
    n = len(sequences)

    def logprobs() -> Any:
        return -1.5 + 0.4 * torch.randn(n, generator=generator)

    return {
        "logprobs": logprobs(),
        "proximal": logprobs(),
        "behavior": logprobs(),
        "reference": logprobs(),
        "advantages": torch.randn(rows, generator=generator)[sequences],
        "mask": (torch.rand(n, generator=generator) < 0.7) & (sequences < rows - 1),
        "sequences": sequences,
    }


def loss_of(t: dict[str, Any], cap: float = 1.3, **options: Any) -> tuple[Any, Any]:
    """The loss and its gradient."""
    logprobs = t["logprobs"].clone().requires_grad_()
    loss = token_loss(logprobs, t["behavior"], t["advantages"], t["mask"], cap, **options)
    loss.total.backward()
    return loss, logprobs.grad


# -- by hand --------------------------------------------------------------------------------------------------


def test_logprobs_and_entropy_are_after_the_temperature() -> None:
    logits = torch.tensor([[[0.0, 2.0], [4.0, 0.0]]])
    scaled = scaled_logits(logits, torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([2.0, 1.0]))
    # softmax([0, 1])[1] and softmax([4, 0])[1]
    want = [-math.log(1 + math.exp(-1)), -math.log(1 + math.exp(4))]
    assert chosen_logprobs(scaled, torch.tensor([1, 1])).tolist() == pytest.approx(want, rel=1e-6)
    shares = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(4))]
    want = [-p * math.log(p) - (1 - p) * math.log(1 - p) for p in shares]
    assert entropies(scaled).tolist() == pytest.approx(want, rel=1e-6)


def test_entropy_of_known_distributions() -> None:
    certain = torch.tensor([0.0, -math.inf, -math.inf, -math.inf])
    got = entropies(torch.stack([torch.full((4,), 3.0), certain]).repeat(300, 1))
    assert got.tolist() == pytest.approx([math.log(4), 0.0] * 300, abs=1e-6)
    assert entropies(torch.zeros(0, 4)).tolist() == []


def test_loss_and_gradient_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    behavior = torch.tensor([-1.0, -3.0, -0.4, -9.0])
    advantages = torch.tensor([2.0, -1.0, 1.0, 5.0])
    mask = torch.tensor([True, True, True, False])
    loss = token_loss(logprobs, behavior, advantages, mask, cap=2.0)
    # Weights 1, e (truncated to 2), exp(-0.1); the fourth token is masked.
    low = math.exp(-0.1)
    want = [-2.0 * 1.0 * -1.0, 1.0 * 2.0 * -2.0, -1.0 * low * -0.5, 0.0]
    assert loss.per_token.tolist() == pytest.approx(want, rel=1e-6)
    assert loss.total.item() == pytest.approx(sum(want), rel=1e-6)
    assert loss.importance.tolist() == pytest.approx([1.0, math.e, low, math.exp(6)], rel=1e-6)
    assert loss.weights.tolist() == loss.importance.tolist()
    assert loss.kl.tolist() == [0.0] * 4 and not loss.clipped.any()
    loss.total.backward()
    # d/dlp = -A * min(w, cap): the weight itself is not differentiated.
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 2.0, -low, 0.0], rel=1e-6)


def test_clip_by_hand() -> None:
    """Ratios 1.25 and 0.75, each for a good and a bad token, under a clip that is wider upwards (clip-higher)."""
    ratio = torch.tensor([1.25, 1.25, 0.75, 0.75, 1.35])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    logprobs = ratio.log().requires_grad_()
    zeros, mask = torch.zeros(5), torch.ones(5, dtype=torch.bool)
    narrow = token_loss(logprobs, zeros, advantages, mask, 2.0, proximal=zeros, clip=(0.2, 0.2))
    wide = token_loss(logprobs, zeros, advantages, mask, 2.0, proximal=zeros, clip=(0.2, 0.28))
    assert narrow.per_token.tolist() == pytest.approx([-1.2, 1.25, -0.75, 0.8, -1.2], rel=1e-6)
    assert narrow.clipped.tolist() == [True, False, False, True, True]
    assert wide.per_token.tolist() == pytest.approx([-1.25, 1.25, -0.75, 0.8, -1.28], rel=1e-6)
    assert wide.clipped.tolist() == [False, False, False, True, True]
    wide.total.backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.25, 1.25, -0.75, 0.0, 0.0], rel=1e-6)


def test_masked_nan_gives_neither_loss_nor_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    bad = torch.tensor([-1.0, math.nan])
    mask = torch.tensor([True, False])
    for options in (
        {},
        {"proximal": bad, "reference": bad, "kl_coefficient": 1.0, "sequences": torch.tensor([0, 0]), "shares": bad},
    ):
        logprobs.grad = None
        loss = token_loss(logprobs, bad, torch.tensor([1.0, math.nan]), mask, 2.0, **options)
        loss.total.backward()
        assert math.isfinite(loss.total.item())
        assert math.isfinite(logprobs.grad[0].item()) and logprobs.grad[1].item() == 0.0


def test_a_token_that_carries_loss_and_is_not_finite_shows() -> None:
    """The optimizer must see it: it skips the step. Clamping or selecting must not swallow it."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    one, mask = torch.tensor([1.0]), torch.tensor([True])
    bad = torch.tensor([math.nan])
    for options in ({}, {"proximal": torch.tensor([-1.0])}, {"sequences": torch.tensor([0])}):
        logprobs.grad = None
        token_loss(logprobs, bad, one, mask, 2.0, **options).total.backward()
        assert math.isnan(logprobs.grad.item())


def test_dummy_has_a_gradient_of_zero() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss = token_loss(logprobs, torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([False]), cap=2.0)
    loss.total.backward()  # a dummy micro-batch must take part in backward
    assert logprobs.grad.tolist() == [0.0]


def test_no_tokens_at_all() -> None:
    nothing, mask = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.bool)
    rows = torch.zeros(0, dtype=torch.int64)
    plain = nothing.detach()
    loss = token_loss(nothing, plain, plain, mask, 2.0, proximal=plain, sequences=rows, reference=plain, shares=plain)
    assert loss.total.item() == 0.0


# -- against a reference --------------------------------------------------------------------------------------


def reference_gradient(
    t: dict[str, Any],
    *,
    cap: float,
    clip: tuple[float, float],
    by_sequence: bool,
    kl: float,
    by_row: bool,
) -> tuple[float, Any]:
    """Loss and gradient token by token, in float64, from the formulas of docs/losses.md."""
    lp = t["logprobs"].double().requires_grad_()
    terms = []
    rows = [torch.nonzero((t["sequences"] == row) & t["mask"]).flatten() for row in range(int(t["sequences"][-1]) + 1)]
    for tokens in rows:
        gap = t["proximal"].double() - t["behavior"].double()
        parts = []
        for i in tokens:
            weight = torch.exp(gap[tokens].mean()) if by_sequence else torch.exp(gap[i])
            weight = min(weight.item(), cap)
            ratio = torch.exp(lp[i] - t["proximal"][i].double())
            advantage = t["advantages"][i].double()
            clipped = min(max(ratio.item(), 1 - clip[0]), 1 + clip[1])
            free = ratio * advantage
            objective = free if free.item() <= clipped * advantage.item() else clipped * advantage
            other = torch.exp(t["reference"][i].double() - lp[i])
            parts.append(-objective * weight + kl * (other - torch.log(other) - 1))
        if parts:
            row = torch.stack(parts)
            terms.append(row.mean() if by_row else row.sum())
    total = torch.stack(terms).sum()
    total.backward()
    return total.item(), lp.grad


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_are_those_of_the_formulas(by_sequence: bool, by_row: bool, kl: float, seed: int) -> None:
    t = tensors(seed)
    tokens = torch.zeros(5).index_add(0, t["sequences"][t["mask"]], torch.ones(int(t["mask"].sum())))
    loss, gradient = loss_of(
        t,
        proximal=t["proximal"],
        clip=(0.2, 0.28),
        sequences=t["sequences"] if by_sequence else None,
        reference=t["reference"] if kl else None,
        kl_coefficient=kl,
        shares=(1 / tokens.clamp(min=1))[t["sequences"]] if by_row else None,
    )
    total, want = reference_gradient(t, cap=1.3, clip=(0.2, 0.28), by_sequence=by_sequence, kl=kl, by_row=by_row)
    assert loss.total.item() == pytest.approx(total, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient.double(), want, rtol=1e-4, atol=1e-6)
    assert loss.per_token.sum().item() == pytest.approx(total, rel=1e-5, abs=1e-6)
    assert loss.clipped.any() and not loss.clipped[~t["mask"]].any()
    apart = t["reference"].double() - t["logprobs"].double()
    k3 = torch.where(t["mask"] & (kl > 0), torch.exp(apart) - apart - 1, 0.0)
    torch.testing.assert_close(loss.kl.double(), k3, rtol=1e-4, atol=1e-6)


# -- laws -----------------------------------------------------------------------------------------------------


@given(SEEDS, st.booleans(), st.booleans(), st.floats(0, 1))
def test_with_one_optimizer_step_the_gradient_is_that_of_the_decoupled_objective_bit_for_bit(
    seed: int, by_sequence: bool, with_reference: bool, kl: float
) -> None:
    """r = 1: -A w lp, which is summed then, and -min(r A, clip(r) A) w have the same gradient."""
    t = tensors(seed)
    options = {
        "sequences": t["sequences"] if by_sequence else None,
        "reference": t["reference"] if with_reference else None,
        "kl_coefficient": kl,
    }
    one, alone = loss_of(t, **options)
    many, decoupled = loss_of(t, proximal=t["logprobs"], **options)
    assert torch.equal(alone, decoupled)
    assert torch.equal(one.weights, many.weights) and not many.clipped.any()


@given(SEEDS, st.floats(-1, 1))
def test_equal_gaps_make_the_sequence_weight_the_token_weight(seed: int, gap: float) -> None:
    t = tensors(seed)
    gaps = torch.full_like(t["logprobs"], gap)
    got = sequence_weights(gaps, t["mask"], t["sequences"])
    has_tokens = torch.isin(t["sequences"], t["sequences"][t["mask"]])
    torch.testing.assert_close(got[has_tokens], torch.exp(gaps)[has_tokens])
    assert (got[~has_tokens] == 1).all()


@given(SEEDS)
def test_sequence_weight_is_the_geometric_mean_and_one_a_row(seed: int) -> None:
    t = tensors(seed)
    gaps = t["proximal"] - t["behavior"]
    got = sequence_weights(gaps, t["mask"], t["sequences"])
    for row in t["sequences"].unique():
        mine, tokens = t["sequences"] == row, (t["sequences"] == row) & t["mask"]
        assert len(got[mine].unique()) == 1
        if tokens.any():
            product = torch.exp(gaps[tokens].double()).prod() ** (1 / int(tokens.sum()))
            assert got[mine][0].item() == pytest.approx(product.item(), rel=1e-5)


@given(SEEDS, st.integers(1, 5))
def test_rows_are_weighted_by_themselves(seed: int, cut: int) -> None:
    """A micro-batch holds whole rows: which ones stand together changes no weight and no token's loss."""
    t = tensors(seed)
    options = {"proximal": t["proximal"], "sequences": t["sequences"], "reference": t["reference"]}
    together, _ = loss_of(t, kl_coefficient=0.1, **options)
    for part in (t["sequences"] < cut, t["sequences"] >= cut):
        alone = {name: values[part] for name, values in t.items()}
        if not part.any():
            continue
        sequences = alone["sequences"] - alone["sequences"][0]
        options = {"proximal": alone["proximal"], "sequences": sequences, "reference": alone["reference"]}
        loss, _ = loss_of(alone, kl_coefficient=0.1, **options)
        assert torch.equal(loss.per_token, together.per_token[part])


@given(SEEDS)
def test_divergence_is_never_negative_and_zero_from_itself(seed: int) -> None:
    t = tensors(seed)
    loss, _ = loss_of(t, reference=t["reference"], kl_coefficient=1.0)
    assert (loss.kl >= 0).all()
    same, gradient = loss_of(t | {"advantages": torch.zeros_like(t["logprobs"])}, reference=t["logprobs"])
    assert (same.kl == 0).all() and (gradient == 0).all()


@given(SEEDS)
def test_the_cap_bounds_every_gradient(seed: int) -> None:
    t = tensors(seed)
    t["behavior"] = t["behavior"] - 5 * torch.rand(len(t["behavior"]), generator=torch.Generator().manual_seed(seed))
    for sequences in (None, t["sequences"]):
        _, gradient = loss_of(t, cap=1.5, sequences=sequences)
        assert (gradient.abs() <= 1.5 * t["advantages"].abs() * (1 + 1e-6)).all()
