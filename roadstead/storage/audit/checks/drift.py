"""Symptom: the engine's logprobs are not the trainer's, by engine, by version, by position.

Owns: the comparison of behaviour logprobs with the trainer's recomputed ones (gap = behaviour - trainer, nats).
Tokens of older versions differ for a good reason, the policy moved; so gaps are compared between rows of equal lag,
and versions only on tokens of lag 0, where both sides claim the same weights. An engine that is blamed is left out of
the later comparisons, which would only see it again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from roadstead.storage.audit.checks.base import SURE_Z, first_lasting, median_error, separation, spread, windows
from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding

_ENGINE_GAP = 0.005
"""Nats, mean over a row's tokens. Kernels of two engines at the same weights agree to about 0.001 in the mean (single
tokens scatter by 0.01 in bfloat16, either way); reports of real faults begin at 0.01 (notes: 0.01 -> 0.20)."""
_WHOLE_GAP = 0.01
"""Nats, the same between all engines and the trainer at the same weights: bfloat16 against float32 biases it more."""
_VERSION_GAP, _VERSION_TIMES = 0.01, 3.0
"""Nats and multiples of the median version's mean absolute gap: a version that was not really loaded."""
_POSITION_GAP = 0.02
"""Nats between one stretch of positions and the others."""
_LEAST_ROWS = 8
_LEAST_WINDOW = 4


