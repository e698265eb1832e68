"""The token file: right content, cached by content, rebuilt when damaged, mapped rather than read."""

import json
import multiprocessing
import os
import resource
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from meshtrain.data import ByteTokenizer, TokenDataset, TokenFile, open_tokens, prepare_tokens, sources
from meshtrain.data.tokens import FORMAT_VERSION
from meshtrain.errors import Refused


class WideTokenizer(ByteTokenizer):
    """The byte tokenizer with ids moved beyond 16 bits."""

    vocab_size = 70_000
    eos_id: int | None = 69_999
    fingerprint = "wide"
    calls = 0

    def encode_packed(self, texts: Sequence[str], typecode: str) -> list[bytes]:
        type(self).calls += 1
        return super().encode_packed(texts, typecode)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.jsonl").write_text('{"text": "twö"}\n{"text": ""}\n{"text": "three"}\n')
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def ids(file: TokenFile) -> list[int]:
    return file.tokens.to(torch.int64).tolist()


def test_documents_follow_each_other_with_eos_after_each(corpus: Path, cache: Path) -> None:
    file = prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache)
    assert ids(file) == [*b"one", 256, *"twö".encode(), 256, *b"three", 256]
    assert len(file) == 15
    assert file.tokens.dtype == torch.uint16
    assert file.header.documents == 3
    assert file.header.vocab_size == 320
    assert file.path.read_bytes() == array("H", ids(file)).tobytes()


def test_large_vocabularies_take_four_bytes(corpus: Path, cache: Path) -> None:
    file = prepare_tokens(corpus, WideTokenizer(), cache_dir=cache)
    assert file.tokens.dtype == torch.uint32
    assert ids(file)[3] == 69_999
    assert file.path.stat().st_size == 4 * len(file)


def test_without_eos_documents_are_joined(corpus: Path, cache: Path) -> None:
    tokenizer = WideTokenizer()
    tokenizer.eos_id = None
    assert ids(prepare_tokens(corpus, tokenizer, cache_dir=cache)) == [*"onetwöthree".encode()]


def test_pieces_of_a_document_are_joined_without_eos(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 10)
    text = "some\nlines\nof é text\n" * 20
    (tmp_path / "a.txt").write_text(text)
    assert ids(prepare_tokens(tmp_path / "a.txt", ByteTokenizer(), cache_dir=cache)) == [*text.encode(), 256]


def test_the_same_content_is_tokenised_once(corpus: Path, cache: Path, tmp_path: Path) -> None:
    first = prepare_tokens(corpus, WideTokenizer(), cache_dir=cache)
    calls, stamp = WideTokenizer.calls, first.path.stat().st_mtime_ns
    copy = tmp_path / "elsewhere"
    corpus.rename(copy)
    os.utime(copy / "a.txt", (1, 1))
    second = prepare_tokens(copy, WideTokenizer(), cache_dir=cache)
    assert WideTokenizer.calls == calls, "neither place nor time of the files counts"
    assert (second.path, second.path.stat().st_mtime_ns) == (first.path, stamp)
    assert ids(second) == ids(first)


def test_changed_content_tokenizer_or_key_make_another_entry(corpus: Path, cache: Path) -> None:
    paths = {prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache).path}
    paths.add(prepare_tokens(corpus, WideTokenizer(), cache_dir=cache).path)
    stat = (corpus / "a.txt").stat()
    (corpus / "a.txt").write_text("onE")
    os.utime(corpus / "a.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time, other bytes
    changed = prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache)
    paths.add(changed.path)
    assert ids(changed)[:3] == list(b"onE")
    (corpus / "a.txt").rename(corpus / "c.txt")  # another order of the documents
    reordered = prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache)
    paths.add(reordered.path)
    assert ids(reordered)[-4:] == [*b"onE", 256]
    (corpus / "b.jsonl").write_text('{"text": "x", "body": "y"}')
    paths.add(prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache).path)
    other_key = prepare_tokens(corpus / "b.jsonl", ByteTokenizer(), cache_dir=cache, text_key="body")
    assert ids(other_key) == [*b"y", 256]
    paths.add(other_key.path)
    assert len(paths) == 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".json").write_text('{"tokens": '),
        lambda path: path.with_suffix(".json").write_text("[]"),
        lambda path: path.with_suffix(".json").write_text("{}"),
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: _edit(path, itemsize=3),
        lambda path: _edit(path, itemsize="2"),
        lambda path: _edit(path, tokens=-1),
        lambda path: _edit(path, format_version=FORMAT_VERSION + 1),
        lambda path: _edit(path, byteorder="middle"),
        lambda path: _edit(path, content_sha256="0"),
    ],
)
def test_a_damaged_entry_is_made_anew(corpus: Path, cache: Path, damage) -> None:
    good = prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache)
    expected = ids(good)
    damage(good.path)
    again = prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache)
    assert ids(again) == expected
    assert ids(open_tokens(again.path)) == expected


def _edit(path: Path, **changes: object) -> None:
    header = path.with_suffix(".json")
    header.write_text(json.dumps({**json.loads(header.read_text()), **changes}))


