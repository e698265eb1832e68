"""Which settings may differ when a run goes on, and what --resume may name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshtrain.recipes import llama
from tests.recipes.runs import flags, interrupted, killed, refusal, rows_of, snapshot

pytestmark = pytest.mark.timeout(120)


# Settings that decide the course.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "--seed: it was 0 and is 1"),
        ({"steps": 8}, "--steps: it was 6 and is 8"),
        ({"lr": 0.01}, "--lr: it was 0.02 and is 0.01"),
        ({"warmup": 3}, "--warmup: it was 0 and is 3"),
        ({"schedule": "constant"}, "--schedule: it was 'cosine' and is 'constant'"),
        ({"weight_decay": 0}, "--weight-decay: it was 0.1 and is 0.0"),
        ({"max_norm": "inf"}, "--max-norm: it was 1.0 and is 'inf'"),
        ({"seq_len": 8}, "--seq-len: it was 16 and is 8"),
        ({"global_batch": 16}, "--global-batch: it was 8 and is 16"),
        ({"dtype": "fp64"}, "--dtype: it was 'fp32' and is 'fp64'"),
        ({"config": "debug"}, "--model: its "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_alters_the_course_is_refused_by_name(
    model: str, whole: Any, capfd: pytest.CaptureFixture[str], change: dict[str, object], said: str
) -> None:
    out = whole()
    before = snapshot(out)
    message = refusal(flags(**{"config": model, "out": out, **change}), capfd)
    assert said in message
    name = next(iter(change)).replace("_", "-").replace("config", "model")
    assert f"--allow-change {name} to go on" in re.sub(r"\s+", " ", message)
    assert snapshot(out) == before


def test_all_of_them_are_named_at_once(model: str, whole: Any, capfd: pytest.CaptureFixture[str]) -> None:
    message = re.sub(r"\s+", " ", refusal(flags(model, whole(), steps=30), capfd))
    assert "--steps: it was 6 and is 30; --warmup: it was 0 and is 3, which would alter" in message
    assert "--allow-change steps,warmup to go on" in message


def test_and_the_data_by_its_content(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    out = tmp_path / "run"
    interrupted(flags(model, out, data=corpus), 2)
    elsewhere = tmp_path / "elsewhere.txt"
    corpus.rename(elsewhere)
    corpus.write_text("the lazy dog sleeps. " * 200)
    before = rows_of(out)
    message = refusal(flags(model, out, data=corpus), capfd)
    assert "--data: it has other content than before" in message
    assert rows_of(out) == before
    assert llama.main(flags(model, out, data=elsewhere)) == 0, "the same text may lie elsewhere"


def test_before_the_first_checkpoint_settings_are_held_to_as_well(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    killed(flags(model, out), 1)
    assert "--seed: it was 0 and is 5" in refusal(flags(model, out, seed=5), capfd)
    assert llama.main(flags(model, out, seed=5, allow_change="seed", steps=2)) == 2, "steps is another change"
    assert llama.main(flags(model, out, seed=5, allow_change="seed")) == 0


def test_what_is_named_may_change(model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole(), out)
    first = rows_of(out)
    message = refusal(flags(model, out, steps=9, lr=0.01, allow_change="steps"), capfd)
    assert "--lr: it was 0.02 and is 0.01" in message
    assert llama.main(flags(model, out, steps=9, lr=0.01, allow_change=" steps, lr")) == 0
    assert [row[0] for row in rows_of(out)] == list(range(1, 10))
    assert rows_of(out)[:6] == first
    # What holds from now on are the new settings.
    assert llama.main(flags(model, out, steps=9, lr=0.01)) == 0
    assert "--steps: it was 9 and is 6" in refusal(flags(model, out, lr=0.01), capfd)


def test_the_precision_may_change(model: str, tmp_path: Path, whole: Any) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole(), out)
    assert llama.main(flags(model, out, steps=8, dtype="fp64", allow_change="steps,dtype")) == 0
    assert [row[0] for row in rows_of(out)] == list(range(1, 9))
    assert rows_of(out)[7][1] < rows_of(out)[5][1] + 0.1


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("stpes", "did you mean steps?"),
        ("dp", "--allow-change dp: no setting of that name"),
        ("steps,zzz", "--allow-change zzz"),
    ],
)
def test_an_unknown_name_is_refused(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], names: str, said: str
) -> None:
    message = refusal(flags(model, tmp_path / "run", allow_change=names), capfd)
    assert said in re.sub(r"\s+", " ", message)
    assert not (tmp_path / "run").exists()


# --resume.


def test_never_forbids_it(model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str]) -> None:
    message = refusal(flags(model, whole(), resume="never"), capfd)
    assert "holds a run already, and --resume never forbids" in message
    assert llama.main(flags(model, tmp_path / "new", resume="never", steps=1)) == 0


@pytest.mark.parametrize("below", ["checkpoints/step-00000002", "checkpoints", ""])
def test_a_new_directory_may_follow_another_run(model: str, tmp_path: Path, whole: Any, below: str) -> None:
    """From a checkpoint, the newest of a folder of them, or the newest of a run. What is there stays as it is."""
    source = tmp_path / "source"
    shutil.copytree(whole(), source)
    for step in (4, 6):
        shutil.rmtree(source / f"checkpoints/step-0000000{step}")
    before = snapshot(source)
    out = tmp_path / "out"
    command = flags(model, out, resume=source / below)
    interrupted(command, 3)
    assert llama.main(command) == 0, "the same command goes on"
    assert rows_of(out) == rows_of(whole())[2:]
    assert (out / "export/model.safetensors").read_bytes() == (whole() / "export/model.safetensors").read_bytes()
    assert snapshot(source) == before
    shutil.rmtree(source)
    assert llama.main(command) == 0, "finished, and it needs what it began with no more"


def test_a_new_directory_that_was_killed_at_once_begins_there_again(model: str, tmp_path: Path, whole: Any) -> None:
    out = tmp_path / "out"
    command = flags(model, out, resume=whole() / "checkpoints/step-00000002", save_every=9)
    killed(command, 4)
    assert [row[0] for row in rows_of(out)] == [3, 4]
    assert llama.main(command) == 0
    assert rows_of(out) == rows_of(whole())[2:]


def test_a_path_that_is_not_what_the_directory_goes_on_from_is_refused(
    model: str, tmp_path: Path, whole: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole(), out)
    before = snapshot(out)

    def said(path: Path | str) -> str:
        return re.sub(r"\s+", " ", refusal(flags(model, out, resume=path), capfd))

    assert "holds a newer one, step-00000006" in said(out / "checkpoints/step-00000004")
    assert "is no checkpoint of the run that --out" in said(whole())
    assert "no such directory. Give auto, never, a checkpoint" in said(tmp_path / "nowhere")
    assert "no such directory" in said("")
    assert "no checkpoint to resume from" in said(whole() / "export")
    assert snapshot(out) == before
    # The one that it goes on from anyway.
    assert llama.main(flags(model, out, resume=out / "checkpoints/step-00000006")) == 0
    assert llama.main(flags(model, out, resume=out)) == 0


def test_a_checkpoint_of_another_program_is_refused(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    from meshtrain import save_checkpoint

    net = torch.nn.Linear(2, 2)
    save_checkpoint(net, torch.optim.AdamW(net.parameters()), tmp_path / "theirs", step=1)
    message = refusal(flags(model, tmp_path / "run", resume=tmp_path / "theirs"), capfd)
    assert "was not written by this program" in re.sub(r"\s+", " ", message)
