"""`verify` finds each fault that a checkpoint or model directory can have, names it, and is quiet about good ones."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshtrain.convert.llama import llama_shapes
from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.errors import Refused
from meshtrain.models.llama import Llama
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.state.checkpoint import save_checkpoint
from meshtrain.state.header import read_header
from meshtrain.state.manifest import MANIFEST, FileSums, Manifest, read_manifest
from meshtrain.state.verify import verify
from meshtrain.state.verify_findings import LEVELS, Finding, Report
from meshtrain.state.verify_values import scan

TINY = LlamaConfig(
    vocab_size=57, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)  # fmt: skip
Q = "model.layers.0.self_attn.q_proj.weight"
STEP = "step-00000007"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints as the product writes them: one whole, one in shards."""
    torch.manual_seed(0)
    model = Llama(TINY)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(8).view(1, 8)
    model(ids, ids).backward()
    optimizer.step()
    root = tmp_path_factory.mktemp("written") / "checkpoints"
    for step, size in ((7, "5GB"), (8, "20KB")):
        save_checkpoint(
            model, optimizer, root / f"step-{step:08}", step=step, tokenizer=ByteTokenizer(), max_shard_size=size
        )
    (root / "latest").write_text("step-00000008\n")
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def looked_at(path: Path, full: bool = True) -> list[Report]:
    return list(verify(path, full=full, shapes=llama_shapes))


def found(path: Path, full: bool = True) -> list[Finding]:
    return [finding for report in looked_at(path, full) for finding in report.findings]


def bad(path: Path, full: bool = True) -> list[str]:
    """What is damaged or wrong, as lines."""
    return [finding.line() for finding in found(path, full) if finding.level in ("damaged", "wrong")]


@pytest.mark.parametrize("full", [True, False])
def test_good_checkpoints_have_no_findings(root: Path, full: bool) -> None:
    assert found(root, full) == []
    assert found(root.parent, full) == []
    reports = looked_at(root, full)
    assert [report.path.name for report in reports] == ["checkpoints", "step-00000007", STEP[:-1] + "8"]
    model, shards = reports[1:]
    assert model.tensors == shards.tensors == 3 * 21 + 1  # the model, two moments, one rank's generators
    assert model.files == 4
    assert shards.files > 10
    assert model.bytes_read == (
        sum(e.nbytes for f in (root / STEP).rglob("*.safetensors") for e in read_header(f).values()) if full else 0
    )


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def reseal(folder: Path) -> None:
    """A manifest that says of every file what it is now: as if it had been written so."""
    from zlib import crc32

    from meshtrain.state.manifest import sums_of_tensors

    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name == MANIFEST:
            continue
        raw = path.read_bytes()
        files[name] = FileSums(len(raw), crc32(raw))
        if name.endswith(".safetensors") and not name.endswith("generators.safetensors"):
            entries = read_header(path)
            head = raw[: int.from_bytes(raw[:8], "little") + 8]
            tensors = {key: (crc32(raw[e.offset : e.offset + e.nbytes]), e.nbytes) for key, e in entries.items()}
            files[name] = sums_of_tensors(head, tensors)
    (folder / MANIFEST).write_bytes(Manifest(files).to_bytes())


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def bit_in_weights(folder: Path) -> None:
    flip(folder / "model.safetensors", read_header(folder / "model.safetensors")[Q].offset + 5)


def bit_in_moments(folder: Path) -> None:
    flip(folder / "training/exp_avg_sq.safetensors", read_header(folder / "training/exp_avg_sq.safetensors")[Q].offset)


def bit_in_header(folder: Path) -> None:
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw.replace(b"q_proj", b"q_prok", 1))


def bit_in_generators(folder: Path) -> None:
    flip(folder / "training/generators.safetensors", 2000)


def bit_in_tokenizer(folder: Path) -> None:
    flip(folder / "tokenizer.json", 300)


def bit_in_state(folder: Path) -> None:
    path = folder / "training/state.json"
    path.write_bytes(path.read_bytes().replace(b'"lr"', b'"lR"', 1))


