"""The whole program, with tiny settings: what a run leaves, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshtrain import learning_rate
from meshtrain.recipes import report
from meshtrain.recipes.llama import main
from tests.recipes import tiny

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "peak_memory_bytes"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    """The directory of a run at 2x2 that has ended well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        out = tmp_path_factory.mktemp("runs") / "finished"
        assert main(tiny.flags(model, out, dp=2, tp=2, micro_batch=2)) == 0
    return out


def metrics_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def dtype_of(export: Path) -> str:
    config = json.loads((export / "config.json").read_text())
    return config.get("dtype") or config["torch_dtype"]


def test_metrics_have_one_object_a_step_with_the_fixed_keys(finished: Path) -> None:
    lines = metrics_of(finished)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(set(line) >= KEYS for line in lines)
    assert [line["tokens"] for line in lines] == [128, 256, 384, 512]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2
    assert all(line["peak_memory_bytes"] > 2**20 and line["step_seconds"] > 0 for line in lines)
    assert lines[2]["lr"] == learning_rate(3, peak=0.02, steps=4, warmup=0)


def test_settings_are_recorded_as_they_were_used(finished: Path) -> None:
    content = json.loads((finished / "settings.json").read_text())
    assert content["settings"]["seq-len"] == 16
    assert content["settings"]["weight-decay"] == 0.1
    assert content["mesh"] == {"dp": 2, "tp": 2, "device": "cpu"}
    assert content["plan"]["styles"]["lm_head"] == "head" or content["plan"]["styles"]["lm_head"]["style"] == "head"
    assert content["versions"]["torch"] == str(torch.__version__)
    assert content["model"]["num_hidden_layers"] == 2


def test_export_opens_in_transformers_without_missing_or_unexpected_keys(finished: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export = finished / "export"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    ids = tokenizer("to be")["input_ids"]
    assert ids == list(b"to be")
    loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert torch.isfinite(loss)
    assert model.generation_config.eos_token_id == 256


def test_a_run_goes_on_from_an_export_on_another_mesh(finished: Path, tmp_path: Path) -> None:
    flags = tiny.flags(None, tmp_path / "more", dp=1, tp=1, init_from=finished / "export", steps=1, lr=1e-6, sample=0)
    assert main(flags) == 0  # without --model: the directory says what it holds
    assert metrics_of(tmp_path / "more")[0]["loss"] < metrics_of(finished)[0]["loss"] - 0.2


def test_output_says_what_ran_what_came_out_and_what_to_do_next(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(tiny.flags(model, out, dp=1, tp=2, export=tmp_path / "elsewhere", export_dtype="bf16")) == 0
    shown = capfd.readouterr().out
    first, last = re.search(r"first loss ([\d.]+), last loss ([\d.]+), 4 steps", shown).groups()  # type: ignore[union-attr]
    lines = metrics_of(out)
    assert (float(first), float(last)) == (round(lines[0]["loss"], 4), round(lines[-1]["loss"], 4))
    assert len(re.findall(r"^step +\d/4", shown, re.M)) >= 2
    assert "\x1b" not in shown
    assert "dp 1 x tp 2 = 2 ranks on cpu" in shown
    assert f"--init-from {tmp_path / 'elsewhere'}" in shown
    assert (tmp_path / "elsewhere" / "model.safetensors").exists()
    assert dtype_of(tmp_path / "elsewhere") == "bfloat16"
    assert not (out / "export").exists()


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_other_dtypes(model: str, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / dtype
    assert main(tiny.flags(model, out, dp=2, tp=1, dtype=dtype, activation_checkpoint="full")) == 0
    assert metrics_of(out)[-1]["loss"] < metrics_of(out)[0]["loss"]
    assert dtype_of(out / "export") == {"bf16": "float32", "fp64": "float64"}[dtype]  # bf16 keeps fp32 master weights


def test_no_steps_initialise_and_export_only(model: str, tmp_path: Path) -> None:
    assert main(tiny.flags(model, tmp_path / "a", dp=1, tp=1, steps=0)) == 0
    assert main(tiny.flags(model, tmp_path / "b", dp=2, tp=1, steps=0, warmup=0)) == 0
    weights = [(tmp_path / name / "export" / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    assert metrics_of(tmp_path / "a") == []


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(tiny.flags(model, out, dp=2, tp=1, lr=1e30, max_norm="inf", steps=6)) == 1
    shown = capfd.readouterr().err
    steps = len(metrics_of(out))
    assert re.search(rf"NonFinite: step {steps + 1}: the (loss|gradient norm) is (nan|inf).* rank", shown)
    assert not (out / "export").exists()


def test_ctrl_c_finishes_the_step_exports_where_nothing_is_saved_and_exits_with_130(model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = tiny.flags(model, out, dp=2, tp=1, steps=100000, save_minutes=0)
    command = [sys.executable, "-m", "meshtrain.recipes.llama", *settings]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        metrics, end = out / "metrics.jsonl", time.monotonic() + 100
        while time.monotonic() < end and process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130
    assert (out / "export" / "model.safetensors").exists()
    assert not (out / "checkpoints").exists()
    stopped = int(re.search(r"interrupted after step (\d+) of 100000", shown)[1])  # type: ignore[index]
    assert [line["step"] for line in metrics_of(out)] == list(range(1, stopped + 1))


def test_a_large_model_writes_its_sample_on_the_mesh(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for name, limit in (("alone", 2**30), ("mesh", 0)):
        monkeypatch.setattr(report, "ALONE_BYTES", limit)
        assert main(tiny.flags(model, tmp_path / name, dp=2, tp=1, steps=1, sample=8)) == 0
        shown.append(re.search(r"a sample .*?\n(.*)\n\nmodel ", capfd.readouterr().out, re.S)[1])  # type: ignore[index]
    assert shown[0] == shown[1]
    assert "|" in shown[0]


@pytest.mark.slow
def test_ranks_of_torchrun_are_joined(model: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MESHTRAIN_CACHE": str(tmp_path / "cache")}
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "meshtrain.recipes.llama",
    ]
    joined = tiny.flags(model, tmp_path / "joined", dp=2, tp=1, data=corpus)
    subprocess.run([*start, *joined], env=environment, check=True, timeout=110, capture_output=True)
    assert main(tiny.flags(model, tmp_path / "own", dp=2, tp=1, data=corpus)) == 0
    losses = [[line["loss"] for line in metrics_of(tmp_path / name)] for name in ("joined", "own")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    refused = subprocess.run(
        [*start, *tiny.flags(model, tmp_path / "third", dp=3, tp=1)],
        env=environment,
        timeout=110,
        capture_output=True,
        text=True,
    )
    assert refused.returncode != 0
    assert refused.stderr.count("refused: a mesh of dp 3 x tp 1 needs 3 ranks") == 1
    assert not (tmp_path / "third").exists()
