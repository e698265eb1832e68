"""What the files and directories of a checkpoint are called, for whoever writes, reads, looks at or removes one.

Needs no torch. docs/checkpoints.md is the specification.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

CHECKPOINTS, LATEST = "checkpoints", "latest"
TRAINING = "training"
STATE = f"{TRAINING}/state.json"
GENERATORS = f"{TRAINING}/generators.safetensors"
STATE_FORMAT, STATE_VERSION = "meshtrain training state", 1

CHECKPOINT = re.compile(r"step-(\d{8,18})")
MOMENT = re.compile(r"training/(?!generators\.)(\w+?)(?:-\d{5}-of-\d{5})?\.safetensors")
REMOVED = re.compile(r"\.step-\d{8,18}\.old-[0-9a-f]{16}")
"""What a removal under way, or one that was killed, has renamed."""
LEFT = re.compile(r"\.(step-\d{8,18}\.(tmp|old)|latest)-[0-9a-f]{16}")
"""What saves and removals that were killed have left."""

OTHER = "take another checkpoint"
"""The way out of a damaged one."""


def name_of(step: int) -> str:
    """The name of the checkpoint after `step` steps."""
    return f"step-{step:08}"


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint, newest first. Temporary directories are not among them."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(int(match[1]), folder / name) for name in names if (match := CHECKPOINT.fullmatch(name))]
    return sorted((step, path) for step, path in found if path.is_dir())[::-1]
