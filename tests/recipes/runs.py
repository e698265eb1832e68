"""Runs of the whole program for tests of resuming: stopped in some way at a step, and what they have left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from meshtrain.recipes import llama
from meshtrain.train.metrics import MetricsFile, StepMetrics
from tests.recipes import tiny

Row = tuple[int, float, float, float, int]
"""Step, loss, gradient norm, rate, tokens."""


def flags(config: str | None, out: Path, **more: object) -> list[str]:
    """Six steps on two ranks, and a checkpoint after every second one."""
    return tiny.flags(config, out, **{"dp": 2, "steps": 6, "save_every": 2, "sample": 0, **more})


def rows_of(out: Path) -> list[Row]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"], line["tokens"]) for line in lines]


def checkpoints_of(out: Path) -> list[int]:
    return sorted(int(name.partition("-")[2]) for name in os.listdir(out / "checkpoints") if name.startswith("step-"))


def signal_after(step: int, what: signal.Signals, patch: pytest.MonkeyPatch) -> None:
    """Have the first rank get a signal when it has recorded a step."""
    real = MetricsFile.write

    def write(self: MetricsFile, metrics: StepMetrics) -> None:
        real(self, metrics)
        if metrics.step == step:
            os.kill(os.getpid(), what)

    patch.setattr(MetricsFile, "write", write)


def killed(arguments: list[str], step: int) -> None:
    """Run it, and have it die without a word after recording a step."""
    with pytest.MonkeyPatch.context() as patch:
        signal_after(step, signal.SIGKILL, patch)
        assert llama.main(arguments) == 1


def interrupted(arguments: list[str], step: int) -> None:
    """Run it, and ask it to stop after a step: it makes the one that it has begun."""
    with pytest.MonkeyPatch.context() as patch:
        signal_after(step, signal.SIGINT, patch)
        assert llama.main(arguments) == 130


def check_same(out: Path, reference: Path) -> None:
    """Every step once, and every number and weight as in the run that never stopped."""
    assert rows_of(out) == rows_of(reference)
    assert [row[0] for row in rows_of(out)] == list(range(1, 7))
    exports = [(folder / "export/model.safetensors").read_bytes() for folder in (out, reference)]
    assert exports[0] == exports[1]


def refusal(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """What it says when it refuses."""
    capfd.readouterr()
    assert llama.main(arguments) == 2
    return capfd.readouterr().err


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.name != ".lock"
    }