def test_a_damaged_file_that_is_opened_by_name_is_refused(corpus: Path, cache: Path) -> None:
    file = prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache)
    file.path.write_bytes(b"123")
    with pytest.raises(Refused, match=r"it has 3 bytes, but 15 tokens of 2 bytes are 30. Make it anew"):
        TokenDataset(file.path, 2, 0)
    with pytest.raises(Refused, match=r"none.json is unusable"):
        open_tokens(cache / "none.bin")


def test_nothing_is_left_when_the_data_is_broken(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\nbroken')
    with pytest.raises(Refused, match="line 2"):
        prepare_tokens(tmp_path / "a.jsonl", ByteTokenizer(), cache_dir=cache)
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.txt", "\ufeff"), ("a.jsonl", '{"text": ""}\n\n')])
def test_data_without_text_is_refused(tmp_path: Path, cache: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(Refused, match=rf"{name}.*empty.*Give files with text"):
        prepare_tokens(tmp_path / name, ByteTokenizer(), cache_dir=cache)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def _prepare(corpus: Path, cache: Path, results) -> None:
    results.put(ids(prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache)))


@pytest.mark.timeout(60)
def test_processes_that_do_it_at_once_all_get_the_whole(corpus: Path, cache: Path) -> None:
    (corpus / "big.txt").write_text("word " * 200_000)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_prepare, args=(corpus, cache, results), daemon=True) for _ in range(4)]
    for worker in workers:
        worker.start()
    got = [results.get(timeout=50) for _ in workers]
    for worker in workers:
        worker.join(timeout=10)
    assert all(one == got[0] and len(one) == 1_000_016 for one in got)
    assert sorted(path.suffix for path in (cache / "tokens").iterdir()) == [".bin", ".json"], "no temporary files"


def test_opening_a_big_file_does_not_read_it(tmp_path: Path) -> None:
    """A sparse file of 8 GiB, far more than would be read in the time or fit the memory growth allowed."""
    path = tmp_path / "big.bin"
    tokens = 4 * 2**30
    with open(path, "wb") as file:
        file.truncate(2 * tokens)
        file.seek(2 * (tokens - 5))
        file.write(bytes([7, 0]))
    header = {
        "format_version": FORMAT_VERSION,
        "byteorder": sys.byteorder,
        "itemsize": 2,
        "tokens": tokens,
        "documents": 1,
        "vocab_size": 320,
        "eos_id": 256,
        "tokenizer_fingerprint": "",
        "content_sha256": "",
    }
    path.with_suffix(".json").write_text(json.dumps(header))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    dataset = TokenDataset(path, 1024, seed=0)
    dataset.batch(0, global_batch=8, dp=1, dp_rank=0)
    assert time.perf_counter() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    assert len(dataset) == (tokens - 1) // 1024
    assert int(open_tokens(path).tokens[-5]) == 7


def test_a_megabyte_of_bytes_takes_well_under_a_second(cache: Path) -> None:
    start = time.perf_counter()
    file = prepare_tokens(None, ByteTokenizer(), cache_dir=cache)
    assert time.perf_counter() - start < 1
    assert len(file) > 900_000
    assert ByteTokenizer().decode(ids(file)).startswith("The Tempest\n")


def test_a_named_cache_that_cannot_be_written_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"cache_dir is .*file/x', which cannot be written"):
        prepare_tokens(corpus, ByteTokenizer(), cache_dir=tmp_path / "file" / "x")
    monkeypatch.setenv("MESHTRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(Refused, match=r"\$MESHTRAIN_CACHE is .*file', which cannot be written"):
        prepare_tokens(corpus, ByteTokenizer())


def test_the_cache_follows_the_environment_and_the_home(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MESHTRAIN_CACHE", str(tmp_path / "env"))
    assert prepare_tokens(corpus, ByteTokenizer()).path.parent == tmp_path / "env" / "tokens"
    monkeypatch.delenv("MESHTRAIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = prepare_tokens(corpus, ByteTokenizer())
    assert file.path.parent == tmp_path / "home" / ".cache" / "meshtrain" / "tokens"
    assert not caplog.records
    (tmp_path / "nohome").write_text("")  # a home in which no folder can be made
    monkeypatch.setenv("HOME", str(tmp_path / "nohome"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = prepare_tokens(corpus, ByteTokenizer())
    assert file.path.is_relative_to(tmp_path / f"meshtrain-cache-{os.getuid()}")
    assert "set MESHTRAIN_CACHE" in caplog.text


def test_progress_is_silent_unless_asked_for(
    corpus: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshtrain.data.progress._SHOW_AFTER_SECONDS", 0)
    prepare_tokens(corpus, WideTokenizer(), cache_dir=cache)
    assert capfd.readouterr() == ("", "")
    prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Tokenising: 100 % of" in err


def test_progress_on_a_terminal_is_a_bar(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert len(prepare_tokens(corpus, ByteTokenizer(), cache_dir=cache, progress=True)) == 15
