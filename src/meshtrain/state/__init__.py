"""Safetensors in and out: every rank reads and writes its own bytes of a Hugging Face model directory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.state.folder import inspect_pretrained
    from meshtrain.state.header import TensorEntry, read_header
    from meshtrain.state.pretrained import load_pretrained, save_pretrained
    from meshtrain.state.rewrite import export
    from meshtrain.state.specs import check_against

# Imported at the first use: looking at headers needs no torch, whose import takes seconds.
_HOME = {
    "export": "rewrite",
    "inspect_pretrained": "folder",
    "TensorEntry": "header",
    "read_header": "header",
    "load_pretrained": "pretrained",
    "save_pretrained": "pretrained",
    "check_against": "specs",
}
__all__ = [
    "TensorEntry",
    "check_against",
    "export",
    "inspect_pretrained",
    "load_pretrained",
    "read_header",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshtrain.state' has no attribute {name!r}")
    return getattr(importlib.import_module(f"meshtrain.state.{_HOME[name]}"), name)
