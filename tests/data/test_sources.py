"""Reading documents: every kind of file, streamed, and every fault named."""

import json
import random
from pathlib import Path

import pytest

from meshtrain.data import find_files, sources
from meshtrain.data.sources import BUILTIN_TEXT, read_documents
from meshtrain.errors import Refused


def documents(path: Path, key: str = "text") -> list[str]:
    found, held = [], ""
    for piece in read_documents(find_files(path), key):
        held += piece.text
        if piece.ends_document:
            found.append(held)
            held = ""
    assert not held, "the last piece must end its document"
    return found


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_the_embedded_text_is_plain_english_of_about_a_megabyte() -> None:
    (path,) = find_files(None)
    assert path == BUILTIN_TEXT
    text = path.read_text(encoding="ascii")
    assert 900_000 < len(text) < 1_200_000
    assert "To be, or not to be" in text
    assert "gutenberg" not in text.lower()
    notice = path.with_name("NOTICE").read_text(encoding="utf-8")
    assert "public domain" in notice and "Permission is hereby granted" in notice


def test_a_folder_is_read_in_order_of_path_without_hidden_files(tmp_path: Path) -> None:
    write(tmp_path / "b.md", "second")
    write(tmp_path / "a" / "z.txt", "first")
    write(tmp_path / "c.jsonl", '{"text": "third"}\n\n{"text": ""}\n{"text": "fourth"}')
    write(tmp_path / ".hidden" / "x.txt", "no")
    write(tmp_path / ".x.txt", "no")
    assert documents(tmp_path) == ["first", "second", "third", "fourth"]


def test_files_of_other_kinds_in_a_folder_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "dataset_info.json", "{}")
    assert documents(tmp_path) == ["text"]
    assert "skipping 1 files" in caplog.text and "dataset_info.json" in caplog.text


def test_text_keeps_its_bytes_but_for_a_byte_order_mark(tmp_path: Path) -> None:
    assert documents(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo \n\n")) == ["one\r\ntwo \n\n"]
    assert documents(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "x"}\r\n')) == ["x"]


@pytest.mark.parametrize("alphabet", ["ab \n", "aé漢😀\n \t", "xyz", "\n"])
def test_long_texts_come_in_pieces_that_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alphabet: str) -> None:
    """Blocks of 7 bytes split characters and lines anywhere: nothing may be lost, doubled or reported as
    broken."""
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 7)
    monkeypatch.setattr(sources, "_LONGEST_PIECE", 40)
    chosen = random.Random(1)
    for length in [1, 2, 6, 7, 8, 50, 500]:
        text = "".join(chosen.choice(alphabet) for _ in range(length))
        path = write(tmp_path / "a.txt", text)
        pieces = list(read_documents([path]))
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(0 < len(piece.text) <= 48 for piece in pieces)
        assert sum(piece.bytes_read for piece in pieces) == len(text.encode())


