"""The strict readers against random, mutated and malicious bytes: Refused or what is truly there, in bounded time and memory.

What our header reader takes, the safetensors library must take too, and see the same in it.
"""

from __future__ import annotations

import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from meshtrain.errors import Refused
from meshtrain.state.folder import inspect_pretrained, read_json
from meshtrain.state.header import TensorEntry, read_header
from meshtrain.state.manifest import MANIFEST, FileSums, Manifest, read_manifest
from meshtrain.state.strict_json import VALUES_LIMIT

SLACK = 96 * 1024
"""Bytes of memory that a refusal may take whatever the size of the file: messages, tracebacks."""

NASTY = [
    b"[" * 40, b"{" * 40, b"]", b"}", b'"', b"\\", b",", b":", b"null", b"true", b"NaN", b"-Infinity", b"1e999999", b"-1e999999", b"9" * 5000,
    b"18446744073709551616", b"9223372036854775807", b"-1", b"0.5", b"01", b'"a"', b'""', b'"__metadata__"', b'"dtype"', b'"shape":[',
    b'"data_offsets":[0,0]', b"../", b"..\\\\", b"\\u0000", b"\\ud800", b"\\u002e\\u002e\\u002f", b"\\x", b"\x00", b"\xff", b"\xe2\x80\xae",
    "\N{GRINNING FACE}".encode(), b"\xed\xa0\x80", b" " * 30, b"\n", b'{"dtype":"F32","shape":[],"data_offsets":[0,4]}', b"[0,0]", b"F64", b"F4",
    b'"b":{"dtype":"U8","shape":[0],"data_offsets":[8,8]},',
]  # fmt: skip


def mutated(raw: bytes, chosen: random.Random) -> bytes:
    """The bytes after one to four random changes."""
    data = bytearray(raw)
    for _ in range(chosen.randint(1, 4)):
        at = chosen.randrange(len(data) + 1)
        kind = chosen.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << chosen.randrange(8)
        elif kind == 1:
            del data[at : at + chosen.randint(1, 20)]
        elif kind == 2:
            data[at:at] = chosen.choice(NASTY)
        elif kind == 3:
            data[at : at + chosen.randint(0, 12)] = chosen.choice(NASTY)
        elif kind == 4:
            other = chosen.randrange(len(data) + 1)
            data[at:at] = data[other : other + chosen.randint(1, 60)]
        else:
            data[at : at + chosen.randint(1, 4)] = bytes(chosen.randrange(256) for _ in range(chosen.randint(1, 4)))
    return bytes(data)


def within_bounds(read: Callable[[], Any], nbytes: int) -> Any:
    """What is read, or None when it is refused; fails when it takes more memory or time than its bytes excuse."""
    peaks = []
    # Again where it was much: the interpreter's own table of names grows now and then, whoever happens to be measured.
    while not peaks or (peaks[-1] > 2 * nbytes + SLACK and len(peaks) < 3):
        begin = time.process_time()
        tracemalloc.start()
        try:
            result = read()
        except Refused as refusal:
            assert str(refusal).isprintable() or "\n" in str(refusal)
            result = None
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert time.process_time() - begin < 2
    assert peaks[-1] <= 2 * nbytes + SLACK, (peaks, nbytes)
    return result


