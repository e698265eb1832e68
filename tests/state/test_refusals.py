"""Checkpoints that must not be loaded: each is refused by name, with the rule and a way out, before a
weight is touched.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from meshtrain.errors import Refused
from meshtrain.state import export, inspect_pretrained, load_pretrained, read_header
from meshtrain.state.publish import check_target


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": [begin, end],
    }


DATA = bytes(8)
ONE = json.dumps(entry()).encode()

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes, too short"),
    "seven bytes": (bytes(7), "7 bytes, too short"),
    "truncated data": (raw({"a": entry()}, bytes(5)), "file has .*truncated"),
    "trailing bytes": (raw({"a": entry()}, bytes(9)), "belong to no tensor"),
    "header past the end": (raw({"a": entry()}, DATA, length=5000), "5000 goes past the end"),
    "header of exabytes": (raw({"a": entry()}, DATA, length=2**63), "above the limit of 100000000"),
    "header cut": (raw({"a": entry()}, DATA, length=20), "not valid JSON"),
    "text": (b"hello, I am a poem about weights\n" * 9, "above the limit"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "gguf": (b"GGUF" + bytes(60), "GGUF"),
    "pickle": (pickle.dumps({"a": 1}, protocol=2) + bytes(20), "pickle, which is never loaded"),
    "a list": (raw(b"[1, 2, 3]"), "not with '{'"),
    "utf-16": (raw('{"a": 1}'.encode("utf-16-le")[:14] + b"\0\0"), "JSON"),
    "not utf-8": (raw(b'{"\xff\xfe": 1}'), "not UTF-8"),
    "deep nesting": (raw(b'{"a":' + b"[" * 200_000), "nested too deep"),
    "duplicate names": (raw(b'{"a":' + ONE + b',"a":' + ONE + b"}", DATA), "'a' occurs twice"),
    "duplicate "
    "field": (raw(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', DATA), "'dtype' occurs twice"),
    "huge "
    "integer": (raw(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', DATA), "JSON"),
    "NaN": (raw(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', DATA), "list of integers"),
    "path as name": (raw({"../../etc/x": entry()}, DATA), "path that leads elsewhere"),
    "absolute path as name": (raw({"/etc/x": entry()}, DATA), "path that leads elsewhere"),
    "NUL in name": (raw({"a\0b": entry()}, DATA), "unprintable"),
    "escape sequence in name": (raw({"\x1b[2Ja": entry()}, DATA), "unprintable"),
    "half a surrogate in name": (raw(b'{"\\ud800":' + ONE + b"}", DATA), "unprintable"),
    "empty name": (raw({"": entry()}, DATA), "name is empty"),
    "entry is a string": (raw({"a": "F32"}, DATA), "described by a str"),
    "unknown dtype": (raw({"a": entry(dtype="F99")}, DATA), "F99.*is not one of BOOL"),
    "dtype is a number": (raw({"a": entry(dtype=32)}, DATA), "'32' is not one of"),
    "no dtype": (raw({"a": {"shape": [2], "data_offsets": [0, 8]}}, DATA), "dtype 'None'"),
    "negative size": (raw({"a": entry(shape=(-2,))}, DATA), r"\[-2\].*from 0 to"),
    "size is a bool": (raw({"a": entry(0, 4, (True,))}, DATA), r"\[True\].*integers"),
    "size is a float": (raw({"a": entry(shape=(2.0,))}, DATA), "integers"),
    "shape is a number": (raw({"a": entry(shape=2)}, DATA), "list of integers"),
    "shape overflows": (raw({"a": entry(0, 0, (2**40, 2**40, 0))}), "2\\^63 elements"),
    "too many dims": (raw({"a": entry(0, 4, (1,) * 65)}, DATA[:4]), "64 dims"),
    "shape larger than data": (raw({"a": entry(shape=(3,))}, DATA), r"hold 8 bytes.*need 12"),
    "offsets reversed": (raw({"a": entry(8, 0)}, DATA), r"interval"),
    "offsets negative": (raw({"a": entry(-8, 0)}, DATA), "interval"),
    "three "
    "offsets": (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, DATA), "two integers"),
    "overlap": (raw({"a": entry(), "b": entry(4, 12)}, bytes(12)), "'b'.*overlaps"),
    "same bytes twice": (raw({"a": entry(), "b": entry()}, DATA), "overlaps"),
    "hole": (raw({"a": entry(), "b": entry(12, 20)}, bytes(20)), "'b'.*leaves a hole"),
    "hole at the start": (raw({"a": entry(8, 16)}, bytes(16)), "leaves a hole"),
    "metadata of numbers": (raw({"__metadata__": {"format": 1}, "a": entry()}, DATA), "__metadata__"),
    "metadata is a tensor": (raw({"__metadata__": entry(), "a": entry()}, DATA), "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_file_is_refused(kind: str, tmp_path: Path) -> None:
    content, message = HOSTILE[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(Refused, match=message) as caught:
        inspect_pretrained(tmp_path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_good_file_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw({"a": entry(), "b": entry(8, 8, (0, 3))}, DATA))
    entries = inspect_pretrained(tmp_path)
    assert entries["a"].nbytes == 8
    assert entries["b"].shape == (0, 3)


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(Refused, match="not a regular file"):
        inspect_pretrained(tmp_path)
    with pytest.raises(Refused, match="not a regular file"):
        read_header("/dev/zero")
    with pytest.raises(Refused, match="not a regular file"):
        read_header(tmp_path)
    with pytest.raises(Refused, match="No such file"):
        inspect_pretrained(tmp_path / "nowhere")


def write_model(folder: Path, **tensors: torch.Tensor) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors or {"a": torch.ones(2)}, folder / "model-00001-of-00001.safetensors")


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SHARD = "model-00001-of-00001.safetensors"

INDEXES: dict[str, tuple[Any, str]] = {
    "points outside": ({"a": f"../other/{SHARD}"}, "only plain names"),
    "absolute": ({"a": f"/tmp/{SHARD}"}, "only plain names"),
    "backslash": ({"a": f"..\\{SHARD}"}, "only plain names"),
    "not safetensors": ({"a": "model.bin"}, "only plain names"),
    "hidden file": ({"a": ".safetensors"}, "only plain names"),
    "number as file": ({"a": 3}, "only plain names"),
    "list as map": ([SHARD], "weight_map must map"),
    "empty map": ({}, "weight_map must map"),
    "no map": (None, "weight_map must map"),
    "missing file": ({"a": "model-00002-of-00002.safetensors"}, "is missing from"),
    "key not in file": ({"a": SHARD, "b": SHARD}, "holds 'b', but it does not"),
    "key not in index": ({"a": SHARD}, "'c', which .* does not place"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_bad_index_is_refused(kind: str, tmp_path: Path) -> None:
    weight_map, message = INDEXES[kind]
    write_model(tmp_path / "other")
    tensors = {"a": torch.ones(2), "c": torch.ones(2)} if kind == "key not in index" else {}
    write_model(tmp_path / "model", **tensors)
    write_index(tmp_path / "model", weight_map)
    with pytest.raises(Refused, match=message):
        inspect_pretrained(tmp_path / "model")


def test_links_are_followed_inside_the_folder_and_into_the_hub_cache_only(tmp_path: Path) -> None:
    write_model(tmp_path / "other")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "other" / SHARD)
    with pytest.raises(Refused, match=r"symbolic link to .*outside its folder; copy"):
        inspect_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / "real.safetensors").write_bytes((tmp_path / "other" / SHARD).read_bytes())
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert list(inspect_pretrained(folder)) == ["a"]
    (tmp_path / "hub/blobs").mkdir(parents=True)
    (tmp_path / "hub/blobs/abc").write_bytes((tmp_path / "other" / SHARD).read_bytes())
    (tmp_path / "hub/snapshots/1").mkdir(parents=True)
    (tmp_path / "hub/snapshots/1/model.safetensors").symlink_to("../../blobs/abc")
    assert list(inspect_pretrained(tmp_path / "hub/snapshots/1")) == ["a"]


def test_unclear_or_unusable_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="it is empty"):
        inspect_pretrained(tmp_path)
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("data.pkl", b"")
    with pytest.raises(Refused, match=r"pytorch_model\.bin.*pickles are never loaded"):
        inspect_pretrained(tmp_path)
    with pytest.raises(Refused, match=r"expected a model directory or a \.safetensors file"):
        inspect_pretrained(tmp_path / "pytorch_model.bin")
    write_model(tmp_path)
    with pytest.raises(Refused, match=f"it has '{SHARD}'. Give the path"):
        inspect_pretrained(tmp_path)
    write_index(tmp_path, {"a": SHARD})
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match="remove the stale one"):
        inspect_pretrained(tmp_path)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2, bias=False)
        self.register_buffer("count", torch.tensor(0))


def good() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in Net().state_dict().items()}


def missing(state: dict[str, torch.Tensor]) -> None:
    del state["second.weight"]


def misspelt(state: dict[str, torch.Tensor]) -> None:
    state["secnd.weight"] = state.pop("second.weight")


def unexpected(state: dict[str, torch.Tensor]) -> None:
    state["third.weight"] = torch.ones(1)


def transposed(state: dict[str, torch.Tensor]) -> None:
    state["first.weight"] = state["first.weight"].T.contiguous()


def integers(state: dict[str, torch.Tensor]) -> None:
    state["first.bias"] = torch.ones(4, dtype=torch.int64)


def quantised(state: dict[str, torch.Tensor]) -> None:
    state["first.bias"] = torch.ones(4).to(torch.float8_e4m3fn)


def no_buffer(state: dict[str, torch.Tensor]) -> None:
    del state["count"]


def many(state: dict[str, torch.Tensor]) -> None:
    missing(state)
    transposed(state)
    for i in range(20):
        state[f"extra.{i}"] = torch.ones(1)


UNFIT: dict[Callable[[dict[str, torch.Tensor]], None], str] = {
    missing: r"1 missing.*'second\.weight'",
    misspelt: r"'second\.weight' \(near: 'secnd\.weight'\)",
    unexpected: r"1 unexpected.*'third\.weight'",
    transposed: r"'first\.weight' has shape \[3, 4\], the model \[4, 3\]",
    integers: r"'first\.bias' has dtype I64.*torch\.float32",
    quantised: r"'first\.bias' has dtype F8_E4M3.*torch\.float32",
    no_buffer: r"1 missing.*'count'",
    many: r"(?s)1 missing.*20 unexpected.*and 12 more.*1 of another kind",
}


@pytest.mark.parametrize("change", UNFIT, ids=lambda change: change.__name__)
def test_weights_that_do_not_fit_are_refused_and_none_is_loaded(
    change: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    state = good()
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(Refused, match=UNFIT[change]) as caught:
        load_pretrained(model, tmp_path)
    assert "config.json" in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_stale_rotary_tables_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    save_file(
        {**good(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
        tmp_path / "model.safetensors",
    )
    load_pretrained(Net(), tmp_path)


def test_a_directory_with_a_users_files_is_never_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    check_target(target)
    target.mkdir()
    check_target(target)
    (target / "notes.txt").write_text("precious")
    with pytest.raises(Refused, match=r"holds 'notes\.txt', which is no part of a model"):
        check_target(target)
    save_file({"a": torch.ones(2)}, target / "model.safetensors")
    with pytest.raises(Refused, match=r"notes\.txt"):
        check_target(target)
    (target / "notes.txt").rename(target / "config.json")
    check_target(target)
    (target / "model.safetensors").unlink()
    with pytest.raises(Refused, match="holds no weights"):
        check_target(target)
    with pytest.raises(Refused, match="not a directory"):
        check_target(target / "config.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one"),
        ({"dtype": torch.int8}, "int8 is not one"),
        ({"max_shard_size": "5 parsecs"}, "max_shard_size '5 parsecs'"),
        ({"max_shard_size": 0}, "max_shard_size 0"),
        ({"max_shard_size": "-5GB"}, "max_shard_size '-5GB'"),
    ],
)
def test_bad_options_of_export_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_file(good(), tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=message):
        export(tmp_path, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_export_never_replaces_its_source(tmp_path: Path) -> None:
    save_file(good(), tmp_path / "model.safetensors")
    for out in (tmp_path, tmp_path.parent):
        with pytest.raises(Refused, match="is or holds the source"):
            export(tmp_path, out)
