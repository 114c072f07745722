"""What generating and training cost, in seconds, as formulas with few numbers.

Owns: the formulas, and one preset built from datasheets. Never touches: who runs when.
Invariant: every cost is a pure function; the time of m decode steps is the sum of the m single steps, in closed form.

A decode step of k sequences with c tokens of context in all takes
    overhead + max(weights, k * per_sequence) + c * per_context
(the weights are read once or the matrix units are busy, whichever is longer; the KV cache is read beside it), and every
step adds k tokens of context. So m steps take a quadratic in m.

The preset is NOT calibrated on any machine. It says what the datasheets say, times shares that are guesses. Replace it
by what you measured: `load_costs` reads the same fields from JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

# Qwen3-8B, from its published config.json and model card: 8.2 B parameters in BF16, 36 layers, 32 query heads and
# 8 KV heads of 128.
_PARAMETERS = 8.2e9
_LAYERS = 36
_QUERY_WIDTH = 32 * 128
_KV_BYTES = 2 * _LAYERS * 8 * 128 * 2
_WEIGHT_BYTES = 2 * _PARAMETERS

# NVIDIA H20, from its datasheet: 148 TFLOPS dense BF16, 4.0 TB/s HBM3.
_FLOPS = 148e12
_BYTES = 4.0e12

# Guesses, not measurements: what is usually left of the datasheet.
_BYTES_SHARE = 0.6
_FLOPS_SHARE = 0.5
_TRAIN_SHARE = 0.35
"""MFU of training, pipeline bubbles included."""

_FORWARDS = 4
"""Forward passes' worth of work a trained token: old logprobs 1, forward 1, backward 2."""


@dataclass(frozen=True)
class Costs:
    """All in seconds."""

    overhead: float
    """A decode step, whatever is in it: scheduling, kernel launches, sampling."""
    weights: float
    """Reading the weights once; the floor of a step's matrix work."""
    per_sequence: float
    """Matrix work of a decode step, a sequence."""
    per_context: float
    """A decode step, a token of context of any running sequence: reading its KV."""
    prefill: float
    """A prompt token. Shared prefixes are not shared here: each response pays for its prompt."""
    train: float
    """A trained token (prompt and response), on the whole trainer."""
    train_square: float
    """A squared trajectory length: attention in training."""
    train_fixed: float
    """A training step, whatever is in it."""
    publish: float
    """From the end of training until the new version is public. The trainer waits for it."""
    load: float
    """An engine stands still this long to load a version."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name}: {value!r} is no cost; give seconds, 0 or more")
        if self.overhead + max(self.weights, self.per_sequence) <= 0:
            raise ValueError("overhead: 0, and weights and per_sequence too: a decode step must take time; give one")

    def base(self, running: int) -> float:
        """A decode step of `running` sequences, the reading of their context aside."""
        return self.overhead + max(self.weights, running * self.per_sequence)

    def decode(self, steps: int, running: int, context: int) -> float:
        """Seconds of `steps` decode steps of `running` sequences that begin with `context` tokens in all."""
        grown = running * (steps * (steps - 1) // 2)
        return steps * self.base(running) + (steps * context + grown) * self.per_context

    def whole_steps(self, seconds: float, running: int, context: int) -> int:
        """How many whole decode steps fit into `seconds`: the inverse of `decode`."""
        step = self.base(running) + context * self.per_context
        growth = running * self.per_context
        if growth:
            linear = step - growth / 2
            steps = int((math.sqrt(linear * linear + 2 * growth * seconds) - linear) / growth)
        else:
            steps = int(seconds / step)
        # The root is exact up to rounding: at most one step off.
        while steps > 0 and self.decode(steps, running, context) > seconds:
            steps -= 1
        while self.decode(steps + 1, running, context) <= seconds:
            steps += 1
        return steps

    def training(self, lengths: Iterable[int]) -> float:
        """Seconds of one step on trajectories of these lengths (prompt and response, tokens)."""
        tokens = squares = 0
        for length in lengths:
            tokens += length
            squares += length * length
        return self.train_fixed + tokens * self.train + squares * self.train_square


def h20_qwen3_8b(trainer_gpus: int = 6) -> Costs:
    """Qwen3-8B in BF16, one H20 an engine (TP 1), `trainer_gpus` H20 for training. Datasheets, not calibrated."""
    trainer_flops = trainer_gpus * _FLOPS * _TRAIN_SHARE
    return Costs(
        overhead=0.003,
        weights=_WEIGHT_BYTES / (_BYTES * _BYTES_SHARE),
        per_sequence=2 * _PARAMETERS / (_FLOPS * _FLOPS_SHARE),
        per_context=_KV_BYTES / (_BYTES * _BYTES_SHARE),
        prefill=2 * _PARAMETERS / (_FLOPS * _FLOPS_SHARE),
        train=_FORWARDS * 2 * _PARAMETERS / trainer_flops,
        # Causal attention: 2 products of 2 FLOPs each over l^2 / 2 pairs.
        train_square=_FORWARDS * 2 * _LAYERS * _QUERY_WIDTH / trainer_flops,
        train_fixed=5.0,
        publish=5.0,
        load=2.0,
    )


def load_costs(path: Path, base: Costs) -> Costs:
    """`base` with the fields that the JSON object in `path` names. Raises ValueError naming the key and the remedy."""
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"costs: {path} can't be read as JSON ({error}); give an object of seconds by name") from error
    known = [field.name for field in fields(Costs)]
    if not isinstance(given, dict) or set(given) - set(known):
        wrong = sorted(set(given) - set(known)) if isinstance(given, dict) else given
        raise ValueError(f"costs: {wrong!r} in {path} is unknown; use {', '.join(known)}")
    return replace(base, **given)
