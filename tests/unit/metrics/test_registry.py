"""Series exist before their first event, and gauges do not lie before their first value."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics


def samples(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(metrics.text()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_counters_and_histograms_of_known_labels_are_there_at_0_before_anything_happens() -> None:
    """increase() takes a series' first sample as its beginning: an event that made the series is missed."""
    found = samples(Metrics("orchestrator"))
    states = catalogue.GROUPS_ENDED.labels["state"]
    assert found["roadstead_ended_groups_total"] == {(("state", state),): 0.0 for state in states}
    assert found["roadstead_trained_age_versions_count"] == {(): 0.0}
    assert found["roadstead_admitted_groups_total"] == {(): 0.0}
    assert not any(name.endswith("_created") for name in found)


def test_labels_that_the_catalogue_can_not_know_begin_when_they_are_known() -> None:
    metrics = Metrics("ledger")
    assert "roadstead_activity_faults_total" not in samples(metrics)
    metrics.begin(catalogue.ACTIVITY_FAULTS, activity="occupy_slot")
    found = samples(metrics)["roadstead_activity_faults_total"]
    assert set(found.values()) == {0.0}
    assert {dict(labels)["kind"] for labels in found} == set(catalogue.FAULT_KINDS)
    assert {dict(labels)["activity"] for labels in found} == {"occupy_slot"}


def test_a_gauge_appears_with_its_first_value() -> None:
    """An admission bound of 0 would be exceeded by every run."""
    metrics = Metrics("orchestrator")
    assert "roadstead_admission_bound_groups" not in samples(metrics)
    metrics.set(catalogue.ADMISSION_BOUND, 12)
    assert samples(metrics)["roadstead_admission_bound_groups"] == {(): 12.0}


def test_a_process_has_the_metrics_of_its_role_and_no_others() -> None:
    metrics = Metrics("ledger")
    metrics.add(catalogue.TOKENS_DISCARDED, 40, reason="late")
    with pytest.raises(KeyError):
        metrics.add(catalogue.TOKENS_TRAINED, 1)
    with pytest.raises(ValueError):
        metrics.add(catalogue.TOKENS_DISCARDED, 1, group="g00000001")
    assert "process_resident_memory_bytes" in samples(metrics)
