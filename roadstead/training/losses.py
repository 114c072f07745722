"""The token loss: GRPO's gradient with truncated importance sampling.

Owns: log-probabilities of chosen tokens and the loss over them. Never touches: the engine, the batch's columns.
Invariant: tokens outside the mask give no gradient, whatever their values are (NaN included).
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class TokenLoss(NamedTuple):
    """`total` carries the gradient; the others are detached. T response tokens, all float32."""

    total: Any
    """Scalar: sum of the masked tokens' losses, not normalised."""
    importance: Any
    """[T] exp(trainer - behaviour), before truncation."""
    per_token: Any
    """[T] each token's loss; zero outside the mask."""


def chosen_logprobs(logits: Any, rows: Any, positions: Any, targets: Any, temperatures: Any) -> Any:
    """Log-probabilities of T chosen tokens under the sampling temperature, [T] float32, nats.

    logits: [rows, length, vocabulary], any float type; rows, positions: [T] int64, where the logits that predict
    a token stand; targets: [T] int64 token ids; temperatures: [T] float32.
    The engine reports behaviour log-probabilities after temperature, so the trainer's must be divided alike.
    """
    chosen = logits[rows, positions].float() / temperatures[:, None]
    return chosen.gather(-1, targets[:, None]).squeeze(-1) - torch.logsumexp(chosen, dim=-1)


def token_loss(logprobs: Any, behavior: Any, advantages: Any, mask: Any, cap: float) -> TokenLoss:
    """Sum over masked tokens of  -A * min(exp(sg[lp] - lp_behaviour), cap) * lp.

    logprobs: [T] float32 with gradient; behavior, advantages: [T] float32; mask: [T] bool; sg: stop gradient.
    Divide `total` by the number of loss tokens of the whole batch to get the token mean.

    A batch gets one optimizer step, so PPO's ratio to the step's own start is 1 and its clip never acts: the
    gradient of GRPO's objective (DeepSeekMath, arXiv 2402.03300, equation 3 without the KL term) is A * grad lp.
    The weight corrects for tokens sampled from older weights or other kernels; truncating it bounds the variance
    at the price of a bias (truncated importance sampling: Ionides 2008, J. Comp. Graph. Stat. 17(2); between an
    inference engine and a trainer: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training").
    """
    importance = torch.exp(logprobs.detach() - behavior)
    # Selecting, not multiplying by the mask: 0 * NaN is NaN.
    each = -advantages[mask] * importance[mask].clamp(max=cap) * logprobs[mask]
    per_token = torch.zeros_like(behavior)
    per_token[mask] = each.detach()
    return TokenLoss(each.sum(), importance, per_token)
