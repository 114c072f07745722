"""Durations as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(option: str, text: str) -> float:
    """`60s`, `2m`, `1.5h` or a bare number of seconds. Raises ValueError that names the option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{option}: {text!r} is not a duration above zero; write it like 45s, 2m or 1h")
    return float(found[1]) * _UNITS[found[2]]
