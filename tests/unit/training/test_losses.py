"""The token loss against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from roadstead.training.losses import chosen_logprobs, token_loss  # noqa: E402


def test_chosen_logprobs_divides_by_the_temperature() -> None:
    logits = torch.tensor([[[0.0, 2.0], [4.0, 0.0]]])
    got = chosen_logprobs(
        logits,
        torch.tensor([0, 0]),
        torch.tensor([0, 1]),
        torch.tensor([1, 1]),
        torch.tensor([2.0, 1.0]),
    )
    # softmax([0, 1])[1] and softmax([4, 0])[1]
    want = [-math.log(1 + math.exp(-1)), -math.log(1 + math.exp(4))]
    assert got.tolist() == pytest.approx(want, rel=1e-6)


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
    loss.total.backward()
    # d/dlp = -A * min(w, cap): the weight itself is not differentiated.
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 2.0, -low, 0.0], rel=1e-6)


def test_masked_nan_gives_neither_loss_nor_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    nan = math.nan
    loss = token_loss(
        logprobs, torch.tensor([-1.0, nan]), torch.tensor([1.0, nan]), torch.tensor([True, False]), cap=2.0
    )
    loss.total.backward()
    assert loss.total.item() == 1.0
    assert logprobs.grad.tolist() == [-1.0, 0.0]


def test_dummy_has_a_gradient_of_zero() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss = token_loss(logprobs, torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([False]), cap=2.0)
    loss.total.backward()  # a dummy micro-batch must take part in backward
    assert logprobs.grad.tolist() == [0.0]
