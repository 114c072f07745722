"""Failures of workflows in words, and what ended a task group.

Owns: how an error is unwrapped. Never touches: what becomes of it. Pure.
"""

from __future__ import annotations

from temporalio.exceptions import ApplicationError, FailureError, is_cancelled_exception


def first(error: BaseException) -> BaseException:
    """What ended a task group: the first failure in it that is not itself a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def reason(error: BaseException) -> str:
    """The innermost failure in words, with its type: what a person can act on."""
    if is_cancelled_exception(error):
        return "its workflow was cancelled from outside"
    while isinstance(error, FailureError) and error.cause is not None:
        error = error.cause
    if isinstance(error, ApplicationError) and error.type:
        return f"{error.type}: {error.message}"
    return f"{type(error).__name__}: {error}"
