"""A place between a save and the system: counts the calls that change or read a file system, and acts on a chosen one.

It works from within the process, on Python's names for the calls (and on the files that `open` returns), so that a call can
be chosen exactly. `faults.py --strace` has the kernel fail instead.
"""

from __future__ import annotations

import builtins
import io
import os
import stat
import threading
from collections.abc import Callable
from typing import Any

from meshtrain.state import publish

CHANGING = (
    "open", "write", "pwrite", "ftruncate", "truncate", "fsync", "fdatasync", "rename", "replace", "mkdir", "unlink", "remove",
    "rmdir",
)  # fmt: skip
READING = ("scandir", "listdir", "stat", "lstat", "statvfs", "close")

Act = Callable[[int, str, str, Callable[[], Any]], Any]
"""act(number of the call, from 1; its name; what it is about; perform): does what shall happen instead of perform()."""


class _File(io.FileIO):
    """A file whose calls go through hooks. io.BufferedWriter above it deals with short writes, as with any raw file."""

    hooks: Calls

    def write(self, data: Any, /) -> Any:
        data = self.hooks.shortened(data)
        return self.hooks.hit("write", str(self.name), lambda: super(_File, self).write(data))

    def truncate(self, size: int | None = None, /) -> int:
        return self.hooks.hit("ftruncate", str(self.name), lambda: super(_File, self).truncate(size))


class Calls:
    """`with Calls(act) as calls:` sends every call of this process through `act`; `calls.made` lists their names."""

    def __init__(
        self, act: Act | None = None, reading: bool = False, short: Callable[[int], bool] | None = None
    ) -> None:
        self.made: list[str] = []
        self._act, self._short = act, short
        self._names = [*CHANGING, *(READING if reading else ())]
        self._saved: list[tuple[Any, str, Any]] = []
        self._on = False
        self._inside, self._lock = threading.local(), threading.Lock()

    def hit(self, name: str, what: str, perform: Callable[[], Any]) -> Any:
        """One call."""
        if not self._on or getattr(self._inside, "act", False):
            return perform()
        with self._lock:
            self.made.append(name)
            number = len(self.made)
        if self._act is None:
            return perform()
        self._inside.act = True
        try:
            return self._act(number, name, what, perform)
        finally:
            self._inside.act = False

    def shortened(self, data: Any) -> Any:
        """What the system takes of data that is to be written: all of it, or a third where short(number of the call) says so."""
        if self._on and self._short is not None and self._short(len(self.made) + 1) and len(data) > 1:
            return memoryview(data)[: max(1, len(data) // 3)]
        return data

    def __enter__(self) -> Calls:
        for name in self._names:
            self._patch(os, name, self._wrapped(name, getattr(os, name)))
        for module in (builtins, io):
            self._patch(module, "open", self._open(open))
        self._patch(publish, "_exchange", self._exchange(publish._exchange))
        self._on = True
        return self

    def __exit__(self, *error: object) -> None:
        self._on = False
        for owner, name, before in reversed(self._saved):
            setattr(owner, name, before)
        self._saved.clear()

    def _patch(self, owner: Any, name: str, new: Any) -> None:
        self._saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            what = str(args[0]) if args else ""
            if name in ("write", "pwrite"):
                args = (args[0], self.shortened(args[1]), *args[2:])
            return self.hit(name, what, lambda: real(*args, **named))

        return call

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            if isinstance(file, int) or mode not in ("wb", "xb"):
                return self.hit("open", str(file), lambda: real(file, mode, *args, **named))

            def make() -> Any:
                raw = _File(file, mode)
                raw.hooks = self
                return io.BufferedWriter(raw)

            return self.hit("open", str(file), make)

        return call

    def _exchange(self, real: Callable[..., bool]) -> Callable[..., bool]:
        def call(first: Any, second: Any) -> bool:
            try:
                return bool(self.hit("renameat2", str(first), lambda: real(first, second)))
            except OSError:
                return False  # as the real one says when the system refuses

        return call


def failing(number: int, code: int) -> Act:
    """Have call `number` fail with an errno."""

    def act(found: int, name: str, what: str, perform: Callable[[], Any]) -> Any:
        if found != number:
            return perform()
        if name == "close":
            directory = stat.S_ISDIR(os.fstat(int(what)).st_mode)
            perform()
            if directory:  # no system lets that fail, and shutil.rmtree would close another one instead
                return None
        raise OSError(code, os.strerror(code), what)

    return act
