"""The program stopped in every way, and started again: it goes on as if it had never stopped."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshtrain.data import batches
from meshtrain.recipes import llama
from tests.recipes.runs import check_same, checkpoints_of, flags, interrupted, killed, refusal, rows_of, snapshot

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parent.parent.parent


# Stopped, and the same command again.


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_from_its_newest_checkpoint(
    model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str], dtype: str
) -> None:
    out = tmp_path / "run"
    killed(flags(model, out, dtype=dtype), 5)
    assert [row[0] for row in rows_of(out)] == [1, 2, 3, 4, 5]
    assert checkpoints_of(out)[0] == 2, "that of step 4 may have been under way"
    assert not (out / "export").exists()
    capfd.readouterr()
    assert llama.main(flags(model, out, dtype=dtype)) == 0
    assert re.search(r"resume +after step [24] from .*/checkpoints/step-0000000[24]\n", capfd.readouterr().out)
    check_same(out, whole(dtype=dtype))
    assert checkpoints_of(out) == [2, 4, 6]
    assert (out / "checkpoints/latest").read_text() == "step-00000006\n"


def test_one_killed_before_its_first_checkpoint_starts_anew(model: str, tmp_path: Path, whole: Any) -> None:
    out = tmp_path / "run"
    killed(flags(model, out), 1)
    assert not (out / "checkpoints").exists() or checkpoints_of(out) == []
    assert llama.main(flags(model, out)) == 0
    check_same(out, whole())


def test_an_interrupted_run_saves_and_goes_on(
    model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    interrupted(flags(model, out), 2)
    shown = capfd.readouterr().out
    assert "interrupted after step 3 of 6; it can go on from its checkpoint" in shown
    assert checkpoints_of(out) == [2, 3]
    assert not (out / "export").exists()
    command = re.search(r"^    (\S+ -m meshtrain\.recipes\.llama .*)$", shown, re.M)
    assert command is not None
    assert f"--out {out}" in command[1]
    # The command that it says, on the flags that matter.
    told = command[1].split()[3:]
    assert llama.main(told) == 0
    check_same(out, whole())
    assert checkpoints_of(out) == [3, 4, 6], "keep is 3"


def test_ctrl_c_to_the_command_itself_and_the_command_again(model: str, tmp_path: Path, whole: Any) -> None:
    out, settings = tmp_path / "run", {"steps": 40, "save_every": 0, "save_minutes": 10}
    command = [sys.executable, "-m", "meshtrain.recipes.llama", *flags(model, out, **settings)]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        metrics, end = out / "metrics.jsonl", time.monotonic() + 100
        while time.monotonic() < end and process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130
    (stop,) = checkpoints_of(out)
    assert [row[0] for row in rows_of(out)] == list(range(1, stop + 1))
    assert llama.main(flags(model, out, **settings)) == 0
    assert rows_of(out) == rows_of(whole(**settings))
    assert len(rows_of(out)) == 40


def test_a_torn_line_of_metrics_and_lines_of_lost_steps_are_made_again(model: str, tmp_path: Path, whole: Any) -> None:
    out = tmp_path / "run"
    interrupted(flags(model, out), 2)
    shutil.rmtree(out / "checkpoints/step-00000003")
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 5.')
    assert llama.main(flags(model, out)) == 0
    check_same(out, whole())


def test_a_finished_run_is_left_alone(
    model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    out = whole()
    before = snapshot(out)
    capfd.readouterr()
    assert llama.main(flags(model, out)) == 0
    assert capfd.readouterr().out.strip() == (
        f"{out} holds this run, and it is finished: nothing is left to do. Its model is {out / 'export'}"
    )
    assert snapshot(out) == before
    # All but its export is there: that is all that is made.
    shutil.copytree(out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/export")
    assert llama.main(flags(model, tmp_path / "run")) == 0
    check_same(tmp_path / "run", out)


def test_a_run_may_start_from_weights_and_go_on_without_reading_them_again(
    model: str, tmp_path: Path, whole: Any
) -> None:
    source = whole() / "export"
    settings = {"init_from": source, "lr": 0.001}
    assert llama.main(flags(None, tmp_path / "straight", **settings)) == 0
    killed(flags(None, tmp_path / "run", **settings), 5)
    assert llama.main(flags(None, tmp_path / "run", **settings)) == 0
    check_same(tmp_path / "run", tmp_path / "straight")


def strictly(raw: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(raw, parse_constant=refuse)


def test_an_infinite_setting_is_no_hindrance_and_all_files_are_json(model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupted(flags(model, out, max_norm="inf"), 2)
    for file in (out / "settings.json", out / "checkpoints/step-00000003/training/state.json"):
        strictly(file.read_text())
    assert llama.main(flags(model, out, max_norm="inf")) == 0
    assert [row[0] for row in rows_of(out)] == list(range(1, 7))


# On another mesh, with another division.


def note_samples(file: Path, patch: pytest.MonkeyPatch) -> None:
    """Have every rank append the number of each sample that it takes."""
    real = batches.sequence_of_sample

    def noted(sample: int, count: int, seed: int) -> int:
        with open(file, "a") as log:
            log.write(f"{sample}\n")
        return real(sample, count, seed)

    patch.setattr(batches, "sequence_of_sample", noted)


def samples_in(file: Path) -> Counter[int]:
    return Counter(map(int, file.read_text().split()))


def check_close(out: Path, reference: Path) -> None:
    for row, right in zip(rows_of(out), rows_of(reference), strict=True):
        assert (row[0], *row[3:]) == (right[0], *right[3:])
        assert math.isclose(row[1], right[1], rel_tol=1e-11)
        assert math.isclose(row[2], right[2], rel_tol=1e-10)


def test_a_run_goes_on_on_another_mesh_with_another_micro_batch(
    model: str, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, reference = tmp_path / "run", whole(dtype="fp64")
    with monkeypatch.context() as patch:
        note_samples(tmp_path / "first", patch)
        interrupted(flags(model, out, dtype="fp64"), 2)
    note_samples(tmp_path / "second", monkeypatch)
    assert llama.main(flags(model, out, dtype="fp64", dp=1, tp=2, micro_batch=4)) == 0
    check_close(out, reference)
    assert samples_in(tmp_path / "first") == dict.fromkeys(range(24), 1)
    assert samples_in(tmp_path / "second") == dict.fromkeys(range(24, 48), 2), "both tp ranks take the same"


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_and_on_any_mesh(model: str, tmp_path: Path, whole: Any, dp: int, tp: int) -> None:
    out = tmp_path / "run"
    interrupted(flags(model, out, dtype="fp64"), 2)
    assert llama.main(flags(model, out, dtype="fp64", dp=dp, tp=tp)) == 0
    check_close(out, whole(dtype="fp64"))


def test_the_global_batch_changes_when_that_is_allowed_and_each_sample_comes_once(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    interrupted(flags(model, out), 1)
    assert checkpoints_of(out) == [2]
    said = refusal(flags(model, out, global_batch=4), capfd)
    assert "--global-batch: it was 8 and is 4" in said
    note_samples(tmp_path / "samples", monkeypatch)
    interrupted(flags(model, out, global_batch=4, allow_change="global-batch"), 3)
    assert llama.main(flags(model, out, global_batch=16, allow_change="global-batch")) == 0
    assert samples_in(tmp_path / "samples") == dict.fromkeys(range(16, 16 + 2 * 4 + 2 * 16), 1)
    assert [row[4] for row in rows_of(out)] == [128, 256, 320, 384, 640, 896]
