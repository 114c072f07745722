"""Staleness rules, one class each. A new one is one file here and one line in the list below.

Owns: the list. Invariant: the first is ours, the rest are the rivals it is compared with.
"""

from __future__ import annotations

from roadstead.benchmarks.simulator.policies.admission_gate import AdmissionGate
from roadstead.benchmarks.simulator.policies.base import Group, Policy, QueuePolicy
from roadstead.benchmarks.simulator.policies.in_order import InOrder
from roadstead.benchmarks.simulator.policies.mask_over_age import MaskOverAge
from roadstead.benchmarks.simulator.policies.reserve_occupy import ReserveOccupy
from roadstead.benchmarks.simulator.policies.roll import Roll
from roadstead.benchmarks.simulator.policies.ship_side_gate import ShipSideGate
from roadstead.benchmarks.simulator.policies.synchronous import Synchronous
from roadstead.benchmarks.simulator.policies.trl import Trl
from roadstead.benchmarks.simulator.policies.verl_drop import VerlDrop
from roadstead.benchmarks.simulator.policies.verl_wait import VerlWait

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        *(ReserveOccupy, InOrder, VerlWait, VerlDrop, Trl, Roll, MaskOverAge),
        *(AdmissionGate, ShipSideGate, Synchronous),
    )
}

__all__ = ["POLICIES", "Group", "Policy", "QueuePolicy"]
