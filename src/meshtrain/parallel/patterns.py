"""Patterns of module paths: what they match, and what may have been meant where they match nothing."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence

_SHOWN = 8


def matches(pattern: str, path: str) -> bool:
    """Whether a module path matches a pattern, segment by segment."""
    wanted, given = pattern.split("."), path.split(".")
    return len(wanted) == len(given) and all(fnmatch.fnmatchcase(g, w) for g, w in zip(given, wanted, strict=True))


def near(word: str, candidates: Iterable[str], text: str = "; did you mean {}?") -> str:
    """A phrase that offers the nearest candidates, or nothing."""
    found = _nearest(word, sorted(set(candidates)))
    return text.format(_joined(found)) if found else ""


def folded(path: str) -> str:
    """A path with its numbers folded: layers.3.norm -> layers.*.norm"""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", path)


def within(path: str, outer: str) -> bool:
    """Whether `path` lies strictly below `outer`; "" is the model."""
    return path != outer and (outer == "" or path.startswith(outer + "."))


def missed(pattern: str, paths: Sequence[str], model: str) -> str:
    """What to say of a pattern that matches none of the module paths of a `model`: what is near, or what there is."""
    segments = pattern.split(".")
    found = [*_respelt(segments, paths)] or [*_completed(pattern, paths)] or [*_shortened(segments, paths)]
    if found:
        return f"; did you mean {_joined([*dict.fromkeys(found)][:3])}?"
    depth = 0
    while _children(".".join(segments[: depth + 1]), paths):
        depth += 1
    here = ".".join(segments[:depth])
    where = f"'{here}'" if here else f"the {model}"
    return f"; {where} holds {_listed(_children(here, paths))}. Correct the pattern, or drop it"


def _children(prefix: str, paths: Iterable[str]) -> list[str]:
    """Names of the modules right below those that match a pattern; "" is the model."""
    depth = prefix.count(".") + 1 if prefix else 0
    parts = (path.split(".") for path in paths)
    return list(
        dict.fromkeys(
            p[depth] for p in parts if len(p) > depth and (not prefix or matches(prefix, ".".join(p[:depth])))
        )
    )


def _respelt(segments: Sequence[str], paths: Sequence[str], done: str = "") -> Iterator[str]:
    """Patterns that match, with the segments that match nothing replaced by near names, from the left to the right."""
    if not segments:
        yield done
        return
    names = _children(done, paths)
    here = [segments[0]] if any(fnmatch.fnmatchcase(n, segments[0]) for n in names) else _nearest(segments[0], names)
    for name in here:
        yield from _respelt(segments[1:], paths, f"{done}.{name}" if done else name)


def _completed(pattern: str, paths: Sequence[str]) -> Iterator[str]:
    """The pattern behind the beginnings of paths whose ends it matches."""
    length = pattern.count(".") + 1
    for parts in (path.split(".") for path in paths):
        if len(parts) > length and matches(pattern, ".".join(parts[-length:])):
            yield f"{folded('.'.join(parts[:-length]))}.{pattern}"


def _shortened(segments: Sequence[str], paths: Sequence[str]) -> Iterator[str]:
    """Patterns that match, with one segment less; the last one only where nothing lies below the others."""
    for index in range(len(segments)):
        shorter = ".".join([*segments[:index], *segments[index + 1 :]])
        last = index == len(segments) - 1
        if any(matches(shorter, path) for path in paths) and not (last and _children(shorter, paths)):
            yield shorter


def _nearest(word: str, names: Iterable[str]) -> list[str]:
    if word.isdecimal():
        return []  # no number is more like another one than the rest
    by_lower = {name.lower(): name for name in names}
    return [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower, n=3, cutoff=0.6)]


def _joined(words: Iterable[str]) -> str:
    return " or ".join(map(repr, words))


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "no modules"
    if len(names) > 2 and all(name.isdecimal() for name in names):
        return f"'{names[0]}' to '{names[-1]}'"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
