"""ParallelPlan: what a model declares - a literal table of module paths and styles, and the FSDP units.

A plan knows no mesh and no sizes; `resolve` holds it against a model. It can be imported, named by a dotted path, or
kept in a TOML or JSON file.
"""

from __future__ import annotations

import importlib
import json
import re
import tomllib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch.distributed.tensor.parallel import ParallelStyle

from ..errors import Refused
from .patterns import near
from .styles import STYLES, Style


@dataclass(frozen=True)
class ParallelPlan:
    """One declaration of how a model is parallelised.

    Both fields take module paths as `named_modules()` gives them; `*` stands for exactly one segment
    ("layers.*.norm"), or for a part of one ("layers.*.*_norm").
    """

    styles: Mapping[str, ParallelStyle]
    """Path pattern -> style: meshtrain's, or one of torch's own ParallelStyles."""
    units: tuple[str, ...] = ()
    """Path patterns of the modules that FSDP gathers, and frees, as one; what is in none of them belongs to the root."""
    source: str = field(default="the plan", compare=False)
    """Where it was read, for messages."""

    def __post_init__(self) -> None:
        if isinstance(self.units, str):
            raise Refused(f"units={self.units!r} must be a tuple of patterns: ({self.units!r},)")
        if not isinstance(self.units, list | tuple) or not all(isinstance(unit, str) for unit in self.units):
            raise Refused(f"units={self.units!r} must be a tuple of patterns, such as ('layers.*',)")
        if not isinstance(self.styles, Mapping):
            raise Refused(
                f"styles={self.styles!r} must be a dict of patterns and styles, such as {{'layers.*.up': column()}}"
            )
        for pattern, style in self.styles.items():
            if not isinstance(pattern, str):
                raise Refused(
                    f"the plan has an entry {pattern!r}, which is no path of a module: write a string, such as 'layers.*.up'"
                )
            if not isinstance(style, ParallelStyle):
                raise Refused(
                    f"the plan's entry '{pattern}' is {style!r}, not a style. Call one, such as column() or row() "
                    f"(with parentheses); the styles are {', '.join(STYLES)}"
                )
        object.__setattr__(self, "styles", dict(self.styles))
        object.__setattr__(self, "units", tuple(self.units))

    def __str__(self) -> str:
        width = max((len(pattern) for pattern in (*self.styles, *self.units)), default=0)
        lines = [f"{pattern or _ROOT:<{width}}  {_describe(style)}" for pattern, style in self.styles.items()]
        return "\n".join([*lines, *(f"{unit:<{width}}  FSDP unit" for unit in self.units)])

    def as_json(self) -> dict[str, Any] | str:
        """The plan for a record of a run: its file form, or where a style has none, what it looks like."""
        try:
            return self.to_dict()
        except Refused:
            return str(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, as its file holds it."""
        table: dict[str, Any] = {}
        for pattern, style in self.styles.items():
            if not isinstance(style, Style) or type(style) not in STYLES.values():
                raise Refused(
                    f"the plan's entry '{pattern}' is a {type(style).__name__}, and a plan file holds meshtrain's own styles "
                    f"only ({', '.join(STYLES)}). Keep this plan in Python, and name it by its dotted path"
                )
            table[pattern] = _to_file(style)
        return {"units": list(self.units), "styles": table}

    @classmethod
    def from_dict(cls, data: Any, source: str = "the plan") -> ParallelPlan:
        """The plan that `to_dict` gave, or that a file holds. Raises Refused, naming the entry."""
        if not isinstance(data, Mapping) or not isinstance(data.get("styles"), Mapping):
            raise Refused(f"{source}: a plan is a table with a table `styles` (pattern = style) and a list `units`")
        if unknown := set(data) - {"styles", "units"}:
            raise Refused(
                f"{source}: unknown key {min(unknown)!r}; a plan has `styles` and `units`{near(min(unknown), ('styles', 'units'))}"
            )
        units = data.get("units", [])
        if not isinstance(units, list | tuple) or not all(isinstance(unit, str) for unit in units):
            raise Refused(f"{source}: `units` is {units!r}; it must be a list of patterns")
        styles = {pattern: _style_from(value, f"{source}, '{pattern}'") for pattern, value in data["styles"].items()}
        return cls(styles, tuple(units), source)

    def save(self, path: str | Path) -> None:
        """Write the plan to a .toml or .json file."""
        path, data = Path(path), self.to_dict()
        if path.suffix == ".json":
            path.write_text(json.dumps(data, indent=2) + "\n")
        elif path.suffix == ".toml":
            lines = [f"units = {_toml(data['units'])}", "", "[styles]"]
            lines += [f"{json.dumps(pattern)} = {_toml(style)}" for pattern, style in data["styles"].items()]
            path.write_text("\n".join(lines) + "\n")
        else:
            raise Refused(f"cannot write a plan to '{path}': its name must end in .toml or .json")

    @classmethod
    def load(cls, path: str | Path) -> ParallelPlan:
        """Read a plan from a .toml or .json file. Raises Refused, naming the file and the entry."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except OSError as error:
            raise Refused(
                f"cannot read the plan file '{path}': {error.strerror}. Give the path of a .toml or .json file"
            ) from error
        except ValueError as error:
            raise Refused(
                f"the plan file '{path}' is not valid {path.suffix[1:].upper() or 'JSON'}: {error}. Correct it there"
            ) from error
        return cls.from_dict(data, str(path))


_ROOT = "''"
"""How the path of the whole model is shown."""


def _describe(style: ParallelStyle) -> str:
    return str(style) if isinstance(style, Style) else f"torch {type(style).__name__}"


def _to_file(style: Style) -> str | dict[str, Any]:
    """A style as a plan file holds it: its name, or a table with its arguments."""
    arguments = {f.name: getattr(style, f.name) for f in fields(style) if getattr(style, f.name) != f.default}
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    return {"style": style.name, **arguments} if arguments else style.name


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)


