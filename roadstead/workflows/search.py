"""Search attributes: how runs and steps are found in Temporal's own UI and CLI."""

from __future__ import annotations

from temporalio.common import SearchAttributeKey

RUN = SearchAttributeKey.for_keyword("RoadsteadRun")
ATTEMPT = SearchAttributeKey.for_int("RoadsteadAttempt")
STEP = SearchAttributeKey.for_int("RoadsteadStep")
POLICY_VERSION = SearchAttributeKey.for_int("RoadsteadPolicyVersion")
PHASE = SearchAttributeKey.for_keyword("RoadsteadPhase")

KEYWORDS = (RUN.name, PHASE.name)
INTS = (ATTEMPT.name, STEP.name, POLICY_VERSION.name)
