"""Paths that name nothing, or what no file can be called, are refused: not taken for another, and no traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshtrain.data import ByteTokenizer, TokenDataset, find_files, load_tokenizer, open_tokens, prepare_tokens
from meshtrain.data.cache import cache_directory
from meshtrain.errors import Refused


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder that has text in it."""
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)


READERS: list[tuple[Callable[[Any], Any], str, str]] = [
    (find_files, "data", "Give a .txt, .md, .jsonl, .parquet file or a folder"),
    (
        lambda path: prepare_tokens(path, ByteTokenizer(), cache_dir="cache"),
        "data",
        "leave it out to use the embedded text",
    ),
    (load_tokenizer, "tokenizer", 'Give "bytes"'),
    (open_tokens, "token file", "Make it anew"),
    (lambda path: TokenDataset(path, 4, 0), "token file", "Make it anew"),
    (cache_directory, "cache_dir", "Name a writable folder"),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "'': it is empty"),
        ("a\0b", r"'a\x00b': no file can have that name (embedded null byte)"),
        ("x" * 300, f"'{'x' * 80}... (300 characters)': File name too long"),
        ("~no-such-user/a.txt", "'~no-such-user/a.txt': there is no such user"),
        ("\ud800", "no file can have that name"),
    ],
    ids=["empty", "null", "long", "user", "surrogate"],
)
@pytest.mark.parametrize(("read", "what", "way_out"), READERS)
def test_a_path_that_cannot_be(read: Callable[[Any], Any], what: str, way_out: str, path: str, problem: str) -> None:
    with pytest.raises(Refused) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{what} ") and problem in message and way_out in message


@pytest.mark.usefixtures("here")
def test_the_current_folder_can_be_named() -> None:
    """A check of the above: it is read where it is meant."""
    assert [path.name for path in find_files(".")] == ["a.txt"]


def test_a_variable_for_the_cache_that_is_empty_counts_as_unset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MESHTRAIN_CACHE", "")
    assert cache_directory() == tmp_path / ".cache" / "meshtrain"
    monkeypatch.setenv("MESHTRAIN_CACHE", "~no-such-user")
    with pytest.raises(Refused, match=r"\$MESHTRAIN_CACHE '~no-such-user': there is no such user"):
        cache_directory()
