"""Where the settings of a run come from: defaults, then a run file (TOML), then the command line.

Both reject what they do not know, with the nearest name. What the values mean together is checked in `prepare`.
"""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from meshtrain.errors import Refused
from meshtrain.flags import check_flags, nearest
from meshtrain.recipes.settings import FIELDS, GROUP_OF, GROUPS, Settings, flag_of

FLAGS = ("config", *map(flag_of, FIELDS))
_HINTS = {name: hint for kind in GROUPS.values() for name, hint in get_type_hints(kind).items()}
_SWITCHES = tuple(flag_of(name) for name, hint in _HINTS.items() if hint is bool)


def read_settings(arguments: Sequence[str], *, program: str, description: str) -> Settings:
    """The settings that a command line asks for, over those of the run file that it names, over the defaults.

    Raises Refused for unknown flags, keys and values; SystemExit after printing `--help` (0) or the error of a value (2).
    """
    check_flags(arguments, FLAGS, program, switches=_SWITCHES)
    defaults = Settings()
    if (file := _config_of(arguments)) is not None:
        defaults = read_run_file(file, defaults)
    return tyro.cli(
        Settings,
        prog=program,
        description=description,
        args=list(arguments),
        default=defaults,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def read_run_file(path: str | Path, defaults: Settings | None = None) -> Settings:
    """`defaults` with the values of a run file. Raises Refused, naming file, line, key, value and the way out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise Refused(f"--config {path}: cannot be read ({error.strerror}). Give the path of a TOML file") from error
    except ValueError as error:  # TOML, or UTF-8
        raise Refused(f"--config {path}: is not a TOML file: {error}. Correct it there") from error
    settings = defaults or Settings()
    groups: dict[str, dict[str, Any]] = {}
    for key, value in table.items():
        where = f"{path}, line {_line_of(key, text)}"
        name = key.replace("-", "_")
        if name not in FIELDS:
            if isinstance(value, Mapping):
                raise Refused(
                    f"{where}: [{key}] is a table, but a run file is flat. Write its keys at the top, without tables"
                )
            raise Refused(
                f"{where}: unknown key {key!r}{nearest(key, FLAGS[1:]) or '.'} The keys are the flags of the command line: see --help"
            )
        held = groups.setdefault(GROUP_OF[name], {})
        if name in held:
            raise Refused(f"{where}: {key!r} is given twice, once with - and once with _. Remove one of the two")
        held[name] = _typed(value, _HINTS[name], f"{where}: {key}")
    changed = {group: replace(getattr(settings, group), **values) for group, values in groups.items()}
    return replace(settings, **changed)


def as_toml(settings: Settings) -> str:
    """A run file with these settings; those that are None, and so left to the program, are not in it."""
    lines = [f"{name} = {_toml(value)}" for name, value in settings.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\\x7f' else c for c in value)
        return f'"{escaped}"'
    return str(value)


def _config_of(arguments: Sequence[str]) -> str | None:
    """The value of the last --config; a missing one is left for the parser to find."""
    found = None
    for position, argument in enumerate(arguments):
        if argument.startswith("--config="):
            found = argument.partition("=")[2]
        elif argument == "--config" and position + 1 < len(arguments):
            found = arguments[position + 1]
    return found


def _line_of(key: str, text: str) -> int:
    """The line on which a top-level key (or table) is set, counted from 1."""
    bare = re.compile(rf"""^\s*\[?\s*["']?{re.escape(key)}["']?\s*[.=\]]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if bare.match(line)), 1)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """A value of a run file, checked against the type of its field."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in kinds:
        if get_origin(kind) is Literal:
            if value in get_args(kind) and isinstance(value, str):
                return value
        elif kind is float and type(value) in (int, float):
            return float(value)
        elif type(value) is kind:
            return value
    expected = " or ".join(_name_of(kind) for kind in kinds if kind is not type(None))
    raise Refused(f"{where} is {value!r}, but it must be {expected}. Correct it there, or leave it out")


def _name_of(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    return {int: "a whole number", float: "a number", str: "a string in quotes", bool: "true or false"}[kind]
