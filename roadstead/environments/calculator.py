"""A calculator for arithmetic in Python's notation, safe with hostile input.

Owns: which expressions are computed, and how large anything on the way may get. Never touches: `eval`, names,
attributes, files.
Invariant: time and memory are bounded by the constants below, whatever the expression: it is parsed, never compiled;
only listed operations run; each is refused before it runs if its result could be too large.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import TypeAlias

Number: TypeAlias = int | float

MAX_CHARS = 256
"""Of an expression. It bounds the tree's size and depth, and with MAX_BITS the work: at most 256 operations on numbers
of 1,024 bits, in at most 256 nested calls of ours."""
MAX_BITS = 1024
"""Of any integer on the way: 308 digits, about the range of a float."""
MAX_BRACKETS = 40
"""Open at once. Python's parser takes some twenty C calls for each, and a thread's stack may be 512 KB."""

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    # One argument: round(5, -10**9) would build 10**10**9.
    "round": lambda value: round(value),
    "sqrt": math.sqrt,
}


class CalculationError(ValueError):
    """The expression is not computed; the text says why, for whoever wrote it."""


def calculate(expression: str) -> str:
    """Value of e.g. "2*(3+4)**2 / sqrt(49)". Integers exact, others to 12 digits. Raises CalculationError."""
    if not isinstance(expression, str):
        raise CalculationError(f"expected an expression as text, got {type(expression).__name__}")
    try:
        value = _value(_parse(expression.strip()))
    except CalculationError:
        raise
    except (ArithmeticError, ValueError, TypeError) as error:  # division by zero, a float's overflow, sqrt(-1)
        raise CalculationError(str(error)) from error
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _parse(expression: str) -> ast.expr:
    if len(expression) > MAX_CHARS:
        raise CalculationError(f"{len(expression)} characters; at most {MAX_CHARS} are computed")
    depth = 0
    for character in expression:  # before the parser sees them
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_BRACKETS:
            raise CalculationError(f"more than {MAX_BRACKETS} brackets are open at once")
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CalculationError("not an arithmetic expression") from None


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Number = node.value  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        value = _SIGNS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        value = _OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords:
            raise CalculationError(f"{node.func.id} takes no named arguments")
        value = _FUNCTIONS[node.func.id](*(_value(argument) for argument in node.args))
    else:
        raise CalculationError(
            f"only numbers, + - * / // % ** and {', '.join(_FUNCTIONS)} are computed, not {type(node).__name__}"
        )
    return _checked(value)


def _check_power(base: Number, exponent: Number) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise CalculationError(f"the power could have more than {MAX_BITS} bits")


def _checked(value: object) -> Number:
    if isinstance(value, complex):
        raise CalculationError("the result is not a real number")
    if not isinstance(value, int | float):
        raise CalculationError(f"the result is {type(value).__name__}, not a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise CalculationError("the result is not a finite number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise CalculationError(f"an integer of more than {MAX_BITS} bits")
    return value
