"""What a run leaves on disk to be read later: metrics.jsonl, one object a step, and settings.json. Not what is shown."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

METRICS = "metrics.jsonl"
SETTINGS = "settings.json"


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    """The first is 1."""
    loss: float
    """Mean over the tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Trained on since the start, over all ranks."""
    tokens_per_second: float
    """Of this step, over all ranks."""
    step_seconds: float
    """Data, computation and communication."""
    peak_memory_bytes: int
    """Of the reporting rank, so far: see `peak_memory_bytes`."""


class MetricsFile:
    """metrics.jsonl of one run: one JSON object a line, each line handed to the system at once."""

    def __init__(self, path: Path, after: int = 0) -> None:
        """Keep the lines of the first `after` steps, which a resumed run goes on from, and drop those that it makes again."""
        rewind(path, after)
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Make the lines durable and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def rewind(path: Path, after: int) -> None:
    """Drop the lines of metrics.jsonl that are not of the first `after` steps, or not whole. Nothing is half done when cut.

    What a run that starts anew would drop altogether is kept beside it, as metrics.before-DATE-TIME.jsonl.
    """
    if not path.exists():
        return
    if after == 0 and path.stat().st_size:
        os.replace(path, path.with_name(f"{path.stem}.before-{time.strftime('%Y%m%d-%H%M%S')}{path.suffix}"))
        return
    temporary = path.with_name(f".{path.name}.rewound")
    with open(path, encoding="utf-8", errors="replace") as old, open(temporary, "w", encoding="utf-8") as new:
        for line in old:
            try:
                kept = line.endswith("\n") and int(json.loads(line)["step"]) <= after
            except (ValueError, KeyError, TypeError):
                kept = False
            if kept:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)


def peak_memory_bytes() -> int:
    """The most memory that this rank has held: allocated on its CUDA device, else resident in this process.

    The resident size counts the libraries too (about 0.3 GB with torch), and pages shared with other ranks.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource  # absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def write_settings(path: Path, settings: Mapping[str, Any], **more: Any) -> None:
    """Write settings.json: the settings, versions, and the git revision of the working directory; `more` beside them."""
    content = {"settings": dict(settings), **more, "versions": versions(), "git": git_revision(), "command": sys.argv}
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)  # never a half one, which a run that goes on would stumble over


def versions() -> dict[str, str | None]:
    """Of Python, torch, meshtrain and CUDA."""
    try:
        own = version("meshtrain")
    except PackageNotFoundError:
        from meshtrain import __version__ as own
    return {
        "meshtrain": own,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if torch.cuda.is_initialized() else None,
    }


def git_revision() -> dict[str, Any] | None:
    """The commit that is checked out in the working directory, and whether files differ from it; None outside of git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return {
            "revision": git("rev-parse", "HEAD"),
            "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None
