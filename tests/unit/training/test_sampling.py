"""What sampling does to an importance weight, on a vocabulary that can be written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from roadstead.training.losses import chosen_logprobs, scaled_logits, token_loss  # noqa: E402
from roadstead.training.protocol import TrainerBadBatch  # noqa: E402
from tests.unit.training.bigrams import batch_of, rows_of  # noqa: E402

LOGITS = np.log([0.5, 0.3, 0.15, 0.05])
"""Of the next token, at temperature 1."""


def distribution(temperature: float, top_p: float = 1.0) -> np.ndarray:
    """What an engine samples from, and reports the logs of: after temperature, then top-p, renormalised."""
    p: np.ndarray = np.exp(LOGITS / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    # A token is kept while the ones before it hold less than top_p.
    kept = order[np.concatenate([[0.0], np.cumsum(p[order])[:-1]]) < top_p - 1e-12]
    cut = np.zeros_like(p)
    cut[kept] = p[kept] / p[kept].sum()
    return cut


def weights(token_probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """The importance weight of each token that can be sampled, with the trainer holding the engine's own weights."""
    tokens = np.flatnonzero(token_probabilities)
    n = len(tokens)
    logits = torch.tensor(LOGITS, dtype=torch.float32).repeat(1, n, 1)
    scaled = scaled_logits(logits, torch.zeros(n, dtype=int), torch.arange(n), torch.full((n,), temperature))
    logprobs = chosen_logprobs(scaled, torch.from_numpy(tokens))
    behavior = torch.from_numpy(np.log(token_probabilities[tokens])).float()
    ones = torch.ones(n)
    return np.asarray(token_loss(logprobs, behavior, ones, ones.bool(), 2.0).importance)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_a_temperature_is_corrected_exactly(temperature: float) -> None:
    np.testing.assert_allclose(weights(distribution(temperature), temperature), 1.0, rtol=1e-6)


def test_top_p_biases_every_weight_by_the_mass_that_was_kept() -> None:
    """TRL #6789, verl #6240: the same weights on both sides, and still no weight is 1."""
    behavior = distribution(1.0, top_p=0.9)
    kept = 0.5 + 0.3 + 0.15
    got = weights(behavior, 1.0)
    assert len(got) == 3, "the rarest token is cut off"
    np.testing.assert_allclose(np.log(got), math.log(kept), rtol=1e-5)
    rows = rows_of([[1.0]], temperature=1.0)
    rows[0]["sampling"] |= {"top_p": 0.9}
    with pytest.raises(TrainerBadBatch, match=r"sampling\.top_p is 0\.9, which biases"):
        batch_of(rows)


def test_the_bias_is_not_the_same_everywhere() -> None:
    """So no constant corrects it: what is kept hangs on the distribution of each token."""
    kept = [float(np.exp(LOGITS / t)[distribution(t, 0.9) > 0].sum() / np.exp(LOGITS / t).sum()) for t in (0.5, 1.0)]
    assert kept[0] != pytest.approx(kept[1], abs=0.01)
    for temperature, mass in zip((0.5, 1.0), kept, strict=True):
        np.testing.assert_allclose(weights(distribution(temperature, 0.9), temperature), mass, rtol=1e-5)
