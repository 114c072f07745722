"""The token loss: GRPO's gradient in the decoupled objective, with truncated importance weights.

Owns: log-probabilities of chosen tokens, their entropy, the loss over them. Never touches: the engine, the batch's
columns, the sum over micro-batches.
Invariant: tokens outside the mask give no gradient, whatever their values are (NaN included). With its defaults
`token_loss` is the same function, bit for bit, for as long as results are replayed.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_CHUNK = 256
"""Tokens whose distribution is held at once for the entropy: three tensors of 156 MB at a vocabulary of 152,000."""


class TokenLoss(NamedTuple):
    """`total` carries the gradient; the others are detached. T response tokens, all float32 but `clipped`."""

    total: Any
    """Scalar: sum of the masked tokens' losses, not normalised."""
    importance: Any
    """[T] exp(proximal - behaviour), before truncation."""
    weights: Any
    """[T] what the loss truncated and used: `importance`, or its geometric mean over the trajectory."""
    per_token: Any
    """[T] each token's part of `total`; zero outside the mask."""
    clipped: Any
    """[T] bool: the clip of the ratio acted, the token gave no policy gradient."""
    kl: Any
    """[T] estimate of the KL divergence to the reference, nats; zero outside the mask and without a reference."""


def scaled_logits(logits: Any, rows: Any, positions: Any, temperatures: Any) -> Any:
    """Logits that predict T chosen tokens, after the sampling temperature, [T, vocabulary] float32.

    logits: [rows, length, vocabulary], any float type; rows, positions: [T] int64, where the logits that predict
    a token stand; temperatures: [T] float32.
    The engine reports behaviour log-probabilities after temperature, so the trainer's must be divided alike.
    """
    return logits[rows, positions].float() / temperatures[:, None]


def chosen_logprobs(scaled: Any, targets: Any) -> Any:
    """Log-probabilities of T chosen tokens, [T] float32, nats. scaled: [T, vocabulary]; targets: [T] int64 ids."""
    return scaled.gather(-1, targets[:, None]).squeeze(-1) - torch.logsumexp(scaled, dim=-1)


def entropies(scaled: Any) -> Any:
    """Entropy of T distributions, [T] float32, nats, without gradient. scaled: [T, vocabulary]."""
    parts = scaled.detach().split(_CHUNK)
    return torch.cat([torch.special.entr(torch.softmax(part, dim=-1)).sum(-1) for part in parts])


def sequence_weights(gaps: Any, mask: Any, rows: Any) -> Any:
    """exp of each row's mean over its masked tokens, for every token of the row, [T] float32; 1 without any.

    gaps: [T] float32, proximal minus behaviour log-probability; mask: [T] bool; rows: [T] int64, ascending.
    The geometric mean of the token weights, whose variance does not grow with the length: the sequence ratio of GSPO
    (arXiv 2507.18071), here between the proximal policy and the behaviour's.
    """
    count = int(rows[-1]) + 1 if len(rows) else 0
    # In float64: a long trajectory's sum would lose the digits that its mean needs.
    sums = torch.zeros(count, dtype=torch.float64, device=gaps.device).index_add(0, rows[mask], gaps[mask].double())
    tokens = torch.zeros_like(sums).index_add(0, rows[mask], torch.ones_like(gaps[mask], dtype=torch.float64))
    return torch.exp(sums / tokens.clamp(min=1.0)).float()[rows]


def token_loss(
    logprobs: Any,
    behavior: Any,
    advantages: Any,
    mask: Any,
    cap: float,
    *,
    proximal: Any = None,
    clip: tuple[float, float] = (0.2, 0.2),
    sequences: Any = None,
    reference: Any = None,
    kl_coefficient: float = 0.0,
    shares: Any = None,
) -> TokenLoss:
    """Sum over masked tokens of  -min(r A, clip(r, 1 - low, 1 + high) A) * w  +  kl_coefficient * KL.

    r = exp(lp - proximal), w = min(exp(proximal - behaviour), cap). The decoupled objective (Hilton et al. 2021,
    "Batch size-invariance for policy optimization", arXiv 2110.00641; AReaL, arXiv 2505.24298): the clip holds the
    policy near the one that the step began with, the weight, which has no gradient, corrects for tokens sampled from
    older weights or by other kernels. Truncating it bounds the variance at the price of a bias (truncated importance
    sampling: Ionides 2008, J. Comp. Graph. Stat. 17(2); between an inference engine and a trainer: Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training").

    Without `proximal` the batch gets one optimizer step: r is 1, its clip never acts, and what is summed is
    -A * min(exp(sg[lp] - behaviour), cap) * lp  (sg: stop gradient). Its value is another, its gradient is exactly
    that of the objective above at r = 1: A times grad lp, weighted.

    logprobs: [T] float32 with gradient; behavior, advantages: [T] float32; mask: [T] bool.
    proximal: [T] float32, log-probabilities under the weights at the start of the step.
    clip: (low, high); high above low is clip-higher (DAPO, arXiv 2503.14476).
    sequences: [T] int64, the row of each token, ascending: one weight a trajectory, see `sequence_weights`.
    reference: [T] float32, log-probabilities under the reference policy. KL is exp(d) - d - 1 with d = reference - lp
    (k3 of Schulman 2020, "Approximating KL divergence"; GRPO, arXiv 2402.03300, equation 4): never negative.
    shares: [T] float32, factor of each token's loss; without: 1.
    Divide `total` by the number of loss tokens of the whole mini-batch to get the token mean; or pass 1 / (loss tokens
    of the row) as `shares` and divide by the number of rows with any, for the mean over trajectories.
    """
    start = logprobs.detach() if proximal is None else proximal
    importance = torch.exp(start - behavior)
    weights = importance if sequences is None else sequence_weights(start - behavior, mask, sequences)
    # Selecting, not multiplying by the mask: 0 * NaN is NaN.
    chosen, a, w = logprobs[mask], advantages[mask], weights[mask].clamp(max=cap)
    clipped = torch.zeros_like(mask)
    kl = torch.zeros_like(behavior)
    if proximal is None:
        each = -a * w * chosen
    else:
        ratio = torch.exp(chosen - proximal[mask])
        free, bounded = ratio * a, ratio.clamp(1.0 - clip[0], 1.0 + clip[1]) * a
        each = -torch.minimum(free, bounded) * w
        clipped[mask] = (bounded < free).detach()
    if reference is not None:
        apart = reference[mask] - chosen
        divergence = torch.expm1(apart) - apart
        each = each + kl_coefficient * divergence
        kl[mask] = divergence.detach()
    if shares is not None:
        each = each * shares[mask]
    per_token = torch.zeros_like(behavior)
    per_token[mask] = each.detach()
    return TokenLoss(each.sum(), importance, weights, per_token, clipped, kl)
