"""A torch checkpoint as the importing process sees it: names, shapes, and bytes that another process hands over.

What unpickles is `worker.py`, in a subprocess; here nothing is believed that it says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch

from meshtrain.errors import MeshtrainError, Refused
from meshtrain.state.dtypes import TORCH_OF
from meshtrain.state.strict_json import parse_object, shown

_BOOT = (
    "import json, sys; request = json.loads(sys.stdin.buffer.readline()); sys.path[:] = request['sys_path']; "
    "from meshtrain.convert.worker import main; sys.exit(main(request))"
)
_LINE_LIMIT = 100_000_000
_KEPT = ("LD_LIBRARY_PATH",)
"""Variables that torch may need in order to be imported at all."""


class Listed(NamedTuple):
    """A tensor of the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Reader:
    """The tensors of a checkpoint, to be entered. Each can be read as often as is wanted, one at a time."""

    def __init__(self, kind: Literal["dcp", "pt"], paths: Sequence[Path]) -> None:
        self.origin = paths[0] if len(paths) == 1 else paths[0].parent
        self.tensors: dict[str, Listed] = {}
        self.left_out: dict[str, int] = {}
        """Parts of the checkpoint that are not the model -> their tensors."""
        self._request = {"kind": kind, "paths": [os.path.abspath(path) for path in paths], "sys_path": _import_path()}

    def __enter__(self) -> Reader:
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {name: os.environ[name] for name in _KEPT if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,  # an interruption is ours to handle
        )
        try:
            self._ask(self._request)
            answer = self._answer()
            self.tensors = {key: _listed(value) for key, value in answer["tensors"].items()}
            self.left_out = {part: int(count) for part, count in answer["left_out"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._end()
            raise (
                error if isinstance(error, Refused) else self._refuse("the process that read it gave no list")
            ) from error
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def begin(self, key: str) -> None:
        """Ask for a tensor. Its bytes, and nothing else, are then to be read with `fill`."""
        self._ask({"key": key})
        answer = self._answer()
        if answer.get("nbytes") != self.tensors[key].nbytes:
            raise self._refuse(f"tensor {shown(key)} changed while it was read")

    def fill(self, into: memoryview) -> None:
        """The next bytes of the tensor that was asked for."""
        assert self._process.stdout is not None
        while into:
            count = self._process.stdout.readinto(into)  # type: ignore[attr-defined]
            if not count:
                raise self._died()
            into = into[count:]

    def _ask(self, content: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline(_LINE_LIMIT)
        if not line.endswith(b"\n"):
            raise self._died()
        answer = parse_object(line, f"{self.origin}: the process that reads it")
        if "error" in answer:
            # It may quote the checkpoint, which may try to write to the terminal.
            text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(answer["error"]))
            raise self._refuse(text.removeprefix(f"{self.origin}: "))
        return answer

    def _refuse(self, what: str) -> Refused:
        return Refused(f"{self.origin}: {what}")

    def _died(self) -> MeshtrainError:
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            status = None
        how = f"was ended by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        return self._refuse(
            f"the process that read it {how}: the checkpoint is damaged or hostile, or there is too little memory for its largest tensor"
        )

    def _end(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()


def _listed(value: Any) -> Listed:
    name, shape = value
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError
    return Listed(TORCH_OF[name], tuple(shape))


def _import_path() -> list[str]:
    """Where the subprocess finds torch and meshtrain: where they were found here, in this order."""
    home = str(Path(__file__).resolve().parents[2])
    return [home, *(os.path.abspath(entry) for entry in sys.path if entry)]
