"""The subprocess of an import: all that unpickles happens here, in a process that has little to lose.

It is told on its standard input what to read, and answers on its standard output: JSON lines, and raw bytes of tensors.
Nothing that the checkpoint holds reaches the importing process in any other form. Only weights are unpickled
(`weights_only=True`, and `dcp.py` for metadata). Should that be got round: this process has no environment of the user's,
writes no file, and refuses Python's calls to start programs, to touch files and to open connections. That makes an attack
harder; it is no sandbox.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from meshtrain.convert.choose import NESTED_PATH, choose, left_out
from meshtrain.convert.dcp import load_tensor, read_metadata
from meshtrain.errors import Refused
from meshtrain.state.dtypes import NAME_OF
from meshtrain.state.strict_json import shown

_DEPTH = 8
_NODES = 2_000_000
_PIECE = 1 << 20
T = TypeVar("T")


def main(request: dict[str, Any]) -> int:
    """Answer until the other side has what it wants."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what torch prints is no answer
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lock_up()
    try:
        stored, left = (open_dcp if request["kind"] == "dcp" else open_pt)([Path(path) for path in request["paths"]])
        for key, one in stored.items():
            if one.dtype not in NAME_OF:
                raise Refused(f"tensor {shown(key)} has dtype {one.dtype}, which safetensors does not know")
        listing = {key: [NAME_OF[one.dtype], list(one.shape)] for key, one in stored.items()}
        _say(answers, {"tensors": listing, "left_out": left})
        for line in sys.stdin.buffer:
            key = json.loads(line)["key"]
            try:
                tensor = plain(stored[key].load())
            except Exception as error:
                raise Refused(f"tensor {shown(key)}: {explained(error)}") from None
            _say(answers, {"nbytes": tensor.nbytes})
            _send(answers, tensor)
    except BrokenPipeError:
        return 1
    except Exception as error:
        _say(answers, {"error": explained(error)})
        return 1
    return 0


def lock_up() -> None:
    """Give up what reading needs not. For good: a limit cannot be raised again, and a hook cannot be taken away."""
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    sys.addaudithook(_refuse_calls)


def _refuse_calls(event: str, arguments: tuple[Any, ...]) -> None:
    harmless = ("os.listdir", "os.scandir")  # imports look for modules
    if event.startswith(("os.", "subprocess.", "socket.", "shutil.", "pty.", "signal.")) and event not in harmless:
        raise PermissionError(f"{event} is refused while a checkpoint is read")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        raise PermissionError("a file is opened to be written while a checkpoint is read")


class Stored(NamedTuple):
    """A tensor of the checkpoint, and how to load it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


def open_dcp(paths: list[Path]) -> tuple[dict[str, Stored], dict[str, int]]:
    """The model's tensors of a DCP directory, and what stays behind."""
    (folder,) = paths
    found = {described.path: described for described in read_metadata(folder).values()}
    model, behind = _model_of(found, str(folder))
    return {key: Stored(d.dtype, d.shape, partial(load_tensor, folder, d)) for key, d in model.items()}, behind


def open_pt(paths: list[Path]) -> tuple[dict[str, Stored], dict[str, int]]:
    """The model's tensors of files of torch.save, and what stays behind. Their bytes are mapped, not read, where they can be."""
    stored: dict[str, Stored] = {}
    behind: dict[str, int] = {}
    for path in paths:
        model, left = _model_of(dict(_tensors(_loaded(path), path)), str(path))
        for key, tensor in model.items():
            if key in stored:
                raise Refused(f"{path}: holds {shown(key)}, which another file holds too")
            if tensor.layout != torch.strided or tensor.is_quantized or not tensor.is_cpu:
                raise Refused(
                    f"{path}: tensor {shown(key)} is {tensor.layout} on {tensor.device}; only plain tensors are imported"
                )
            stored[key] = Stored(tensor.dtype, tuple(tensor.shape), partial(_same, tensor))
        behind.update({part: behind.get(part, 0) + count for part, count in left.items()})
    return stored, behind


def _same(tensor: Tensor) -> Tensor:
    return tensor


def plain(tensor: Tensor) -> Tensor:
    """The tensor with its elements in order in memory."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _model_of(found: dict[NESTED_PATH, T], origin: str) -> tuple[dict[str, T], dict[str, int]]:
    prefix = choose(list(found), origin)
    model = {path[-1]: one for path, one in found.items() if path[:-1] == prefix}
    return model, left_out(found, prefix)


def _loaded(path: Path) -> Any:
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _tensors(value: Any, path: Path) -> Iterator[tuple[NESTED_PATH, Tensor]]:
    """All tensors in nested dicts."""
    if not isinstance(value, dict):
        raise Refused(f"{path}: holds a {type(value).__name__} and not a state dict (a dict of tensors)")
    waiting: list[tuple[NESTED_PATH, dict[Any, Any]]] = [((), value)]
    nodes = 0
    while waiting:
        at, held = waiting.pop(0)
        for name, item in held.items():
            nodes += 1
            if nodes > _NODES:
                raise Refused(f"{path}: holds more than {_NODES} entries, or holds itself")
            if isinstance(item, Tensor):
                yield (*at, str(name)), item
            elif isinstance(item, dict) and len(at) < _DEPTH:
                waiting.append(((*at, str(name)), item))


def explained(error: Exception) -> str:
    """The first lines of an error, which may quote the checkpoint."""
    text = str(error)
    if isinstance(error, Refused):
        return text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = next(
        (line for line in lines if "WeightsUnpickler" in line or "GLOBAL" in line), lines[0] if lines else ""
    )
    return f"{type(error).__name__}: {telling[:400]}"


def _say(answers: int, content: dict[str, Any]) -> None:
    _write(answers, memoryview(json.dumps(content).encode() + b"\n"))


def _send(answers: int, tensor: Tensor) -> None:
    if tensor.nbytes:
        _write(answers, memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B"))


def _write(answers: int, data: memoryview) -> None:
    while data:
        data = data[os.write(answers, data[:_PIECE]) :]
