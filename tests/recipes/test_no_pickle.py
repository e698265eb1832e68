"""Training, saving, resuming and exporting unpickle nothing, and talk to nobody but this host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def notes(folder: Path, command: str) -> list[str]:
    """What the watcher has noted while a command ran."""
    log = folder / "log"
    done = subprocess.run(
        [sys.executable, "-m", "tests.recipes.watched", str(log), command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "MESHTRAIN_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.timeout(120)
def test_nothing_is_unpickled_and_nobody_is_called(tmp_path: Path) -> None:
    assert notes(tmp_path, "program") == []
    assert (tmp_path / "bf16/model.safetensors").exists()
    left = {
        path.suffix
        for name in ("run", "other", "third", "bf16")
        for path in (tmp_path / name).rglob("*")
        if path.is_file()
    }
    assert left - {""} <= {".json", ".jsonl", ".safetensors"}


@pytest.mark.timeout(120)
def test_the_watcher_sees_what_it_should(tmp_path: Path) -> None:
    """A check of the check."""
    seen = notes(tmp_path, "control")
    assert seen.count("pickle.loads") == 3, "one of them in a forked process"
    assert sum(note.startswith("pickle.find_class") and "Path" in note for note in seen) >= 1
    assert "pickle.Unpickler" in seen
    assert "torch.load" in seen
    assert "socket.connect ('192.0.2.1', 9)" in seen
    assert not any("127.0.0.1" in note for note in seen)
