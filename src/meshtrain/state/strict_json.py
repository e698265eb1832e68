"""JSON from files that nobody vouches for: one object, UTF-8, no duplicate names, no bombs.

`parse_object` reads a whole object. `Scanner` reads one piece by piece, so that a header which is refused costs no more
memory than its bytes, whatever it holds. What the values mean is left to others.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from meshtrain.errors import Refused

VALUES_LIMIT = 2_500_000
"""Values in one object. The index of a model has one for each tensor, and each costs up to some 200 bytes of memory."""
_DIGITS_LIMIT = 4300
_AGAIN = "the file is damaged or of another kind: fetch or export it again"


class _Rule(Exception):
    """A rule of strict JSON that the text breaks."""


def parse_object(raw: bytes, origin: str) -> dict[str, Any]:
    """The JSON object in `raw`. `origin` names it in messages.

    Raises Refused when it is not UTF-8, not one object, nested too deep, holds more than `VALUES_LIMIT` values or a number
    that no float can hold, or names a field twice (of which a lenient reader silently takes the last one).
    """
    if not raw.startswith(b"{"):
        raise Refused(
            f"{origin}: starts with {bytes(raw[:8])!r} and not with '{{'. It has to be one JSON object; {_AGAIN}"
        )
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > VALUES_LIMIT:
        raise Refused(f"{origin}: holds some {values} values, above the limit of {VALUES_LIMIT}; {_AGAIN}")
    return _parsed(lambda: _DECODER.decode(raw.decode("utf-8")), origin)


class Scanner:
    """Reads one JSON object from `raw`, one member at a time.

    Raises Refused, naming `origin`, where the text is not JSON.
    """

    def __init__(self, raw: bytes, origin: str) -> None:
        self.raw = raw
        self.origin = origin
        self.position = 0

    def members(self, name_limit: int) -> Iterator[str]:
        """The names of the object at this position. The caller reads each value before it asks for the next name."""
        self.take(b"{")
        if not self.have(b"}"):
            while True:
                name = self.string(name_limit)
                self.take(b":")
                yield name
                if not self.have(b","):
                    break
            self.take(b"}")

    def end(self) -> None:
        """Only white space may follow."""
        if self._next() < len(self.raw):
            raise self._wrong("nothing more")

    def string(self, limit: int) -> str:
        """The string at this position; at most `limit` bytes."""
        begin, end = self._string()
        if end - begin > limit + 2:
            raise Refused(f"{self.origin}: a name takes {end - begin - 2} bytes, above the limit of {limit}; {_AGAIN}")
        inner = self.raw[begin + 1 : end - 1]
        if b"\\" not in inner and inner.isascii():
            return inner.decode("ascii")
        return str(_parsed(lambda: json.loads(self.raw[begin:end].decode("utf-8")), self.origin, begin))

    def skip_string(self) -> None:
        """Pass over a string, of any length, without holding it. Its bytes must be UTF-8, its escapes JSON's."""
        begin, end = self._string()
        decode = codecs.getincrementaldecoder("utf-8")().decode
        for start in range(begin, end, _PART):
            part = self.raw[start : min(start + _PART, end)]
            _parsed(partial(decode, part, start + _PART >= end), self.origin, start)
        whole = _TEXT.match(self.raw, begin + 1, end - 1)
        if whole is None or whole.end() != end - 1:
            self.position = whole.end() if whole else begin
            raise self._wrong("a whole character")

    def value(self, limit: int) -> Any:
        """The value at this position; at most `limit` bytes."""
        begin = self._next()
        window = self.raw[begin : begin + limit]
        cut = begin + limit < len(self.raw)
        text = str(_parsed(lambda: codecs.getincrementaldecoder("utf-8")().decode(window), self.origin, begin))
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            if cut:
                raise Refused(
                    f"{self.origin}: the value at byte {begin} is nested too deep or longer than the {limit} bytes that it may "
                    f"take, or no JSON; {_AGAIN}"
                ) from None
            return _parsed(lambda: _DECODER.raw_decode(text), self.origin)
        except _Rule as rule:
            raise Refused(f"{self.origin}: {rule}; {_AGAIN}") from None
        self.position = begin + len(text[:end].encode())
        return value

    def take(self, mark: bytes) -> None:
        """Pass over a punctuation mark, which must be next."""
        if not self.have(mark):
            raise self._wrong(repr(mark.decode()))

    def have(self, mark: bytes) -> bool:
        """Pass over a punctuation mark if it is next."""
        if not self.raw.startswith(mark, self.position) and not self.raw.startswith(mark, self._next()):
            return False
        self.position += 1
        return True

    def _next(self) -> int:
        self.position = _SPACE.match(self.raw, self.position).end()  # type: ignore[union-attr]  # it matches nothing too
        return self.position

    def _string(self) -> tuple[int, int]:
        match = _STRING.match(self.raw, self.position) or _STRING.match(self.raw, self._next())
        if match is None:
            raise self._wrong("a string")
        self.position = match.end()
        return match.span()

    def _wrong(self, expected: str) -> Refused:
        found = bytes(self.raw[self.position : self.position + 8])
        what = f"{found!r} stands at byte {self.position}" if found else "it ends"
        return Refused(f"{self.origin}: not valid JSON ({what} where {expected} should be); {_AGAIN}")


def shown(text: str, limit: int = 120) -> str:
    """A name from an untrusted file, quoted, escaped and shortened for a message."""
    return ascii(text if len(text) <= limit else text[: limit - 3] + "...")


_PART = 1 << 16
_SPACE = re.compile(rb"[ \t\n\r]*+")
# Possessive, so that matching takes linear time and no memory.
_STRING = re.compile(rb'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"', re.DOTALL)
# The inside of a string: what is escaped is escaped as JSON does, and halves of surrogate pairs are not alone.
_TEXT = re.compile(
    rb'(?:[^\\]++|\\(?:["\\/bfnrt]|u(?:[0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    rb"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})))*+"
)


def _parsed(parse: Callable[[], Any], origin: str, begin: int = 0) -> Any:
    try:
        return parse()
    except _Rule as rule:
        raise Refused(f"{origin}: {rule}; {_AGAIN}") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{origin}: byte {begin + error.start} is not UTF-8, as JSON has to be; {_AGAIN}") from None
    except RecursionError:
        raise Refused(f"{origin}: nested too deep to be what it claims to be; {_AGAIN}") from None
    except ValueError as error:
        raise Refused(f"{origin}: not valid JSON ({error}); {_AGAIN}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Rule(f"the name {shown(name)} occurs twice, and which one counts is undefined")
            seen.add(name)
    return result


def _integer(text: str) -> int:
    if len(text) > _DIGITS_LIMIT:
        raise _Rule(f"a whole number has {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Rule(f"the number {shown(text, 40)} is beyond what a float can hold")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_float=_float,
    # Where Python's own limit is switched off, converting takes quadratic time.
    parse_int=None if 0 < sys.get_int_max_str_digits() <= _DIGITS_LIMIT else _integer,
)
