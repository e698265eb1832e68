"""Safetensors in and out: every rank reads and writes its own bytes of a Hugging Face model directory."""

from meshtrain.state.export import export
from meshtrain.state.folder import inspect_pretrained
from meshtrain.state.header import TensorEntry, read_header
from meshtrain.state.pretrained import load_pretrained, save_pretrained
from meshtrain.state.specs import check_against

__all__ = [
    "TensorEntry",
    "check_against",
    "export",
    "inspect_pretrained",
    "load_pretrained",
    "read_header",
    "save_pretrained",
]