def test_texts_are_cut_between_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut elsewhere would change the ids at the cut for most tokenizers."""
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 16)
    path = write(tmp_path / "a.txt", "a line\n\nanother\n  indented\nplain\nmore\n" * 5)
    for piece in list(read_documents([path]))[:-1]:
        assert piece.text[-1] == "\n" and not piece.text[-2].isspace()


def test_a_text_key_other_than_text(tmp_path: Path) -> None:
    assert documents(write(tmp_path / "a.jsonl", '{"body": "x", "text": 5}'), "body") == ["x"]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    texts = [f"row {i} é" for i in range(1000)]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.array(texts).cast(kind)
        pq.write_table(pa.table({"id": range(1000), "text": column}), tmp_path / "a.parquet", row_group_size=300)
        assert documents(tmp_path / "a.parquet") == texts


REFUSED_FILES = [
    (
        "a.jsonl",
        '{"text": "x"}\n{"body": "y", "id": 1}',
        ["a.jsonl, line 2", 'no key "text"', '"body", "id"', "Rename"],
    ),
    ("a.jsonl", '{"text": "x"}\n\n{"text": ', ["a.jsonl, line 3", "not valid JSON", "one JSON object"]),
    ("a.jsonl", "[1, 2]", ["a.jsonl, line 1", "a JSON array, not an object"]),
    ("a.jsonl", '{"text": 17}', ["a.jsonl, line 1", 'key "text"', "number, not a string"]),
    ("a.jsonl", '{"text": null}', ["a.jsonl, line 1", "null, not a string"]),
    ("a.jsonl", b'{"text": "\xff"}', ["a.jsonl, line 1", "byte 10 of the line is not UTF-8"]),
    ("a.jsonl", r'{"text": "a\ud800"}', ["a.jsonl, line 1", "character 1", "surrogate", "U+FFFD"]),
    ("a.jsonl", "[" * 100_000, ["a.jsonl, line 1", "not valid JSON"]),
    ("a.txt", b"abc\xe9def", ["a.txt", "byte 3 is not UTF-8", "iconv"]),
    ("a.txt", b"a" * (2**20 - 1) + "é".encode() + b"\xff", ["byte 1048577 is not UTF-8"]),
    ("a.txt", b"abc\xc3", ["a.txt", "byte 3 is not UTF-8"]),
    ("a.parquet", b"PAR1 this is not parquet", ["a.parquet", "cannot be read as Parquet", ".jsonl"]),
    ("a.parquet", b"", ["a.parquet", "cannot be read as Parquet"]),
]


@pytest.mark.parametrize(("name", "content", "parts"), REFUSED_FILES)
def test_broken_files_are_refused(tmp_path: Path, name: str, content: str | bytes, parts: list[str]) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = write(tmp_path / name, content)
    with pytest.raises(Refused) as caught:
        documents(path)
    for part in parts:
        assert part in str(caught.value)


def test_parquet_columns_are_checked(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), path)
    with pytest.raises(Refused, match=r'no column "text"; its columns are "body", "id"'):
        documents(path)
    pq.write_table(pa.table({"text": [1]}), path)
    with pytest.raises(Refused, match=r'column "text" is of type int64, not string'):
        documents(path)
    pq.write_table(pa.table({"text": ["x"] * 300 + [None]}), path)
    with pytest.raises(Refused, match=r'row 301, column "text": the text is of kind null'):
        documents(path)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.json", ["'.json' is not known", ".txt, .md, .jsonl, .parquet", "the nearest is .jsonl"]),
        ("a.parquett", ["the nearest is .parquet"]),
        ("a.csv", ["'.csv' is not known", ".txt, .md, .jsonl, .parquet"]),
        ("a.jsonl.gz", [".gz files are not unpacked", "Unpack it first"]),
        ("corpus", ["no suffix", ".txt"]),
    ],
)
def test_unknown_kinds_are_refused(tmp_path: Path, name: str, parts: list[str]) -> None:
    path = write(tmp_path / "one" / name, "x")
    for data in (path, path.parent):
        with pytest.raises(Refused) as caught:
            find_files(data)
        for part in [name, *parts]:
            assert part in str(caught.value)


def test_missing_paths_are_refused_with_a_near_name(tmp_path: Path) -> None:
    write(tmp_path / "corpus.txt", "x")
    with pytest.raises(Refused, match=r"corpsu.txt': no such file or folder \(its folder has 'corpus.txt'\)"):
        find_files(tmp_path / "corpsu.txt")
    with pytest.raises(Refused, match=r"no such file or folder\. Give a \.txt"):
        find_files(tmp_path / "no" / "such")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"holds no \.txt, \.md, \.jsonl, \.parquet file: it is empty"):
        find_files(tmp_path)


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(Refused, match=r"pip install 'meshtrain\[data\]'.*\.jsonl"):
        documents(write(tmp_path / "a.parquet", b"x"))


def test_json_lines_are_streamed(tmp_path: Path) -> None:
    """The fault in the last line must not keep the first document from being read."""
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "x"}) + "\n" + "broken")
    stream = read_documents([path])
    assert next(stream).text == "x"
    with pytest.raises(Refused, match="line 2"):
        next(stream)