def _style_from(value: Any, where: str) -> Style:
    if isinstance(value, str):
        value = {"style": value}
    name = value.get("style") if isinstance(value, Mapping) else None
    if not isinstance(name, str):
        raise Refused(f"{where} is {value!r}; it must be the name of a style or a table with the key `style`")
    if name not in STYLES:
        raise Refused(f"{where}: there is no style {name!r}{near(name, STYLES)}. The styles are {', '.join(STYLES)}")
    try:
        return STYLES[name](**{key: item for key, item in value.items() if key != "style"})
    except Refused as error:
        raise Refused(f"{where}: {error}") from error
    except TypeError as error:
        raise Refused(
            f"{where}: {name}() does not take these arguments: {error}. Correct them there, or leave them out"
        ) from error


def load_plan(spec: str) -> ParallelPlan:
    """The plan that `spec` names: a .toml or .json file, or "package.module:name" of a plan or a function without
    arguments that returns one. Raises Refused."""
    if spec.endswith((".toml", ".json")):
        return ParallelPlan.load(spec)
    module_name, colon, name = spec.partition(":")
    if not colon or not re.fullmatch(r"[\w.]+", module_name) or not name.isidentifier():
        raise Refused(f"cannot read the plan '{spec}': write a .toml or .json file, or package.module:name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise Refused(
            f"cannot import '{module_name}' for the plan '{spec}': {error}. Is it installed, or on PYTHONPATH?"
        ) from error
    except Refused:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's module may raise
        raise Refused(f"importing '{module_name}' for the plan '{spec}' failed: {_told(error)}. Correct it") from error
    if not hasattr(module, name):
        hint = near(name, vars(module)) or ". Name a ParallelPlan in it, or a function that returns one"
        raise Refused(f"'{module_name}' has no '{name}' for the plan '{spec}'{hint}")
    found: Any = getattr(module, name)
    try:
        plan = found() if callable(found) else found
    except Refused:
        raise
    except (Exception, SystemExit) as error:
        raise Refused(
            f"the plan '{spec}': {name}() failed: {_told(error)}. It must be a ParallelPlan, or a function that "
            "returns one without arguments"
        ) from error
    if not isinstance(plan, ParallelPlan):
        what = f"a function that returns a {type(plan).__name__}" if callable(found) else f"a {type(plan).__name__}"
        raise Refused(f"the plan '{spec}' is {what}. Name a ParallelPlan, or a function that returns one")
    return plan


def _told(error: BaseException) -> str:
    """An error of a user's module, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
