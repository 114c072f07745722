# ruff: noqa: RUF001 - minus, dash and times signs are what the page shows
"""The page itself: what stands where, in words and tables.

Owns: the view that the template shows. Never touches: the store, arithmetic.
Invariant: every text passes the template's escaping, and the page's own policy (a hash of its one script, nothing
else, no request) holds even if a text did not.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from datetime import datetime
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from roadstead.dashboards.report.charts import number, short
from roadstead.dashboards.report.data import RunData
from roadstead.dashboards.report.figures import axis_of, figures
from roadstead.dashboards.report.numbers import WINDOW, Numbers, median
from roadstead.storage.audit import Finding

MOST_STEPS = 10_000
"""Rows of the step table, 120 bytes each; a longer run has a row for each bin."""
_MOST_FINDINGS, _MOST_ROWS = 50, 12
_MOST_NOTES = 40


def render(run: RunData, numbers: Numbers) -> str:
    """The page as HTML: no request leaves it."""
    assets = {
        name: files(__package__).joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    }
    environment = Environment(
        loader=DictLoader(assets), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    sections = figures(run, numbers)
    script = assets["page.js"].strip()
    page = environment.get_template("page.html").render(
        css=Markup(assets["page.css"]),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        run=run,
        numbers=numbers,
        total=numbers.total,
        state=_state(run, numbers),
        header=_header(run),
        tiles=_tiles(run, numbers),
        signals=_signals(numbers),
        sections=sections,
        waste=_waste(numbers),
        findings=[_finding(run, finding) for finding in _findings(run)[:_MOST_FINDINGS]],
        findings_left=max(0, len(_findings(run)) - _MOST_FINDINGS),
        attempts=_attempts(run),
        faults=_faults(run, numbers),
        notes=list(dict.fromkeys(run.notes))[:_MOST_NOTES],
        steps=_steps(run, numbers),
        name=shlex.quote(run.keys.run_id),
        data={
            "width": numbers.width,
            "bins": numbers.bins,
            "charts": {chart.id: chart.data for charts in sections.values() for chart in charts},
        },
    )
    return page


# -- the top ------------------------------------------------------------------------------------------


def _state(run: RunData, numbers: Numbers) -> tuple[str, str]:
    """(word, colour class)."""
    last = run.attempts[-1] if run.attempts else None
    end = run.ends.get(last.attempt) if last else None
    if end is not None:
        return end.how, {"finished": "good", "failed": "bad"}.get(end.how, "warn")
    target = run.config.get("training", {}).get("steps")
    if target is not None and numbers.total["recorded"] >= target:
        return "finished", "good"
    return ("no end on record", "warn") if last else ("never began", "warn")


def _header(run: RunData) -> list[tuple[str, str]]:
    config = run.config
    staleness, rollout = config.get("staleness", {}), config.get("rollout", {})
    versions = next((a.versions for a in reversed(run.attempts) if a.versions), run.run.versions)
    size = f"{_text(staleness, 'groups_per_batch')} groups × {_text(rollout, 'group_size')}"
    return [
        ("model", f"{_text(config.get('model', {}), 'path')} ({run.run.model_digest[:12]})"),
        ("dataset", f"{run.run.dataset_rows:,} prompts ({run.run.dataset_digest[:12]})"),
        ("bound S", _text(staleness, "max_staleness")),
        ("batch B", size),
        ("target", f"{_text(config.get('training', {}), 'steps')} steps"),
        ("begun", _time(run.run.created_at)),
        ("data", run.location),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) or "–"),
    ]


def _tiles(run: RunData, numbers: Numbers) -> list[dict[str, str]]:
    total = numbers.total
    target = run.config.get("training", {}).get("steps")
    bound = numbers.bounds[-1] if numbers.bounds else None
    oldest = total.get("age_max")
    untrained = sum(count for state, count in numbers.ended.items() if state != "trained")
    audited = run.audit.findings if run.audit else ()
    worst = "bad" if any(f.severity == "critical" for f in audited) else "warn" if audited else "good"
    over = oldest is not None and bound is not None and oldest > max(b for b in numbers.bounds if b is not None)
    return [
        {"label": "steps", "value": number(total["recorded"]), "sub": f"of {number(target)}" if target else ""},
        {
            "label": f"reward, last {WINDOW} steps",
            "value": short(total["reward_last"]),
            "sub": f"from {short(total['reward_first'])} in the first {WINDOW}",
        },
        {
            "label": "oldest trained row",
            "value": number(oldest),
            "sub": f"bound S = {number(bound)}, 99th percentile {number(total.get('age_p99'))}",
            "state": "bad" if over else "",
        },
        {
            "label": "tokens a second",
            "value": short(total.get("tokens_per_s")),
            "sub": f"{short(total.get('seconds_per_step'))} s a step (median)",
        },
        {"label": "trained rows", "value": number(total["rows"]), "sub": f"{number(total['tokens'])} tokens"},
        {
            "label": "groups not trained",
            "value": number(untrained),
            "sub": f"{number(total['admitted'])} admitted, {number(numbers.ended.get('trained', 0))} trained",
        },
        {
            "label": "audit findings",
            "value": number(len(audited)) if run.audit else "–",
            "sub": "not audited" if not run.audit else f"{len(run.audit.checks)} checks",
            "state": worst if run.audit else "",
        },
        {"label": "attempts", "value": number(len(run.attempts)), "sub": f"{number(total['skipped'])} updates skipped"},
    ]


def _signals(numbers: Numbers) -> list[dict[str, str]]:
    """The six production signals, as far as S3 knows them."""
    s, total = numbers.series, numbers.total
    batch, capacity = short(numbers.groups_per_batch), short(numbers.capacity)
    held = [
        None if o is None or r is None else o + r
        for o, r in zip(s.get("occupied", []), s.get("reserved", []), strict=True)
    ]
    bound = numbers.bounds[-1] if numbers.bounds else None
    return [
        {
            "name": "Finished groups that wait (out-queue depth)",
            "seen": f"{short(median(s.get('occupied', [])))} in later buffers when a batch is taken (median)",
            "healthy": "not empty, steady; 0: generation is the bottleneck, growing: the trainer is",
        },
        {
            "name": "Admissions a step",
            "seen": f"{short(median(s.get('admitted', [])))} (median), {short(median(held))} under way after a take",
            "healthy": f"near B = {batch}, under way never above (S + 1) × B = {capacity}",
        },
        {
            "name": "Age of the oldest loss token",
            "seen": f"max {short(total.get('age_max'))}, 99th percentile {short(total.get('age_p99'))}, "
            f"mean {short(total.get('age_mean'))}",
            "healthy": f"never above S = {short(bound)}",
        },
        {
            "name": "Weight watcher, poll to reload",
            "seen": "not in S3: a live metric",
            "healthy": "well under a step",
        },
        {
            "name": "Trainable share",
            "seen": f"{short(median(s.get('trainable', [])))} (median), "
            f"{short(median(s.get('trainable', [])[-WINDOW:]))} at the end",
            "healthy": "steady; towards 0: a broken environment or reward, or all solved",
        },
        {
            "name": "Batch ready to weights in use",
            "seen": f"{short(total.get('turnaround_s'))} s (median), persist, train and publish included; a group "
            f"waits {short(median(s.get('waiting_s', [])))} s for its batch",
            "healthy": "small and steady; growing: generation runs ahead of what the bound permits",
        },
    ]


# -- tables -------------------------------------------------------------------------------------------


def _waste(numbers: Numbers) -> list[tuple[str, str, str, str]]:
    """(state, groups that ended so, staged of them, tokens of the staged)."""
    trained = numbers.total["tokens"]
    rows = [("trained", number(numbers.ended.get("trained", 0)), "–", f"{number(trained)} trained")]
    for state in sorted({*numbers.ended, *numbers.untrained} - {"trained"}):
        staged, tokens = numbers.untrained.get(state, (0, 0))
        share = f" ({tokens / (trained + tokens):.1%} of all)" if trained + tokens else ""
        ended = number(numbers.ended[state]) if state in numbers.ended else "–"
        rows.append((state, ended, number(staged), f"{number(tokens)}{share}" if staged else "–"))
    return rows


def _findings(run: RunData) -> tuple[Finding, ...]:
    return run.audit.findings if run.audit else ()


def _finding(run: RunData, finding: Finding) -> dict[str, Any]:
    labels = (
        ("engine", finding.engines),
        ("environment", finding.environments),
        ("template", finding.templates),
        ("prompt", finding.prompts),
        ("group", finding.groups),
    )
    return {
        "finding": finding,
        "sure": f"{finding.confidence:.0%}",
        "first": "–" if finding.first_step is None else str(finding.first_step),
        "labels": [(label, ", ".join(names)) for label, names in labels if 0 < len(names) <= _MOST_ROWS],
        "rows": finding.rows[:_MOST_ROWS],
        "rows_left": max(0, len(finding.rows) - _MOST_ROWS),
        "command": None if finding.first_step is None else _show(run, finding.first_step),
    }


def _attempts(run: RunData) -> list[dict[str, str]]:
    rows = []
    before = run.run.config
    for attempt in run.attempts:
        end = run.ends.get(attempt.attempt)
        killed = attempt is not run.attempts[-1]
        how = end.how if end else "killed: it left no end" if killed else "no end on record"
        ended = attempt.terminal | (end.terminal if end else {})
        mine = [step for step, record in run.records.items() if record.attempt == attempt.attempt]
        rows.append(
            {
                "attempt": str(attempt.attempt),
                "reason": attempt.reason,
                "began": _time(attempt.started_at),
                "from": str(attempt.from_version),
                "steps": f"{min(mine)}–{max(mine)}" if mine else "none",
                "carried": str(len(attempt.carried)),
                "ended": ", ".join(f"{list(ended.values()).count(s)} {s}" for s in sorted(set(ended.values()))) or "–",
                "how": f"{how}, {_time(end.ended_at)}" if end else how,
                "changed": ", ".join(_changes(before, attempt.config)) or "–",
            }
        )
        before = attempt.config or before
    return rows


def _changes(before: Any, after: Any, path: str = "") -> list[str]:
    """Keys that an attempt changed, with both values."""
    if after is None and not path:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted({*before, *after})
        inside = (_changes(before.get(k), after.get(k), f"{path}.{k}".lstrip(".")) for k in keys)
        return [change for changes in inside for change in changes]
    return [] if before == after else [f"{path}: {before} → {after}"]


def _faults(run: RunData, numbers: Numbers) -> list[tuple[str, str]]:
    """(what, how many and where)."""
    faults = []
    killed = [a.attempt for a in run.attempts[:-1] if a.attempt not in run.ends]
    if killed:
        faults.append(("attempts killed", _listed(killed)))
    for end in run.ends.values():
        if end.how == "failed":
            faults.append(("attempt failed", f"{end.attempt}, at version {end.version}"))
    if numbers.ended.get("dead-lettered"):
        faults.append(("groups dead-lettered", str(numbers.ended["dead-lettered"])))
    skipped = [step for step, record in run.records.items() if record.metrics.not_finite]
    if skipped:
        faults.append(("updates skipped, gradient not finite", f"step {_listed(skipped)}"))
    if numbers.total["missing"]:
        faults.append(("steps of which nothing is there", _listed(numbers.total["missing"])))
    unrecorded = [step for step in run.commits if step not in run.records]
    if unrecorded:
        faults.append(("committed, not recorded", f"step {_listed(unrecorded)}"))
    return faults


def _steps(run: RunData, numbers: Numbers) -> dict[str, Any]:
    shown = list(run.steps) if len(run.steps) <= MOST_STEPS else [s for s in numbers.bins if s in run.steps]
    rows = []
    for step in shown:
        record, commit = run.records.get(step), run.commits.get(step)
        known = record or commit
        metrics = record.metrics if record else None
        rows.append(
            (
                step,
                number(known.rows if known else None),
                number(known.response_tokens if known else None),
                number(record.mean_reward if record else None),
                number(known.max_staleness if known else None),
                number(metrics.loss if metrics else None),
                ("skipped" if metrics and metrics.not_finite else number(metrics.grad_norm if metrics else None)),
                ("" if record else "not recorded" if commit else "missing"),
                _show(run, step),
            )
        )
    return {"rows": rows, "every": len(shown) == len(run.steps), "marks": axis_of(run, numbers).marks}


def _show(run: RunData, step: int) -> str:
    return f"roadstead batch show {shlex.quote(run.keys.run_id)} {step}"


def _listed(values: list[int]) -> str:
    shown = ", ".join(str(value) for value in values[:_MOST_ROWS])
    return shown + (f" and {len(values) - _MOST_ROWS} more" if len(values) > _MOST_ROWS else "")


def _text(section: Any, key: str) -> str:
    value = section.get(key) if isinstance(section, dict) else None
    return "–" if value is None else str(value)


def _time(text: str) -> str:
    """ISO 8601 as people read it; as it is, if it is something else."""
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return text
