"""The checkpoints of a run: damage, failures, which ones stay, and that each is a model."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from meshtrain.recipes import llama
from meshtrain.recipes.report import LOCK
from tests.recipes import tiny
from tests.recipes.runs import check_same, checkpoints_of, flags, interrupted, refusal, rows_of, snapshot

pytestmark = pytest.mark.timeout(120)


# Damage.


def flip_a_weight(path: Path) -> None:
    """One bit of the middle of a tensor: headers and sizes are as they were."""
    file = path / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def cut_moments(path: Path) -> None:
    os.truncate(path / "training/exp_avg.safetensors", 100)


@pytest.mark.parametrize("damage", [flip_a_weight, cut_moments])
def test_a_damaged_checkpoint_is_passed_over_said_and_replaced(
    model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole(), out)
    shutil.rmtree(out / "export")
    for step in (4, 6):
        damage(out / f"checkpoints/step-0000000{step}")
    capfd.readouterr()
    assert llama.main(flags(model, out)) == 0
    shown = capfd.readouterr().out
    assert re.findall(r"skipped a checkpoint: \S*?(step-\d+)", shown) == ["step-00000006", "step-00000004"]
    assert "after step 2 from" in shown
    check_same(out, whole())
    assert checkpoints_of(out) == [2, 4, 6]
    shutil.rmtree(out / "export")
    assert llama.main(flags(model, out)) == 0
    assert "skipped" not in capfd.readouterr().out, "they were replaced when the run came to their steps"


def test_a_named_run_too_is_followed_from_its_newest_intact_checkpoint(
    model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(whole(), source)
    flip_a_weight(source / "checkpoints/step-00000006")
    assert llama.main(flags(model, tmp_path / "run", resume=source)) == 0
    assert rows_of(tmp_path / "run") == rows_of(whole())[4:]
    # Named itself, it is refused: nobody asked for another one.
    message = refusal(flags(model, tmp_path / "other", resume=source / "checkpoints/step-00000006"), capfd)
    assert "do not sum to what was written" in re.sub(r"\s+", " ", message)


def test_without_an_intact_one_it_is_refused(
    model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole(), out)
    for step in (2, 4, 6):
        cut_moments(out / f"checkpoints/step-0000000{step}")
    message = refusal(flags(model, out), capfd)
    assert "none of its 3 checkpoint(s) is intact" in message
    assert "exp_avg.safetensors: has 100 bytes" in re.sub(r"\s+", " ", message)


# Other uses of the directory.


def test_two_runs_at_once_do_not_share_a_directory(
    model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole(), out)
    shutil.rmtree(out / "export")
    before = snapshot(out)
    with open(out / LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the run that is at work there does
        message = refusal(flags(model, out), capfd)
    assert "another run is at work there just now" in message
    assert snapshot(out) == before
    assert llama.main(flags(model, out)) == 0


def test_without_checkpoints_an_interrupted_run_exports(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, settings = tmp_path / "run", {"save_every": 0, "save_minutes": 0}
    interrupted(flags(model, out, **settings), 2)
    assert "interrupted after step 3 of 6; exporting the model as it is" in capfd.readouterr().out
    assert (out / "export/model.safetensors").exists()
    assert not (out / "checkpoints").exists()
    before = snapshot(out)
    message = re.sub(r"\s+", " ", refusal(flags(model, out, **settings), capfd))
    assert "left no checkpoint to go on from, and nothing is overwritten" in message
    assert snapshot(out) == before


def test_which_checkpoints_stay_and_that_minutes_count(model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = {"save_every": 0, "save_minutes": 1e-6, "keep": 1, "keep_every": 4}
    assert llama.main(flags(model, out, **settings)) == 0
    assert sorted(os.listdir(out / "checkpoints")) == ["latest", "step-00000004", "step-00000006"]
    assert llama.main(flags(model, tmp_path / "all", save_every=1, keep=0)) == 0
    assert checkpoints_of(tmp_path / "all") == [1, 2, 3, 4, 5, 6]


def full_disk(step: int, patch: pytest.MonkeyPatch) -> None:
    """Have the checkpoint of a step find no space."""
    real = os.mkdir

    def full(path: Any, *arguments: Any, **options: Any) -> None:
        if f".step-0000000{step}.tmp" in str(path):
            raise OSError(28, "No space left on device", str(path))
        real(path, *arguments, **options)

    patch.setattr(os, "mkdir", full)


@pytest.mark.parametrize("then", ["stop", "warn"])
def test_a_save_that_fails_ends_the_run_or_is_reported(
    model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str], then: str
) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        full_disk(4, patch)
        status = llama.main(flags(model, out, on_save_error=then))
    shown = capfd.readouterr()
    if then == "warn":
        assert status == 0
        assert "a checkpoint could not be written, and the run goes on without it" in shown.out
        assert checkpoints_of(out) == [2, 6]
        check_same(out, whole())
    else:
        assert status == 1
        assert "SaveFailed" in shown.err
        assert checkpoints_of(out) == [2]
        assert llama.main(flags(model, out)) == 0
        check_same(out, whole())
    assert "No space left on device" in shown.out + shown.err


def test_an_interrupted_run_that_could_not_save_exports_instead(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    full_disk(3, monkeypatch)
    interrupted(flags(model, out, on_save_error="warn"), 2)
    assert "interrupted after step 3 of 6; exporting the model as it is" in capfd.readouterr().out
    assert (out / "export/model.safetensors").exists()
    assert checkpoints_of(out) == [2]


# Every checkpoint is a model.


def test_every_checkpoint_opens_in_transformers_with_the_same_logits(model: str, whole: Any) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from meshtrain import load_pretrained
    from meshtrain.models.llama import Llama

    ids = torch.tensor([list(b"to be, or not to")])
    seen = []
    for step in (2, 4, 6):
        path = whole() / f"checkpoints/step-0000000{step}"
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        ours = Llama(tiny.config())
        load_pretrained(ours, path)
        with torch.no_grad():
            wanted = ours(ids)
            assert torch.allclose(theirs(ids).logits, wanted, rtol=0, atol=1e-5)
        seen.append(wanted)
        assert transformers.AutoTokenizer.from_pretrained(path)("to be")["input_ids"] == list(b"to be")
    assert not torch.allclose(seen[0], seen[1], atol=1e-3)
    assert (whole() / "checkpoints/step-00000006/model.safetensors").read_bytes() == (
        whole() / "export/model.safetensors"
    ).read_bytes()


def test_its_files_are_read_by_the_safetensors_library(whole: Any, tmp_path: Path) -> None:
    path = whole() / "checkpoints/step-00000004"
    weights = load_file(path / "model.safetensors")
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = load_file(path / f"training/{kind}.safetensors")
        assert {name: t.shape for name, t in moments.items()} == {name: t.shape for name, t in weights.items()}
        assert all(t.isfinite().all() and t.any() for t in moments.values())
    save_file(weights, tmp_path / "copy.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "copy.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
