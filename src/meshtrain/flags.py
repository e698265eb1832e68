"""Flags that a program does not know are refused with the nearest one that it does, before the parser sees them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import TypeVar

from meshtrain.errors import Refused

T = TypeVar("T")


def parse(kind: type[T], arguments: Sequence[str], program: str, flags: Collection[str]) -> T:
    """The settings of a command whose values may stand alone: `kind` is a dataclass, its docstring the help text.

    flags: the names of all its flags, without dashes; one that takes no value has no `--no-` form. Raises Refused for an
    unknown flag, and ends the program as tyro does for its --help and for values that do not fit.
    """
    check_flags(arguments, flags, program, positional=True)
    import tyro  # here, because its import takes longer than some commands

    description = " ".join((kind.__doc__ or "").split())
    config = (tyro.conf.FlagCreatePairsOff,)
    return tyro.cli(kind, prog=program, args=list(arguments), description=description, config=config)


def check_flags(
    arguments: Sequence[str],
    known: Collection[str],
    program: str,
    *,
    switches: Collection[str] = (),
    positional: bool = False,
) -> None:
    """Raise Refused for a flag that is not in `known` (names without dashes), or a value that follows no flag.

    switches: the known names that take no value, but may stand as `no-NAME` too. positional: whether values may stand alone.
    """
    names = {*known, *(f"no-{name}" for name in switches), "help"}
    for position, argument in enumerate(arguments):
        if argument == "--":
            raise Refused(f"{argument!r}: {program} takes flags only. See {program} --help")
        if not argument.startswith("-") or _is_number(argument):
            if not positional and not _takes_value(arguments[position - 1] if position else "", switches):
                raise Refused(
                    f"{argument!r} stands alone: every value follows a flag, as in --steps 100. See {program} --help"
                )
        elif argument != "-h":
            given = argument.split("=", 1)[0]
            name = given.lstrip("-").replace("_", "-")
            if not argument.startswith("--") or name not in names:
                raise Refused(
                    f"unknown flag {given}{nearest(name, names, '--') or '.'} {program} --help lists all flags"
                )


def nearest(word: str, known: Collection[str], prefix: str = "") -> str:
    """A phrase that offers the nearest of the known words, or nothing."""
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def _takes_value(flag: str, switches: Collection[str]) -> bool:
    name = flag.lstrip("-").replace("_", "-")
    valueless = name in ("h", "help", *switches) or name.removeprefix("no-") in switches
    return flag.startswith("-") and "=" not in flag and not _is_number(flag) and not valueless


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
