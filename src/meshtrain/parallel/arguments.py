"""What the arguments of styles may be: checked when a style is made, in Python or from a plan file. Not whether they fit
a model, which `resolve` finds out."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import Refused

MOST = 2**16
"""Heads or parts that a weight can have: no model comes near, and larger numbers would only take long to refuse."""


class Rule(NamedTuple):
    """What one argument may be."""

    allows: Callable[[Any], bool]
    told: str
    """In words, after "must be"."""

    def or_none(self) -> Rule:
        """The same, or nothing at all."""
        return Rule(lambda value: value is None or self.allows(value), f"{self.told}, or left out")


def is_number(value: Any, least: int, most: int) -> bool:
    """Whether a value is a whole number in a range (True and 2.0 are none)."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_count(value: Any) -> bool:
    named = isinstance(value, str) and (value[:1].isalpha() or value[:1] == "_")
    return named or is_number(value, 1, MOST)


_HEADS = f"1 to {MOST}, or the name of the attribute of model.config that holds it"
COUNT = Rule(_is_count, f"a number of heads, {_HEADS}")
COUNTS = Rule(
    lambda value: isinstance(value, tuple) and all(map(_is_count, value)),
    f"a tuple (in a file a list) of numbers of heads: each {_HEADS}",
)
PARTS = Rule(lambda value: is_number(value, 2, MOST), f"a whole number, 2 to {MOST}")
SWITCH = Rule(lambda value: isinstance(value, bool), "True or False (in a file true or false)")
NOT_FUSED = Rule(
    lambda value: value is None or value is False, "False, or left out: a fused weight takes packed_column()"
)
GRADIENT = Rule(lambda value: isinstance(value, str) and value in ("whole", "partial"), "'whole' or 'partial'")


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to write out very large ones
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)


def check(style: str, argument: str, value: Any, rule: Rule) -> None:
    """Raise Refused for an argument that breaks its rule."""
    if not rule.allows(value):
        raise Refused(f"{style}() was given {argument}={_shown(value)}; it must be {rule.told}. Correct it in the plan")
