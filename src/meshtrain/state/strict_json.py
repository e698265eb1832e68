"""JSON from files that nobody vouches for: one object, UTF-8, no duplicate names."""

from __future__ import annotations

import json
from typing import Any

from meshtrain.errors import Refused


class _Rule(Exception):
    """A rule of strict JSON that the text breaks."""


def parse_object(raw: bytes, origin: str) -> dict[str, Any]:
    """The JSON object in `raw`. `origin` names it in messages.

    Raises Refused when it is not UTF-8, not one object, nested too deep, or names a field twice (of which a
    lenient reader silently takes the last one).
    """
    if not raw.startswith(b"{"):
        raise Refused(
            f"{origin}: starts with {bytes(raw[:8])!r} and not with '{{'. It has to be one JSON object; {_AGAIN}"
        )
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except _Rule as rule:
        raise Refused(f"{origin}: {rule}; {_AGAIN}") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{origin}: byte {error.start} is not UTF-8, as JSON has to be; {_AGAIN}") from None
    except RecursionError:
        raise Refused(f"{origin}: nested too deep to be what it claims to be; {_AGAIN}") from None
    except ValueError as error:
        raise Refused(f"{origin}: not valid JSON ({error}); {_AGAIN}") from None
    return value


_AGAIN = "the file is damaged or of another kind: fetch or export it again"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Rule(f"the name {shown(name)} occurs twice, and which one counts is undefined")
            seen.add(name)
    return result


def shown(text: str, limit: int = 120) -> str:
    """A name from an untrusted file, quoted, escaped and shortened for a message."""
    return ascii(text if len(text) <= limit else text[: limit - 3] + "...")
