"""How the tensors of another program are called here: a table of patterns, from a JSON file or ready-made.

In a pattern `*` stands for one segment between dots, and `**` at the end for all that follow; its replacement takes them
over in the same order. The first pattern that fits a key counts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.errors import Refused
from meshtrain.state.folder import read_json
from meshtrain.state.strict_json import shown

Change = Callable[[Any], Any]
"""Tensor -> tensor: rows in another order, or some of them."""


class Target(NamedTuple):
    """What a key becomes, and what is done to the tensor."""

    key: str
    change: Change | None = None


class Place(NamedTuple):
    """Where a tensor that is written comes from."""

    source: str
    change: Change | None


class KeyMap:
    """A table: pattern -> one target, several (a fused weight), or none (it is left out)."""

    def __init__(self, table: Mapping[str, Sequence[Target]], name: str) -> None:
        self.name = name
        self._rules = [(_compiled(pattern, name), targets) for pattern, targets in table.items()]
        for pattern, targets in table.items():
            for target in targets:
                if _stars(target.key) != _stars(pattern):
                    raise Refused(
                        f"{name}: {shown(pattern)} becomes {shown(target.key)}, which has other stars; a replacement takes over each "
                        "* and ** of its pattern, in the same order"
                    )

    def places(self, keys: Iterable[str]) -> dict[str, Place]:
        """Key that is written -> where it comes from. Raises Refused for keys that no pattern fits, or that collide."""
        found: dict[str, Place] = {}
        unknown: list[str] = []
        for key in keys:
            match, targets = next(
                ((match, targets) for rule, targets in self._rules if (match := rule.fullmatch(key))), (None, ())
            )
            if match is None:
                unknown.append(key)
            for target in targets:
                name = _filled(target.key, match.groups() if match else ())
                if name in found:
                    raise Refused(
                        f"{self.name}: {shown(found[name].source)} and {shown(key)} both become {shown(name)}; map one of them to null"
                    )
                found[name] = Place(key, target.change)
        if unknown:
            raise Refused(self._unknown(unknown))
        return found

    def _unknown(self, keys: list[str]) -> str:
        patterns = [rule.pattern.replace(r"([^.]+)", "*").replace("\\", "") for rule, _ in self._rules]
        near = difflib.get_close_matches(re.sub(r"(?<=\.)\d+(?=\.)", "*", keys[0][:200]), patterns, n=1, cutoff=0.6)
        hint = f" (the nearest is {near[0]})" if near else ""
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        return (
            f"{self.name}: no pattern fits {', '.join(map(shown, keys[:5]))}{more}{hint}. Give a --key-map that says what becomes of "
            "them (null leaves a tensor out)"
        )


def same_keys() -> KeyMap:
    """Every tensor keeps its key."""
    return KeyMap({"**": (Target("**"),)}, "--key-map")


def read_key_map(path: Path) -> KeyMap:
    """A table from a JSON file: {"module.**": "**", "lm_head.bias": null}. Raises Refused."""
    content = read_json(path)
    for pattern, target in content.items():
        if not isinstance(target, str | None):
            raise Refused(
                f"{path}: {shown(pattern)} becomes {shown(str(target))}; give the new key, or null to leave it out"
            )
    return KeyMap(
        {pattern: () if target is None else (Target(target),) for pattern, target in content.items()}, str(path)
    )


def _stars(pattern: str) -> list[str]:
    return [part for part in pattern.split(".") if part in ("*", "**")]


def _compiled(pattern: str, name: str) -> re.Pattern[str]:
    parts = pattern.split(".")
    if "**" in parts[:-1]:
        raise Refused(f"{name}: {shown(pattern)} has ** before its end; there it stands for all that follows")
    return re.compile(r"\.".join({"*": "([^.]+)", "**": "(.+)"}.get(part) or re.escape(part) for part in parts))


def _filled(target: str, found: Sequence[str]) -> str:
    rest = iter(found)
    return ".".join(next(rest) if part in ("*", "**") else part for part in target.split("."))
