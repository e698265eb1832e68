"""The tools: a command is imported when it is run, help and refusals do not wait for torch, and export keeps what it copies whole."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshtrain import __main__ as tools
from meshtrain.commands import COMMANDS
from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.errors import Damaged, Refused
from meshtrain.models.llama import Llama
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.state import export
from meshtrain.state.checkpoint import save_checkpoint
from meshtrain.state.header import read_header

TINY = LlamaConfig(
    vocab_size=57, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)  # fmt: skip
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Llama(TINY)
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path_factory.mktemp("written") / "step-00000007"
    return save_checkpoint(model, optimizer, path, step=7, tokenizer=ByteTokenizer(), max_shard_size="20KB")


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "step-00000007")
    return tmp_path / "step-00000007"


PROBE = """
import sys
from meshtrain.__main__ import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print("\\n", status or 0, *sorted({"torch", "tyro", "rich", "transformers", "numpy"} & set(sys.modules)))
"""


def imported(*arguments: str | Path) -> tuple[int, set[str], float]:
    """(status, heavy packages that were imported, seconds of processor) of a command in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *map(str, arguments)], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    status, *names = done.stdout.splitlines()[-1].split()
    return int(status), set(names), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("arguments", "status", "allowed"),
    [
        (["--help"], 0, set()),
        ([], 2, {"rich"}),
        (["exprot"], 2, {"rich"}),
        (["verify", "--help"], 0, set()),
        (["verify", "--haeders", "x"], 2, {"rich"}),
        (["verify", "nowhere"], 2, {"rich"}),
        (["export", "--help"], 0, {"tyro", "rich"}),
        (["export", "a", "b", "--dtpye", "bf16"], 2, {"tyro", "rich"}),
        (["import", "--help"], 0, {"tyro", "rich"}),
        (["import", "a", "b", "--from", "dcp", "--alow-pickle"], 2, {"tyro", "rich"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_help_and_refusals_do_not_wait_for_torch(arguments: list[str], status: int, allowed: set[str]) -> None:
    found, names, _ = imported(*arguments)
    assert found == status
    assert names <= allowed


def test_the_quick_look_imports_nothing_heavy_and_takes_no_time(checkpoint: Path) -> None:
    status, names, seconds = imported("verify", checkpoint, "--headers")
    assert status == 0
    assert names == set()
    assert seconds < 0.5
    (checkpoint / "config.json").write_text("{}")
    assert imported("verify", checkpoint, "--headers")[:2] == (1, set())


def test_every_command_is_listed_and_has_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["--help"]) == 0
    shown = capsys.readouterr().out
    folder = Path(tools.__file__).resolve().parent / "commands"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == {module for module, _ in COMMANDS.values()}
    for name, (_, text) in COMMANDS.items():
        assert f"  {name:<8} {text}" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verfy", "x"], "did you mean verify?"),
        (["verify", "x", "--jsn"], "did you mean --json?"),
        (["export", "a", "b", "--no-overwrite"], "did you mean --overwrite?"),
        (["import", "a", "b", "--from", "pt", "--allow-pickles"], "did you mean --allow-pickle?"),
        (["import", "a", "b", "--from", "pt"], "--allow-pickle"),
        (["import", "a", "b", "--from", "pt", "--allow-pickle"], "cannot be opened"),
    ],
)
def test_what_is_mistyped_or_missing_is_refused(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tools.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["import", "a", "b"],
        ["import", "a", "b", "--from", "gguf"],
        ["verify"],
        ["verify", "a", "b"],
        ["verify", "a", "--json=yes"],
    ],
)
def test_values_that_do_not_fit_end_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tools.main(arguments)
    assert ended.value.code == 2


def test_a_failure_of_the_system_is_one_line_and_status_1(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert tools.main(["export", str(checkpoint), str(tmp_path / "out")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_export_takes_the_model_of_a_checkpoint_and_leaves_the_rest(checkpoint: Path, tmp_path: Path) -> None:
    assert tools.main(["export", str(checkpoint), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    expected = {
        key: load_file(entry.file)[key]
        for path in checkpoint.glob("model-*")
        for key, entry in read_header(path).items()
    }
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor.bfloat16()) for key, tensor in expected.items())
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 8
    path.write_bytes(raw)


def test_export_refuses_a_damaged_tensor_by_name(checkpoint: Path, tmp_path: Path) -> None:
    file = next(path for path in checkpoint.glob("model-*") if Q in read_header(path))
    flip(file, read_header(file)[Q].offset + 77)
    with pytest.raises(Damaged, match=rf"{file.name}: tensor '{Q}' sums to [0-9a-f]{{8}} where"):
        export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_export_refuses_a_damaged_file_beside_the_weights(name: str, checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / name
    path.write_bytes(path.read_bytes().replace(b":", b": ", 1))
    with pytest.raises(Damaged, match=f"{name}: has .* bytes where"):
        export(checkpoint, tmp_path / "out")
    path.write_bytes(path.read_bytes().replace(b": ", b":\t", 1)[:-1])
    with pytest.raises(Damaged, match=f"{name}: "):
        export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == ["step-00000007"]


def test_damage_of_the_training_state_does_not_concern_an_export(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "training/state.json").unlink()
    assert export(checkpoint, tmp_path / "out").is_dir()


def test_export_replaces_only_what_it_is_told_to(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out).mkdir()
    export(checkpoint, out)  # an empty directory is free
    with pytest.raises(Refused, match=r"exists and is not empty.*--overwrite"):
        export(checkpoint, out)
    export(checkpoint, out, overwrite=True, dtype="fp16")
    assert load_file(out / "model.safetensors")[Q].dtype == torch.float16
    (out / "notes.txt").write_text("mine")
    with pytest.raises(Refused, match=r"notes\.txt"):
        export(checkpoint, out, overwrite=True)
    other = tmp_path / "step-00000008"
    shutil.copytree(checkpoint, other)
    with pytest.raises(Refused, match=r"holds 'training', which is no part of a model"):
        export(checkpoint, other, overwrite=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Refused, match="exists and is not empty"):
        export(checkpoint, tmp_path / "file")


def test_export_of_a_run_says_which_directory_is_meant(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"step-00000007'\. Give a directory inside it"):
        export(tmp_path, tmp_path / "out")


def test_a_tensor_that_was_slipped_in_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = next(iter(sorted(checkpoint.glob("model-*"))))
    state = load_file(file)
    save_file({**state, "more": torch.ones(1)}, file, metadata={"format": "pt"})
    with pytest.raises(Refused, match="'more'"):
        export(checkpoint, tmp_path / "out")
