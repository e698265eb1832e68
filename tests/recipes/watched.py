"""A process that notes every unpickling and every connection of what it runs, in itself and in the ranks that it forks.

python -m tests.recipes.watched LOG COMMAND: each note is a line of LOG. `COMMAND` is a function here.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = ("127.", "::1", "localhost")


def watch(log: str) -> None:
    """Begin to note, for good."""

    def note(text: str) -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{text}\n".encode())
        os.close(descriptor)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            note(f"pickle.find_class {arguments}")
        elif event in ("socket.connect", "socket.sendto"):
            address = arguments[1]
            if arguments[0].family != socket.AF_UNIX and not str(address[0]).startswith(HERE):
                note(f"{event} {address}")
        elif event == "socket.getaddrinfo" and arguments[0] and not str(arguments[0]).startswith(HERE):
            note(f"{event} {arguments[0]}")

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            note(name)
            return real(*arguments, **options)

        return call

    class Unpickler(pickle.Unpickler):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            note("pickle.Unpickler")
            super().__init__(*arguments, **options)

    sys.addaudithook(hook)
    # Plain data is unpickled without looking for a class, and torch has an unpickler of its own: their calls are noted too.
    for name in ("load", "loads"):
        setattr(pickle, name, noting(f"pickle.{name}", getattr(pickle, name)))
    pickle.Unpickler = Unpickler  # type: ignore[misc]
    import torch

    torch.load = torch.serialization.load = noting("torch.load", torch.load)


def control(folder: Path) -> None:
    """What must be noted."""
    import torch

    pickle.loads(pickle.dumps(3))
    pickle.loads(pickle.dumps(Path("x")))
    pickle.Unpickler(io.BytesIO(pickle.dumps(3))).load()
    torch.save({"a": torch.ones(1)}, folder / "a.pt")
    torch.load(folder / "a.pt", weights_only=True)
    if (pid := os.fork()) == 0:
        pickle.loads(pickle.dumps(4))
        os._exit(0)
    os.waitpid(pid, 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect(("192.0.2.1", 9))  # an address for documents: nothing is sent
        udp.connect(("127.0.0.1", 9))


def program(folder: Path) -> None:
    """Train, be killed, resume, resume elsewhere after damage, start from weights, export."""
    from meshtrain.__main__ import main as tools
    from meshtrain.recipes import llama
    from meshtrain.train.metrics import MetricsFile
    from tests.recipes import tiny

    model = tiny.write_config(folder / "tiny")

    def flags(model: str | None, out: str, **more: object) -> list[str]:
        return tiny.flags(model, folder / out, **{"dp": 2, "save_every": 1, "sample": 3, **more})

    real = MetricsFile.write

    def write(self: MetricsFile, metrics: Any) -> None:
        real(self, metrics)
        if metrics.step == 3 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    MetricsFile.write = write  # type: ignore[method-assign]
    assert llama.main(flags(model, "run")) == 1
    assert llama.main(flags(model, "run")) == 0
    os.truncate(folder / "run/checkpoints/step-00000004/model.safetensors", 99)
    assert llama.main(flags(model, "other", tp=2, dp=1, resume=folder / "run")) == 0
    assert llama.main(flags(None, "third", init_from=folder / "other/export", steps=1)) == 0
    assert (
        tools(["export", str(folder / "other/checkpoints/step-00000004"), str(folder / "bf16"), "--dtype", "bf16"]) == 0
    )


if __name__ == "__main__":
    watch(sys.argv[1])
    {"control": control, "program": program}[sys.argv[2]](Path(sys.argv[1]).parent)