def check_header(path: Path, content: bytes) -> bool:
    """Whether the file is taken, and then by the library too."""
    path.write_bytes(content)
    entries = within_bounds(lambda: read_header(path), len(content))
    if entries is None:
        return False
    theirs = {
        name: (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
        for name, info in safetensors.deserialize(content)
    }
    assert {key: (e.dtype, e.shape, content[e.offset : e.offset + e.nbytes]) for key, e in entries.items()} == theirs
    return True


def good_headers(chosen: random.Random) -> bytes:
    """A file as some writer writes it: with or without spaces, metadata, order, padding."""
    fields: dict[str, Any] = {}
    position = 0
    for number in range(chosen.randint(0, 5)):
        shape = [chosen.randint(0, 3) for _ in range(chosen.randint(0, 3))]
        dtype, size = chosen.choice([("F32", 4), ("BF16", 2), ("U8", 1), ("I64", 8), ("BOOL", 1), ("C64", 8)])
        nbytes = size * int(torch.Size(shape).numel())
        entry: dict[str, Any] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + nbytes]}
        if chosen.random() < 0.3:
            entry = dict(sorted(entry.items()))
        fields[chosen.choice(["a.b", "größe", "x y", "\N{GRINNING FACE}", "q" * 60]) + str(number)] = entry
        position += nbytes
    if chosen.random() < 0.5:
        fields["__metadata__"] = {"format": "pt", "note": 'a "quoted" \\ text\n'}
    text = json.dumps(
        fields, ensure_ascii=chosen.random() < 0.5, separators=(",", ":") if chosen.random() < 0.5 else None
    ).encode()
    text += b" " * chosen.randrange(9)
    return struct.pack("<Q", len(text)) + text + bytes(chosen.randrange(256) % 2 for _ in range(position))


def fuzz_headers(path: Path, rounds: int) -> tuple[int, int]:
    """(files taken, files refused) of `rounds` mutated ones."""
    chosen = random.Random(1)
    taken = 0
    for round_ in range(rounds):
        good = good_headers(chosen)
        if round_ % 20 == 0:
            assert check_header(path, good), good
        length = struct.unpack("<Q", good[:8])[0]
        if round_ % 3 == 0:  # anything may change, the length as well
            content = mutated(good, chosen)
        else:  # the text changes, and the length with it, so that more of the reader is reached
            text = mutated(good[8 : 8 + length], chosen)
            content = struct.pack("<Q", len(text)) + text + good[8 + length :]
        taken += check_header(path, content)
    return taken, rounds - taken


def test_mutated_headers_are_refused_or_read_as_the_library_reads_them(tmp_path: Path) -> None:
    taken, refused = fuzz_headers(tmp_path / "x.safetensors", 2000)
    assert taken > 30, "the mutations leave nothing to read: the test shows little"
    assert refused > 1000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_mutated_headers(tmp_path: Path) -> None:
    taken, refused = fuzz_headers(tmp_path / "x.safetensors", 100_000)
    assert taken > 1000
    assert refused > 50_000


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=8
)  # fmt: skip
_sizes = st.integers(-1, 4) | st.sampled_from([2**31, 2**62, 2**63, 2**64]) | _json
_entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F4", "F64", "f32", ""]) | _json,
        "shape": st.lists(_sizes, max_size=3) | _json,
        "data_offsets": st.lists(_sizes, min_size=2, max_size=2) | _json,
        "more": _json,
    },
)
_SETTINGS = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=200, **_SETTINGS)
@given(
    st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), _entries | _json, max_size=4), st.binary(max_size=64)
)
def test_headers_of_any_json_are_refused_or_read_right(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], data: bytes
) -> None:
    text = json.dumps(fields).encode()
    check_header(tmp_path_factory.mktemp("json") / "x.safetensors", struct.pack("<Q", len(text)) + text + data)


