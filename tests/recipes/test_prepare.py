"""What is refused before a rank starts, and that a refusal leaves no trace."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain import launch
from meshtrain.errors import Refused
from meshtrain.recipes.llama import main
from meshtrain.recipes.prepare import prepare
from meshtrain.recipes.runfile import read_run_file, read_settings
from tests.recipes import tiny

ROOT = Path(__file__).resolve().parent.parent.parent


def prepared(arguments: list[str]):
    return prepare(read_settings(arguments, program="program", description=""))


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 3}, ["global batch of 8", "dp 3", "9"]),
        ({"dp": 0}, ["--dp is 0", "1 or more"]),
        ({"micro_batch": 3}, ["micro-batch 3", "a micro-batch of 2"]),
        ({"seq_len": 65}, ["--seq-len 65", "max_position_embeddings 64", "shorter"]),
        ({"seq_len": 0}, ["--seq-len is 0"]),
        ({"steps": -1}, ["--steps is -1"]),
        ({"warmup": 9}, ["--warmup is 9", "--steps (4)"]),
        ({"lr": 0}, ["--lr is 0", "positive"]),
        ({"max_norm": 0}, ["--max-norm is 0", "inf"]),
        ({"weight_decay": "nan"}, ["--weight-decay is nan"]),
        ({"timeout": -1}, ["--timeout -1", "from 1 to"]),
        ({"timeout": "1e300"}, ["--timeout 1e+300", "from 1 to"]),
        ({"seed": -1}, ["--seed is -1"]),
        ({"sample": -1}, ["--sample is -1"]),
        ({"save_every": -1}, ["--save-every is -1", "0 or more"]),
        ({"save_minutes": "nan"}, ["--save-minutes is nan", "finite"]),
        ({"keep": -1}, ["--keep is -1", "0 or more"]),
        ({"keep_every": -2}, ["--keep-every is -2", "0 or more"]),
        ({"max_restarts": -1}, ["--max-restarts is -1", "0 or more"]),
        ({"resume": "nowhere"}, ["--resume nowhere", "no such directory", "auto"]),
        ({"allow_change": "sead"}, ["--allow-change sead", "did you mean seed"]),
        ({"model": "deebug"}, ["'deebug'", "Did you mean debug"]),
        ({"init_from": "absent"}, ["--init-from absent", "no tokenizer"]),
        ({"tp": 3}, ["3", "q_proj"]),
        ({"plan": "meshtrain.models.llama:parallel_pan"}, ["parallel_pan", "parallel_plan"]),
        ({"data": "absent.txt"}, ["absent.txt"]),
        ({"tokenizer": "absent.json"}, ["absent.json"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_settings_are_refused_and_leave_no_trace(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    changes: dict,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run", lambda *a, **k: pytest.fail("ranks were started"))
    before = snapshot(tmp_path)
    assert main(tiny.flags(model, tmp_path / "out", **changes)) == 2
    shown = capfd.readouterr().err
    assert shown.startswith("refused: ")
    assert all(word in shown for word in words), shown
    assert snapshot(tmp_path) == before


def test_a_run_that_left_an_export_and_no_checkpoint_is_not_overwritten(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "export").mkdir(parents=True)
    (out / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(Refused, match=r"holds a run already, and --resume never forbids"):
        prepared(tiny.flags(model, out, resume="never"))
    assert not prepared(tiny.flags(model, out)).finished, "it was killed before its first checkpoint: it starts anew"
    (out / "export" / "model.safetensors").write_text("")
    with pytest.raises(Refused, match=r"left no checkpoint to go on from.*another directory, or remove"):
        prepared(tiny.flags(model, out))
    assert (out / "metrics.jsonl").read_text() == "{}\n"


def test_an_export_never_replaces_a_model_nor_what_it_starts_from(model: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    assert main(tiny.flags(model, tmp_path / "first", steps=0, export=source)) == 0
    for target in (source, source / "inner", tmp_path):
        with pytest.raises(Refused, match=r"--export"):
            prepared(tiny.flags(None, tmp_path / "second", init_from=source, export=target))
    with pytest.raises(Refused, match=r"holds a model already"):
        prepared(tiny.flags(model, tmp_path / "third", export=source))
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"not a directory"):
        prepared(tiny.flags(model, tmp_path / "file" / "deeper"))


def test_weights_that_do_not_fit_are_refused_from_their_headers(model: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    assert main(tiny.flags(model, tmp_path / "first", steps=0, export=source)) == 0
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(Refused, match=r"mlp\.(gate|up|down)_proj\.weight.* has shape"):
        prepared(tiny.flags(None, tmp_path / "second", init_from=source))
    (source / "tokenizer.json").unlink()
    with pytest.raises(Refused, match=r"holds no tokenizer\.json.*--tokenizer"):
        prepared(tiny.flags(None, tmp_path / "second", init_from=source))


def test_a_disk_without_room_for_the_model_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(Refused, match=r"GB free.*--export-dtype"):
        prepared(tiny.flags(model, tmp_path / "out"))


def test_the_debug_model_takes_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    run = prepared(["--out", str(tmp_path / "out"), "--device", "cpu"])
    assert (run.config.vocab_size, run.config.eos_token_id) == (run.tokenizer.vocab_size, run.tokenizer.eos_id)
    assert run.tokens is not None


def test_the_run_file_of_the_8b_model_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**12))
    settings = read_run_file(ROOT / "recipes" / "llama3.1-8b.toml")
    settings = replace(
        settings, mesh=replace(settings.mesh, device="cpu"), output=replace(settings.output, out=str(tmp_path / "out"))
    )
    run = prepare(settings)
    assert run.parameters == 8_030_261_248
    assert settings.mesh.dp * settings.mesh.tp == 8
    assert run.generation["eos_token_id"] == 128001


def test_under_a_launcher_the_number_of_ranks_must_fit(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(Refused, match=r"dp 2 x tp 1 needs 2 ranks, but there are 4"):
        prepared(tiny.flags(model, tmp_path / "out", dp=2))
    # The data is left to the ranks: the first of each host makes the tokens for the others.
    assert prepared(tiny.flags(model, tmp_path / "out", dp=4)).tokens is None