def bit_in_manifest(folder: Path) -> None:
    flip(folder / MANIFEST, 200)


def truncated(folder: Path) -> None:
    os.truncate(folder / "training/exp_avg.safetensors", 3000)


def longer(folder: Path) -> None:
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"\0")


def file_missing(folder: Path) -> None:
    (folder / "training/exp_avg.safetensors").unlink()


def config_missing(folder: Path) -> None:
    (folder / "config.json").unlink()


def manifest_missing(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def state_missing(folder: Path) -> None:
    (folder / "training/state.json").unlink()
    reseal(folder)


def moment_missing(folder: Path) -> None:
    rewritten(folder / "training/exp_avg.safetensors", lambda state: state.__delitem__(Q))
    reseal(folder)


def moment_of_another_shape(folder: Path) -> None:
    rewritten(folder / "training/exp_avg.safetensors", lambda state: state.update({Q: torch.zeros(3, 2)}))
    reseal(folder)


def nan_in_weights(folder: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[Q][1, 2:5] = torch.nan
        state[Q][0, 0] = -torch.inf

    rewritten(folder / "model.safetensors", change)
    reseal(folder)


def infinity_in_bf16_moments(folder: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[Q] = state[Q].bfloat16()
        state[Q][0, 0] = torch.inf

    rewritten(folder / "training/exp_avg.safetensors", change)
    reseal(folder)


def another_shape(folder: Path) -> None:
    rewritten(folder / "model.safetensors", lambda state: state.update({Q: torch.zeros(32, 16)}))
    reseal(folder)


def key_missing(folder: Path) -> None:
    rewritten(folder / "model.safetensors", lambda state: state.__delitem__("lm_head.weight"))
    reseal(folder)


def key_too_many(folder: Path) -> None:
    rewritten(
        folder / "model.safetensors", lambda state: state.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)})
    )
    reseal(folder)


def another_config(folder: Path) -> None:
    edit_json(folder / "config.json", num_key_value_heads=1)
    reseal(folder)


def another_step(folder: Path) -> None:
    edit_json(folder / "training/state.json", step=6)
    reseal(folder)


def step_is_text(folder: Path) -> None:
    edit_json(folder / "training/state.json", step="7")
    reseal(folder)


def link_out(folder: Path) -> None:
    shutil.move(folder / "config.json", folder.parent / "elsewhere.json")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere.json")


def training_is_a_link(folder: Path) -> None:
    shutil.move(folder / "training", folder.parent / "elsewhere")
    (folder / "training").symlink_to(folder.parent / "elsewhere")


def manifest_contradicts_itself(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    name = "model.safetensors"
    sums = manifest.files[name]
    manifest.files[name] = FileSums(sums.bytes, sums.crc32 ^ 1, sums.header, sums.tensors)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())


