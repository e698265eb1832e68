"""The tools: one module a command, imported when it is run. Each has `main(arguments) -> exit status`."""

from __future__ import annotations

COMMANDS = {
    "export": ("export", "write a model directory or a checkpoint's model anew"),
    "import": ("import_", "make a model directory of a torch checkpoint (DCP, .pt)"),
    "verify": ("verify", "check checkpoints and model directories, without loading them"),
}
"""Name -> its module, and what it is for."""
