"""Invariant: weights -> batch -> weights is an unbroken chain of digests, and every object is what its digest says.

Owns: the reading of `verify`'s problems as findings. Confidence is 1: nothing here is estimated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding
from roadstead.storage.audit.verify import Problem


class Digests:
    name = "digests"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        committed = {e.commit.digest: e.step for e in evidence.steps if e.commit}
        recorded = {e.record.batch_digest: e.step for e in evidence.steps if e.record}
        by_step: dict[int, list[Problem]] = defaultdict(list)
        for problem in evidence.problems:
            by_step[problem.step].append(problem)
        for step, problems in sorted(by_step.items()):
            # The first problem is the closest to the bytes; the others usually follow from it.
            root = problems[0]
            owner = recorded.get(root.found or "", committed.get(root.found or ""))
            if owner is None and root.kind == "chain":
                commit = next(e.commit for e in evidence.steps if e.step == step)
                owner = recorded.get(commit.digest) if commit else None
            groups = tuple(dict.fromkeys(group for p in problems for group in p.groups))
            swapped = owner is not None and owner != step
            staged_ok = not any("/groups/" in p.key for p in problems)
            why = "; ".join(f"{p.key}: {p.detail}" for p in problems[:4])
            if len(problems) > 4:
                why += f"; and {len(problems) - 4} more"
            if swapped:
                why = f"what lies there is the batch of step {owner}. " + why
            elif root.kind in {"missing", "sha256", "unreadable"} and "/data-" in root.key and staged_ok and groups:
                why += ". Its staged groups are named here: the batch can be assembled from them again"
            titles = {
                "missing": f"step {step}: an object of the log is gone",
                "unreadable": f"step {step}: an object can't be read",
                "sha256": f"step {step}: a file is not the one that was committed",
                "digest": f"step {step}: a table is not the one its digest names",
                "schema": f"step {step}: the committed batch breaks the schema",
                "rows": f"step {step}: the batch's rows contradict its commit",
                "stats": f"step {step}: the stats file is not the batch's own",
                "groups": f"step {step}: the batch is not what its staged groups were",
                "train": f"step {step}: the train rows are not those of this batch",
                "chain": f"step {step}: the chain weights -> batch -> weights is broken",
            }
            yield Finding(
                check=self.name,
                severity="critical",
                confidence=1.0,
                title=f"step {step}: the batch was swapped with step {owner}'s" if swapped else titles[root.kind],
                why=why,
                first_step=step,
                steps=tuple(sorted({step, owner})) if swapped and owner is not None else (step,),
                groups=groups,
                keys=tuple(dict.fromkeys(p.key for p in problems)),
            )