class Drift:
    name = "logprob-drift"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        spans = evidence.spans
        # What no engine of the run sampled has another policy's logprobs, and says nothing about an engine.
        spans = spans[spans["row"].isin(rows.index[rows["from_live_policy"]])] if len(rows) else spans
        if spans.empty:
            return
        rows = rows.assign(excess=_excess(spans))
        rows = rows[rows["excess"].notna()]
        lowest = spans["lag"].min()
        at_lowest = spans[spans["lag"] == lowest].set_index("row")["gap"]
        rows = rows.assign(level=at_lowest.groupby(level=0).mean())
        blamed: set[str] = set()
        for finding in self._engines(evidence, rows):
            blamed |= set(finding.engines)
            yield finding
        rest = rows[~rows["engine_id"].isin(blamed)]
        yield from self._everywhere(evidence, rest, int(lowest))
        yield from self._versions(evidence, rest)
        yield from self._positions(evidence, rest)

    def _engines(self, evidence: Evidence, rows: pd.DataFrame) -> Iterator[Finding]:
        engines = sorted(set(rows["engine_id"]))
        found: dict[str, tuple[float, float, tuple[int, int]]] = {}
        for engine in engines if len(engines) > 1 else ():
            mine = rows["engine_id"] == engine
            for first, end in windows(rows["step"].to_numpy(), _LEAST_WINDOW):
                inside = (rows["step"] >= first) & (rows["step"] < end)
                one, other = rows[mine & inside]["excess"].to_numpy(), rows[~mine & inside]["excess"].to_numpy()
                if min(len(one), len(other)) < _LEAST_ROWS:
                    continue
                gap, z = separation(one, other)
                if abs(gap) >= _ENGINE_GAP and z >= SURE_Z and z > found.get(engine, (0.0, 0.0, (0, 0)))[1]:
                    found[engine] = (gap, z, (first, end))
        if not found:
            return
        # With two engines both stand apart from each other: the trainer decides which one is off.
        levels = {e: abs(float(np.nanmedian(rows[rows["engine_id"] == e]["level"]))) for e in engines}
        levels = {e: 0.0 if np.isnan(v) else v for e, v in levels.items()}
        ranked = sorted(found, key=lambda e: -levels[e] if len(engines) == 2 else -abs(found[e][0]))
        engine = ranked[0]
        gap, z, (first, end) = found[engine]
        others = [levels[e] for e in engines if e != engine]
        clear = len(engines) > 2 or levels[engine] >= 3 * max(others)
        mine = rows["engine_id"] == engine
        by_step = rows[mine].groupby("step")["excess"].median() - rows[~mine].groupby("step")["excess"].median()
        begin = first_lasting((by_step * np.sign(gap)).dropna(), abs(gap) / 2)
        affected = rows[mine & (rows["step"] >= (first if begin is None else begin))]
        yield evidence.finding(
            self.name,
            "warning",
            0.95 if clear else 0.6,
            f"engine {engine} reports logprobs {gap:+.4f} nats from what the other engine(s) do",
            f"median over the rows of steps {first} to {end - 1} against rows of equal lag from the other engine(s), "
            f"{z:.0f} standard errors; against the trainer at the least lag it is "
            f"off by {levels[engine]:.4f}, the other(s) by {max(others):.4f}"
            + ("" if clear else "; which of the two is off is not clear"),
            affected.sort_values("gap_abs", ascending=False),
            first_step=begin,
        )

    def _everywhere(self, evidence: Evidence, rows: pd.DataFrame, lag: int) -> Iterator[Finding]:
        level = rows["level"].dropna().to_numpy()
        if lag != 0 or len(level) < 2 * _LEAST_ROWS:
            return
        gap, error = float(np.median(level)), median_error(level)
        if abs(gap) >= _WHOLE_GAP and abs(gap) >= SURE_Z * error:
            yield evidence.finding(
                self.name,
                "warning",
                0.85,
                f"engine and trainer disagree by {gap:+.4f} nats a token at the same weights",
                f"median over {len(level)} rows, tokens sampled by the very version that was trained; every engine "
                "alike. Temperature, top-p or top-k applied on one side only, another dtype, or another tokenization",
                rows[rows["level"].notna()].sort_values("gap_abs", ascending=False).head(64),
                first_step=int(rows["step"].min()),
            )

    def _versions(self, evidence: Evidence, rows: pd.DataFrame) -> Iterator[Finding]:
        spans = evidence.spans
        spans = spans[(spans["lag"] == 0) & spans["row"].isin(rows.index)]
        if spans.empty:
            return
        weighted = (spans["gap_abs"] * spans["tokens"]).groupby(spans["version"]).sum()
        tokens = spans.groupby("version")["tokens"].sum()
        mean = (weighted / tokens)[tokens >= 100]
        if len(mean) < 5:
            return
        middle, sd = float(mean.median()), spread(mean.to_numpy())
        for version in mean.index:
            value = float(mean[version])
            if value - middle >= _VERSION_GAP and value >= _VERSION_TIMES * middle and value - middle >= SURE_Z * sd:
                mine = spans[spans["version"] == version]
                found = rows.loc[mine.sort_values("gap_abs", ascending=False)["row"].unique()]
                yield evidence.finding(
                    self.name,
                    "warning",
                    0.85,
                    f"tokens labelled version {version} were not sampled by its weights",
                    f"mean absolute gap to the trainer {value:.4f} nats over {int(tokens[version])} tokens of the "
                    f"same version, {middle:.4f} for the median version: an engine took the label and not the weights, "
                    "or kept stale KV",
                    found,
                )

    def _positions(self, evidence: Evidence, rows: pd.DataFrame) -> Iterator[Finding]:
        places = evidence.positions
        places = places[places["row"].isin(rows.index)]
        if places.empty:
            return
        total, count = places.groupby("row")["tokens"].sum(), places.groupby("row").size()
        weighted = (places["gap"] * places["tokens"]).groupby(places["row"]).sum()
        for bucket in sorted({int(b) for b in places["bucket"]}):
            own = places[places["bucket"] == bucket]
            own = own[own["row"].map(count) > 1].set_index("row")
            # Fewer than 4 tokens of a row say nothing about its stretch.
            own = own[own["tokens"] >= 4]
            if len(own) < 2 * _LEAST_ROWS:
                continue
            others = (weighted[own.index] - own["gap"] * own["tokens"]) / (total[own.index] - own["tokens"])
            paired = (own["gap"] - others).to_numpy()
            gap, error = float(np.median(paired)), median_error(paired)
            if abs(gap) >= _POSITION_GAP and abs(gap) >= SURE_Z * error:
                low, high = 2**bucket - 1, 2 ** (bucket + 1) - 2
                yield evidence.finding(
                    self.name,
                    "warning",
                    0.75,
                    f"logprobs of response tokens {low} to {high} are {gap:+.4f} nats off the same rows' other tokens",
                    f"median over {len(own)} rows: positions, chunked prefill or the KV cache are handled "
                    "differently by engine and trainer there",
                    rows.loc[own.index].sort_values("gap_abs", ascending=False).head(64),
                )


def _excess(spans: pd.DataFrame) -> pd.Series:
    """Each row's mean gap less the median gap of its lag, weighted by tokens."""
    usual = spans.groupby("lag")["gap"].median()
    above = (spans["gap"] - spans["lag"].map(usual)) * spans["tokens"]
    total: pd.Series = above.groupby(spans["row"]).sum() / spans.groupby("row")["tokens"].sum()
    return total