def manifest_knows_another_tensor(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    manifest.files["model.safetensors"].tensors["more"] = 1
    (folder / MANIFEST).write_bytes(manifest.to_bytes())


# Fault -> what must be said of it; whether the quick look finds it too.
FAULTS: dict[Callable[[Path], None], tuple[list[str], bool]] = {
    bit_in_weights: ([f"damaged  model.safetensors: tensor '{Q}': sums to"], False),
    bit_in_moments: ([f"damaged  training/exp_avg_sq.safetensors: tensor '{Q}': sums to"], False),
    bit_in_header: (["damaged  model.safetensors: its header sums to", "q_prok", "is missing, though config.json"], True),
    bit_in_generators: (["damaged  training/generators.safetensors: its content sums to"], True),
    bit_in_tokenizer: (["damaged  tokenizer.json: its content sums to"], True),
    bit_in_state: (["damaged  training/state.json: its content sums to"], True),
    bit_in_manifest: (["damaged  training/manifest.json:"], True),
    truncated: (["damaged  training/exp_avg.safetensors: has 3000 bytes where", "truncated", "its exp_avg is missing"], True),
    longer: (["damaged  model.safetensors: has", "belong to no tensor"], True),
    file_missing: (["damaged  training/exp_avg.safetensors: is missing, though training/manifest.json lists it", f"tensor '{Q}': its exp_avg is missing"], True),
    config_missing: (["damaged  config.json: is missing"], True),
    manifest_missing: (["damaged  training/manifest.json: is missing, so this is no complete checkpoint"], True),
    state_missing: (["damaged  training/state.json: is missing"], True),
    moment_missing: ([f"damaged  tensor '{Q}': its exp_avg is missing, though training/state.json lists it"], True),
    moment_of_another_shape: ([f"wrong    training/exp_avg.safetensors: tensor '{Q}': has shape [3, 2], its parameter [32, 32]"], True),
    nan_in_weights: ([f"wrong    model.safetensors: tensor '{Q}': holds 3 NaN and 1 infinities among 1024 numbers"], False),
    infinity_in_bf16_moments: ([f"wrong    training/exp_avg.safetensors: tensor '{Q}': holds 0 NaN and 1 infinities"], False),
    another_shape: ([f"wrong    model.safetensors: tensor '{Q}': has shape [32, 16], by config.json it is [32, 32]", "exp_avg_sq"], True),
    key_missing: (["wrong    tensor 'lm_head.weight': is missing, though config.json tells of it"], True),
    key_too_many: (["tensor 'model.layers.2.mlp.up_proj.weight': is none of the model that config.json describes"], True),
    another_config: (["k_proj.weight': has shape [16, 32], by config.json it is [8, 32]", "v_proj"], True),
    another_step: (["wrong    training/state.json: is of step 6, the directory's name of 7: somebody renamed it"], True),
    step_is_text: (["wrong    training/state.json: step is '7' and not a number of steps"], True),
    link_out: (["config.json: is a symbolic link to", "outside its folder"], True),
    training_is_a_link: (["wrong    training: is a symbolic link"], True),
    manifest_contradicts_itself: (["training/manifest.json: contradicts itself about model.safetensors"], False),
    manifest_knows_another_tensor: (["damaged  model.safetensors: tensor 'more': is missing, though training/manifest.json lists it"], False),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_found_and_named(fault: Callable[[Path], None], root: Path) -> None:
    fault(root / STEP)
    messages, quickly = FAULTS[fault]
    lines = bad(root / STEP)
    for message in messages:
        assert any(message in line for line in lines), (message, lines)
    assert bool(bad(root / STEP, full=False)) is quickly
    worst = "damaged" if any(line.startswith("damaged") for line in lines) else "wrong"
    assert looked_at(root / STEP)[0].verdict == worst
    assert found(root / "step-00000008") == []


def test_all_faults_are_listed_at_once_and_only_the_faulty_checkpoint_is_blamed(root: Path) -> None:
    for fault in (bit_in_weights, bit_in_moments, bit_in_tokenizer, longer):
        fault(root / STEP)
    reports = looked_at(root)
    assert [report.verdict for report in reports] == ["good", "damaged", "good"]
    text = "\n".join(finding.line() for finding in reports[1].findings)
    for part in ("model.safetensors: has", "exp_avg_sq.safetensors: tensor", "tokenizer.json"):
        assert part in text


def test_a_damaged_header_does_not_hide_what_else_is_damaged(root: Path) -> None:
    bit_in_header(root / STEP)
    path = root / STEP / "model.safetensors"
    flip(path, read_header(path)["lm_head.weight"].offset)
    lines = bad(root / STEP)
    assert any("its header sums to" in line for line in lines)
    assert any("tensor 'lm_head.weight': sums to" in line for line in lines)


def test_a_flipped_bit_anywhere_is_found(root: Path) -> None:
    """Of every file but the manifest's own guard, which `read_manifest` tests: 60 random bits."""
    chosen = random.Random(0)
    files = [path for path in (root / STEP).rglob("*") if path.is_file()]
    for _ in range(60):
        path = chosen.choice(files)
        before = path.read_bytes()
        flip(path, chosen.randrange(len(before)))
        assert bad(root / STEP), path
        path.write_bytes(before)
    assert not bad(root / STEP)


def duplicate(folder: Path) -> None:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    state, other = load_file(first), load_file(second)
    save_file({**other, next(iter(state)): torch.ones(2)}, second, metadata={"format": "pt"})


def lost_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def index_of_another(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["new.weight"] = index["weight_map"][Q]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_leads_out(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][Q] = "../step-00000007/model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        (duplicate, ["which model.safetensors.index.json does not place there but in model-00001-of"]),
        (lost_shard, ["names 'model-00002-of", "is missing"]),
        (index_of_another, ["holds 'new.weight', but it does not"]),
        (index_leads_out, ["only plain names"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_index_is_held_against_its_files(fault: Callable[[Path], None], messages: list[str], root: Path) -> None:
    folder = root / "step-00000008"
    fault(folder)
    shutil.rmtree(folder / "training")  # a model directory, without a manifest that would tell
    folder.rename(root / "model")
    lines = bad(root / "model", full=False)
    for message in messages:
        assert any(message in line for line in lines), lines


def test_a_model_directory_is_checked_without_a_manifest(root: Path) -> None:
    folder = root / "model"
    shutil.copytree(root / STEP, folder, ignore=shutil.ignore_patterns("training"))
    (finding,) = found(folder)
    assert finding.level == "note"
    assert "no manifest" in finding.what
    edit_json(folder / "config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"])
    assert any("GPT2LMHeadModel" in finding.what and "not checked" in finding.what for finding in found(folder))
    assert not bad(folder)
    edit_json(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="gelu")
    assert any(finding.level == "warning" and "hidden_act" in finding.what for finding in found(folder))
    (folder / "tokenizer.json").write_text('{"model": ')
    assert any("tokenizer.json: is not JSON" in line for line in bad(folder))
    (folder / "config.json").write_text("[]")
    assert any("config.json: starts with" in line for line in bad(folder))


def test_what_lies_about_is_told_and_is_no_damage(root: Path) -> None:
    folder = root / STEP
    (folder / "notes.txt").write_text("mine")
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    save_file({"a": torch.ones(1)}, folder / "adapter.safetensors")
    reports = looked_at(folder)
    assert reports[0].verdict == "good"
    lines = sorted(finding.line() for finding in reports[0].findings)
    assert {line.split(":")[0].split()[1] for line in lines} == {
        "notes.txt",
        "pytorch_model.bin",
        "adapter.safetensors",
    }
    assert any("pytorch_model.bin: is a pickle, which is never read" in line for line in lines)
    (folder / "adapter.safetensors").write_bytes(bytes(20))
    assert any("adapter.safetensors" in line for line in bad(folder))


def test_what_stands_beside_checkpoints(root: Path) -> None:
    (root / ".step-00000009.tmp-0123456789abcdef").mkdir()
    (root / "latest").write_text("step-00000003\n")
    shutil.copytree(root / STEP, root.parent / "export", ignore=shutil.ignore_patterns("training"))
    flip(root.parent / "export/config.json", 0)
    reports = looked_at(root.parent)
    assert [report.path.name for report in reports] == ["checkpoints", STEP, "step-00000008", "export"]
    assert [finding.level for finding in reports[0].findings] == ["warning", "note"]
    assert "names 'step-00000003', which is no checkpoint here" in reports[0].findings[0].what
    assert reports[3].verdict == "damaged"


def test_one_file(root: Path) -> None:
    path = root / STEP / "model.safetensors"
    (report,) = looked_at(path)
    assert report.verdict == "good"
    assert report.tensors == 21
    rewritten(path, lambda state: state.update({"x": torch.tensor([1.0, torch.nan])}))
    assert bad(path) == ["wrong    tensor 'x': holds 1 NaN and 0 infinities among 2 numbers"]
    assert bad(path, full=False) == []
    os.truncate(path, 100)
    assert "past the end of the file" in bad(path)[0]


def test_where_there_is_nothing_to_verify(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles/pytorch_model.bin").write_bytes(b"")
    (tmp_path / "a.bin").write_bytes(b"")
    for name, message in [
        ("nowhere", "no such file or directory"), ("empty", "it is empty"), ("pickles", "'pytorch_model.bin' but no safetensors"),
        ("a.bin", r"expected a directory or a \.safetensors file"),
    ]:  # fmt: skip
        with pytest.raises(Refused, match=message):
            looked_at(tmp_path / name)


@pytest.mark.timeout(30)
def test_special_files_do_not_hang_it(root: Path) -> None:
    folder = root / STEP
    for name in ("config.json", "model.safetensors", "tokenizer.json", "training/state.json", MANIFEST):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    (root / "latest").unlink()
    os.mkfifo(root / "latest")
    lines = bad(root)
    for name in ("config.json", "model.safetensors", "training/state.json", MANIFEST):
        assert any(name in line and "not a regular file" in line for line in lines), name


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.float8_e5m2,
        torch.float8_e4m3fn,
    ],
)
def test_numbers_that_are_none_are_counted_in_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    many = 3_000_000 if dtype == torch.bfloat16 else 5000  # more than one buffer
    values = torch.ones(many).to(dtype)
    for position in (0, many // 2, many - 1):
        values[position] = torch.nan
    infinite = dtype != torch.float8_e4m3fn
    if infinite:
        values[1] = -torch.inf
    save_file({"a": torch.ones(3), "v": values, "i": torch.ones(3, dtype=torch.int64)}, tmp_path / "x.safetensors")
    each = {
        one.key: (one.nan, one.infinite)
        for one in scan(tmp_path / "x.safetensors", read_header(tmp_path / "x.safetensors"))
    }
    assert each == {"a": (0, 0), "i": (0, 0), "v": (3, int(infinite))}


def test_a_hole_is_summed_and_told_but_not_read(tmp_path: Path) -> None:
    """A file that claims a terabyte of data and holds none: as after a power cut, or made to keep us busy."""
    from zlib import crc32

    from meshtrain.state.header import TensorInfo, make_header

    head, starts = make_header([TensorInfo("big", "F32", (2**38,)), TensorInfo("end", "U8", (4096,))])
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(head)
        try:
            file.truncate(starts["end"] + 4096)
        except OSError:
            pytest.skip("this file system has no such files")
    begin = time.monotonic()
    (report,) = looked_at(tmp_path)
    assert time.monotonic() - begin < 20
    assert report.verdict == "good"
    assert any(f.tensor == "big" and "were never written" in f.what for f in report.findings)
    small, starts = make_header([TensorInfo("z", "U8", (9_000_001,))])
    with open(path, "wb") as file:
        file.write(small)
        file.truncate(starts["z"] + 9_000_001)
        file.seek(starts["z"] + 9_000_000)
        file.write(b"x")
    (one,) = scan(path, read_header(path))
    assert one.crc32 == crc32(bytes(9_000_000) + b"x")
    assert one.unwritten > 4_000_000


def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    save_file({f"t{i}": torch.zeros(2_000_000) for i in range(10)}, tmp_path / "model.safetensors")
    looked_at(tmp_path)
    tracemalloc.start()
    looked_at(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20  # the buffer itself is no Python memory


def test_what_is_pruned_meanwhile_is_gone_and_not_damaged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshtrain.state import verify_folder as module

    real = module._check_moments

    def removed_meanwhile(folder: Path, *rest: Any) -> Any:
        if folder.name == STEP:
            folder.rename(root / f".{STEP}.old-0123456789abcdef")
        return real(folder, *rest)

    monkeypatch.setattr(module, "_check_moments", removed_meanwhile)
    reports = looked_at(root)
    assert [(report.gone, report.findings) for report in reports] == [(False, []), (True, []), (False, [])]


def test_a_checkpoint_that_is_replaced_or_emptied_meanwhile_is_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshtrain.state import verify_folder as module

    real = module._check_moments

    def emptied(folder: Path, *rest: Any) -> Any:
        (folder / "model.safetensors").unlink()
        return real(folder, *rest)

    def replaced(folder: Path, *rest: Any) -> Any:
        folder.rename(root / "aside")
        shutil.copytree(root / "aside", folder)
        return real(folder, *rest)

    for change in (replaced, emptied):
        monkeypatch.setattr(module, "_check_moments", change)
        assert [report.gone for report in looked_at(root / STEP)] == [True]


@pytest.mark.slow
def test_a_run_that_saves_and_prunes_is_never_called_damaged(root: Path) -> None:
    """The real thing, against the clock: checkpoints come and go while they are verified."""
    stop = threading.Event()

    def run() -> None:
        step = 100
        while not stop.is_set():
            shutil.copytree(root / STEP, root / ".new")
            edit_json(root / ".new/training/state.json", step=step)
            reseal(root / ".new")
            (root / ".new").rename(root / f"step-{step:08}")
            old = root / f"step-{step - 2:08}"
            if old.exists():
                old.rename(root / ".old")
                shutil.rmtree(root / ".old")
            step += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        gone = 0
        for _ in range(60):
            reports = looked_at(root)
            assert not [
                finding for report in reports for finding in report.findings if finding.level in ("damaged", "wrong")
            ]
            gone += sum(report.gone for report in reports)
    finally:
        stop.set()
        thread.join()
    assert gone, "nothing was pruned meanwhile: the test shows nothing"


def run_command(*arguments: str | Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "meshtrain", "verify", *map(str, arguments)], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_the_command_lists_the_worst_first_and_ends_with_the_verdict(root: Path) -> None:
    (root / STEP / "notes.txt").write_text("mine")
    nan_in_weights(root / STEP)
    (root / STEP / "more\x1b[2J.txt").write_text("mine")
    truncated(root / "step-00000008".replace("8", "7"))
    status, shown, _ = run_command(root.parent, "--headers")
    lines = shown.splitlines()
    assert status == 1
    levels = [line.split()[0] for line in lines[:-1]]
    assert levels == sorted(levels, key=lambda level: LEVELS.index(level))  # type: ignore[arg-type]
    assert levels[0] == "damaged"
    assert "warning" in levels
    assert lines[0].startswith(f"damaged  checkpoints/{STEP}/training/exp_avg.safetensors: has 3000 bytes")
    assert lines[-1].startswith("damaged (1 of 2): 2 looked at, ")
    assert "\x1b" not in shown


def test_the_command_answers_in_json(root: Path) -> None:
    status, shown, _ = run_command(root, "--json", "--headers")
    answer = json.loads(shown)
    assert status == 0
    assert answer["verdict"] == "good"
    assert [Path(one["path"]).name for one in answer["checked"]] == ["checkpoints", STEP, "step-00000008"]
    another_step(root / STEP)
    status, shown, _ = run_command(root, "--json", "--headers")
    answer = json.loads(shown)
    assert status == 1
    assert answer["verdict"] == "wrong"
    assert answer["findings"][0] == {
        "level": "wrong", "file": f"{STEP}/training/state.json", "tensor": None,
        "what": "is of step 6, the directory's name of 7: somebody renamed it",
    }  # fmt: skip


def test_the_command_refuses_what_is_nothing(tmp_path: Path) -> None:
    status, shown, error = run_command(tmp_path)
    assert (status, shown) == (2, "")
    assert "nothing to verify" in error


HOSTILE_JSON = ['{"optimizer": 3, "step": 7}', '{"optimizer": {"moments": {"exp_avg": {"float32": [3, null, [1], {"a": 1}]}, "x": 5}}, "step": true}',
                '{"architectures": 5, "model_type": []}', '{"model_type": "llama", "architectures": {"a": 1}}', '{"model_type": "llama", "hidden_size": [1], "vocab_size": {}}',
                '{"model_type": "llama", "vocab_size": 1e400}', '{"a": 1, "a": 2}', "{" * 5000, '{"step": 1' + "0" * 5000 + "}"]  # fmt: skip


@pytest.mark.parametrize("name", ["config.json", "training/state.json", MANIFEST, "model.safetensors.index.json"])
def test_hostile_json_is_a_finding_and_no_crash(name: str, root: Path) -> None:
    folder = root / "step-00000008"
    for text in HOSTILE_JSON:
        (folder / name).write_text(text)
        assert bad(folder, full=False), text
