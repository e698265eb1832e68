"""What verifying finds, as plain data. Not how it is found, nor how it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from meshtrain.errors import Refused

Level = Literal["damaged", "wrong", "warning", "note"]
LEVELS: tuple[Level, ...] = ("damaged", "wrong", "warning", "note")
"""Worst first: bytes are not what was written; what was written is wrong; to be looked at; to be known."""


class Finding(NamedTuple):
    """One thing that was found."""

    level: Level
    file: str
    """Path below what was verified; empty for the whole."""
    tensor: str | None
    what: str

    def line(self) -> str:
        """For people."""
        tensor = f"tensor {self.tensor!a}: " if self.tensor is not None else ""
        return f"{self.level:<8} {f'{self.file}: ' if self.file else ''}{tensor}{self.what}"


@dataclass
class Report:
    """What was found in one checkpoint, model directory or file."""

    path: Path
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    bytes_read: int = 0
    """Of tensors; 0 where only headers were looked at."""
    gone: bool = False
    """It was removed or replaced while it was read, so nothing is said of it."""

    def add(self, level: Level, file: str, what: str, tensor: str | None = None) -> None:
        """Note a finding."""
        self.findings.append(Finding(level, file, tensor, what))

    def add_error(self, level: Level, error: Exception) -> None:
        """Note what an error says, whose message begins with a path."""
        text, base = str(error), f"{self.path}"
        if text.startswith(f"{base}/"):
            file, _, what = text.removeprefix(f"{base}/").partition(": ")
            self.add(level, file, what)
        else:
            self.add(level, "", text.removeprefix(f"{base}: "))

    @contextmanager
    def noting(self, level: Level, file: str) -> Iterator[None]:
        """Note what is refused, or cannot be read, inside; and go on."""
        try:
            yield
        except Refused as error:
            self.add_error(level, error)
        except OSError as error:
            self.add(level, file, f"cannot be read ({error.strerror or error})")

    def damaged(self, file: str) -> bool:
        """Whether a file is known to be damaged."""
        return any(finding.level == "damaged" and finding.file == file for finding in self.findings)

    @property
    def verdict(self) -> Literal["good", "damaged", "wrong"]:
        """The worst that was found."""
        levels = {finding.level for finding in self.findings}
        return "damaged" if "damaged" in levels else "wrong" if "wrong" in levels else "good"