@settings(max_examples=150, **_SETTINGS)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read_right(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    check_header(tmp_path_factory.mktemp("bytes") / "x.safetensors", data)
    check_header(tmp_path_factory.mktemp("bytes") / "x.safetensors", struct.pack("<Q", len(data)) + b"{" + data)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_file({"a.w": torch.ones(2), "b.w": torch.ones(3)}, folder / "model-00001-of-00002.safetensors")
    save_file({"c.w": torch.ones(4)}, folder / "model-00002-of-00002.safetensors")
    return folder


def fuzz_indices(folder: Path, rounds: int) -> int:
    chosen = random.Random(2)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {"metadata": {"total_size": 36}, "weight_map": {"a.w": files[0], "b.w": files[0], "c.w": files[1]}}
    good = json.dumps(index, indent=2).encode()
    path = folder / "model.safetensors.index.json"
    nbytes = sum((folder / name).stat().st_size for name in files)
    taken = 0
    for round_ in range(rounds):
        content = good if round_ == 0 else mutated(good, chosen)
        path.write_bytes(content)
        entries: dict[str, TensorEntry] | None = within_bounds(
            lambda: inspect_pretrained(folder), len(content) + nbytes
        )
        if entries is not None:
            assert sorted(entries) == ["a.w", "b.w", "c.w"]
            assert {entry.file.parent for entry in entries.values()} == {folder}
            taken += 1
    path.unlink()
    return taken


def test_mutated_indices_are_refused_or_change_nothing(sharded: Path) -> None:
    assert 2000 > fuzz_indices(sharded, 2000) > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_mutated_indices(sharded: Path) -> None:
    assert 100_000 > fuzz_indices(sharded, 100_000) > 500


def fuzz_manifests(folder: Path, rounds: int) -> int:
    chosen = random.Random(3)
    (folder / "training").mkdir()
    path = folder / MANIFEST
    files = {
        "model.safetensors": FileSums(1000, 0x1234ABCD, 0xFEDC, {"a.w": 1, "größe": 0xFFFFFFFF}),
        "config.json": FileSums(10, 3), "training/state.json": FileSums(20, 7),
    }  # fmt: skip
    good = Manifest(files).to_bytes()
    head = good.index(b",") + 1
    taken = 0
    for round_ in range(rounds):
        rest = mutated(good[head:], chosen)
        # Mostly the sum is right, as whoever makes the file can see to, so that what is behind it is reached.
        content = b'{"crc32": "%08x",' % crc32(rest) + rest if round_ % 4 else mutated(good, chosen)
        path.write_bytes(content)
        manifest = within_bounds(lambda: read_manifest(folder), len(content))
        if manifest is not None:
            taken += 1
            for name, sums in manifest.files.items():
                assert not name.startswith("/")
                assert ".." not in name.split("/")
                assert isinstance(sums.bytes, int)
                assert all(0 <= number < 2**32 for number in (sums.crc32, *sums.tensors.values()))
    return taken


def test_mutated_manifests_are_refused_or_sound(tmp_path: Path) -> None:
    assert 2000 > fuzz_manifests(tmp_path, 2000) > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_mutated_manifests(tmp_path: Path) -> None:
    assert 100_000 > fuzz_manifests(tmp_path, 100_000) > 500


MANY = 2_000_000
ENTRY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'

BOMBS: dict[str, bytes] = {
    "nested lists": b'{"a":' + b"[" * MANY,
    "nested objects": b'{"a":' * (MANY // 5),
    "nested in an entry": b'{"a":{"dtype":' + b"[" * MANY,
    "empty lists": b'{"a":[' + b"[]," * (MANY // 3) + b"[]]}",
    "empty objects": b'{"a":[' + b"{}," * (MANY // 3) + b"{}]}",
    "small strings": b'{"a":[' + b'"ab",' * (MANY // 5) + b'"ab"]}',
    "a huge number": b'{"a":{"dtype":"U8","shape":[' + b"9" * MANY + b'],"data_offsets":[0,0]}}',
    "a huge fraction": b'{"a":0.' + b"1" * MANY + b"}",
    "a million dims": b'{"a":{"dtype":"U8","shape":[' + b"0," * (MANY // 2) + b'0],"data_offsets":[0,0]}}',
    "a long name": b'{"' + b"a" * MANY + b'":' + ENTRY + b"}",
    "a long name of escapes": b'{"' + b"\\u0041" * (MANY // 6) + b'":' + ENTRY + b"}",
    "a long name of faces": b'{"' + "\N{GRINNING FACE}".encode() * (MANY // 4) + b'":' + ENTRY + b"}",
    "an open string": b'{"' + b'\\"' * (MANY // 2),
    "a long dtype": b'{"a":{"dtype":"' + b"F" * MANY + b'","shape":[0],"data_offsets":[0,0]}}',
    "faces in metadata": b'{"__metadata__":{"a":"' + "\N{GRINNING FACE}".encode() * (MANY // 4) + b'"},"b":1}',
    "escapes in metadata": b'{"__metadata__":{"a":"' + b"\\n" * (MANY // 2) + b'"},"b":1}',
    "many names in metadata": b'{"__metadata__":{' + b",".join(b'"%06x":""' % i for i in range(MANY // 12)) + b"}}",
    "the same name again": b"{" + b'"a":%b,' % ENTRY * (MANY // 52) + b'"a":%b}' % ENTRY,
    "white space": b"{" + b" " * MANY + b"]",
    "zeros": b"{" + bytes(MANY),
    "the metadata twice": b'{"__metadata__":{},"__metadata__":{"a":"' + b"b" * MANY + b'"}}',
}  # fmt: skip


GOOD_JSON = {
    "empty lists", "empty objects", "small strings", "a million dims", "a long name", "a long name of escapes", "a long name of faces",
    "a long dtype", "faces in metadata", "escapes in metadata", "many names in metadata", "a huge fraction",
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_in_a_header_costs_no_more_than_its_bytes(kind: str, tmp_path: Path) -> None:
    content = struct.pack("<Q", len(BOMBS[kind])) + BOMBS[kind]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    peak, seconds, error = measured(lambda: read_header(path))
    assert isinstance(error, Refused), error
    assert len(str(error)) < 2000
    # Names are kept until the ten-thousandth is one too many.
    assert peak <= 2 * len(content) + SLACK + (2 * 2**20 if kind == "many names in metadata" else 0), peak / len(
        content
    )
    assert seconds < 10


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_in_other_json_is_refused_in_bounded_memory(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(BOMBS[kind])
    peak, seconds, error = measured(lambda: read_json(path))
    values = sum(BOMBS[kind].count(mark) for mark in (b",", b"[", b"{"))
    assert error is None or isinstance(error, Refused)
    assert (error is None) is (kind in GOOD_JSON), error
    # Text outside ASCII takes up to four bytes a character, and there are two copies of it while it is parsed.
    assert peak <= 8 * len(BOMBS[kind]) + 250 * min(values, VALUES_LIMIT) + SLACK, peak / len(BOMBS[kind])
    assert seconds < 10


def measured(read: Callable[[], Any]) -> tuple[int, float, Exception | None]:
    """(peak of memory, seconds of processor, what was raised)."""
    error: Exception | None = None
    begin = time.process_time()
    tracemalloc.start()
    try:
        read()
    except Exception as caught:
        error = caught
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, time.process_time() - begin, error


def test_too_many_values_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a":[' + b"[]," * VALUES_LIMIT + b"[]]}")
    peak, _, error = measured(lambda: read_json(path))
    assert "above the limit" in str(error)
    assert peak < 2 * path.stat().st_size


@pytest.mark.parametrize("text", ["1e999999", "-1e999999", "1" + "0" * 5000, "1" + "0" * 100_000])
def test_numbers_beyond_all_bounds_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"hidden_size": {text}}}')
    with pytest.raises(Refused, match=r"beyond what a float can hold|limit .* digits"):
        read_json(path)


@pytest.mark.timeout(110)
def test_many_empty_tensors_take_time_and_memory_in_proportion(tmp_path: Path) -> None:
    seconds, peaks = [], []
    for count in (5_000, 50_000):
        text = b"{" + b",".join(b'"layer.%d":%b' % (i, ENTRY) for i in range(count)) + b"}"
        path = tmp_path / f"{count}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        begin = time.process_time()
        entries = read_header(path)
        seconds.append(time.process_time() - begin)
        assert len(entries) == count
        del entries
        peaks.append(measured(lambda path=path: read_header(path))[0] / count)
    assert seconds[1] < 30 * seconds[0] + 1
    assert max(peaks) < 700, "bytes of memory for each tensor"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_million_empty_tensors_are_read_in_bounded_time(tmp_path: Path) -> None:
    text = b"{" + b",".join(b'"%d":%b' % (i, ENTRY) for i in range(1_000_000)) + b"}"
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    begin = time.process_time()
    assert len(read_header(tmp_path / "x.safetensors")) == 1_000_000
    assert time.process_time() - begin < 60


def test_the_length_of_a_header_is_not_taken_for_another_kind_of_file(tmp_path: Path) -> None:
    """A header of 640 bytes begins with the bytes of a pickle."""
    for padding in (640, 0x80, 0x8002, 0x280):
        entry = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        text = entry.ljust(padding)
        (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"x")
        assert list(read_header(tmp_path / "x.safetensors")) == ["a"]


def test_names_in_escapes_are_seen_for_what_they_are(tmp_path: Path, sharded: Path) -> None:
    path = tmp_path / "x.safetensors"
    for name, message in [
        (b"\\u002e\\u002e\\u002fx", "path that leads elsewhere"), (b"\\/etc\\/passwd", "path that leads elsewhere"), (b"a\\u0000", "unprintable"),
        (b"\\ud83d\\ude00\\ud83d", "unprintable"), (b"__metadata\\u005f_", "__metadata__"),
    ]:  # fmt: skip
        text = b'{"%b":%b}' % (name, ENTRY)
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(Refused, match=message):
            read_header(path)
    text = b'{"a":%b,"\\u0061":%b}' % (ENTRY, ENTRY)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(Refused, match="'a' occurs twice"):
        read_header(path)
    index = sharded / "model.safetensors.index.json"
    for file in (
        r"\u002e\u002e\u002fx.safetensors",
        r"x\u0000.safetensors",
        r"\u002fetc\u002fx.safetensors",
        r"\ud800.safetensors",
    ):
        index.write_text(f'{{"weight_map": {{"a.w": "{file}"}}}}')
        with pytest.raises(Refused, match="only plain names"):
            inspect_pretrained(sharded)
    index.write_text(
        r'{"weight_map": {"a.w": "model-00001-of-00002.safetensors", "\u0061.w": "model-00002-of-00002.safetensors"}}'
    )
    with pytest.raises(Refused, match=r"'a\.w' occurs twice"):
        inspect_pretrained(sharded)
    index.unlink()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    real = os.pread

    def changing(change: Callable[[], object]) -> Callable[..., bytes]:
        def pread(descriptor: int, count: int, offset: int) -> bytes:
            if offset == 8:
                change()
            return real(descriptor, count, offset)

        return pread

    for change in (lambda: os.truncate(path, 20), lambda: os.utime(path, (1, 1)), lambda: os.truncate(path, 5000)):
        save_file({"a": torch.ones(100)}, path)
        monkeypatch.setattr(os, "pread", changing(change))
        with pytest.raises(Refused, match="changed while|became shorter"):
            read_header(path)
        monkeypatch.undo()


def test_a_sparse_giant_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    for length, message in [(len(text), "belong to no tensor"), (99_999_999, "JSON")]:
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", length) + text)
            try:
                file.truncate(2**40)
            except OSError:
                pytest.skip("this file system has no such files")
        peak, seconds, error = measured(lambda: read_header(path))
        assert isinstance(error, Refused)
        assert message in str(error)
        assert seconds < 5
        assert peak < 2 * length + SLACK
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(Refused, match="above the limit"):
        read_json(tmp_path / "config.json")


SIZES: list[tuple[Any, Any, str]] = [
    ([2**32, 2**32], [0, 0], "2\\^63 elements"),
    ([2**63 - 1], [0, 2**63 - 1], "U8|truncated|need"),
    ([2**63], [0, 0], "from 0 to 2\\^63"),
    ([2**62, 2], [0, 2**63], "2\\^63"),
    ([1], [2**63, 2**63 + 1], "interval"),
    ([0, 2**62, 2**62], [0, 0], "2\\^63 elements"),
    ([1] * 65, [0, 1], "64 dims"),
    ([10**30], [0, 1], "2\\^63"),
]


@pytest.mark.parametrize(("shape", "offsets", "message"), SIZES)
def test_sizes_that_overflow_are_refused(shape: Any, offsets: Any, message: str, tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"x")
    with pytest.raises(Refused, match=message):
        read_header(tmp_path / "x.safetensors")
