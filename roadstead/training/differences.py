"""How far two sets of weights lie apart.

Owns: the arithmetic over exported directories. Never touches: the engine, the store.
Invariant: sums are in float64, one tensor at a time in memory.
A crash leaves: nothing, it only reads.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from roadstead.training.replay import UpdateDifference


def compare_updates(base: Path, first: Path, second: Path) -> UpdateDifference:
    """The updates base -> first and base -> second: Hugging Face directories with the same tensors.

    Raises ValueError when their tensors differ in name.
    """
    files = [_files(folder) for folder in (base, first, second)]
    if not files[0].keys() == files[1].keys() == files[2].keys():
        odd = min((files[0].keys() ^ files[1].keys()) | (files[0].keys() ^ files[2].keys()))
        raise ValueError(f"{base}, {first} and {second} hold different tensors, for example {odd!r}")
    first_square = second_square = product = square = largest = 0.0
    for name in sorted(files[0]):
        start, one, two = (_tensor(places[name], name) for places in files)
        one_moved, two_moved, apart = one - start, two - start, two - one
        first_square += float(one_moved.square().sum())
        second_square += float(two_moved.square().sum())
        product += float((one_moved * two_moved).sum())
        square += float(apart.square().sum())
        largest = max(largest, float(apart.abs().max()) if apart.numel() else 0.0)
    norms = math.sqrt(first_square) * math.sqrt(second_square)
    return UpdateDifference(
        first_norm=math.sqrt(first_square),
        second_norm=math.sqrt(second_square),
        cosine=product / norms if norms else None,
        difference_norm=math.sqrt(square),
        largest_difference=largest,
    )


def _files(folder: Path) -> dict[str, Path]:
    """Tensor name to the file that holds it."""
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    return places


def _tensor(path: Path, name: str) -> Any:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name).to(torch.float64)
