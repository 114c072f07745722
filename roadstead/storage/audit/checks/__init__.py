"""One file a question that an audit asks of a run's log."""

from roadstead.storage.audit.checks.advantages import Advantages
from roadstead.storage.audit.checks.base import Check
from roadstead.storage.audit.checks.bound import Bound
from roadstead.storage.audit.checks.constant import ConstantRewards
from roadstead.storage.audit.checks.digests import Digests
from roadstead.storage.audit.checks.drift import Drift
from roadstead.storage.audit.checks.duplicates import Duplicates
from roadstead.storage.audit.checks.gradient import GradientNorm
from roadstead.storage.audit.checks.groups import Prompts, TerminalStates, TrainedTwice
from roadstead.storage.audit.checks.importance import Importance
from roadstead.storage.audit.checks.lengths import Lengths
from roadstead.storage.audit.checks.numbers import MissingRewards, NotNumbers
from roadstead.storage.audit.checks.rewards import OutlyingRewards

CHECKS: tuple[Check, ...] = (
    *(Digests(), Bound(), TrainedTwice(), TerminalStates(), Prompts(), NotNumbers(), Advantages()),
    *(MissingRewards(), OutlyingRewards(), ConstantRewards(), Drift(), Lengths(), Duplicates(), Importance()),
    GradientNorm(),
)
"""Invariants, then symptoms. Findings of equal rank keep this order, so causes stand before effects."""

__all__ = ["CHECKS", "Check"]
