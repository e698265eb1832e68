"""Reading documents from files: plain text, JSON lines and Parquet, streamed a piece at a time.

Not here: tokens. Every fault of the data is a `Refused` that names the file, the place in it and the way out.
"""

import codecs
import difflib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from meshtrain.data.paths import named_path
from meshtrain.errors import Refused

_logger = logging.getLogger(__name__)

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
BUILTIN_TEXT = Path(__file__).parent / "builtin" / "shakespeare.txt"

_BLOCK_BYTES = 1 << 18
_LONGEST_PIECE = 8 << 20
_PACKED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".lz4", ".7z")
_CLOSE_SUFFIXES = {
    ".json": ".jsonl",
    ".ndjson": ".jsonl",
    ".text": ".txt",
    ".pq": ".parquet",
    ".markdown": ".md",
}


class Piece(NamedTuple):
    """Part of a document: all of it, or one of several pieces when it is long."""

    text: str
    ends_document: bool
    bytes_read: int
    """Bytes of the source that were consumed since the piece before: for progress only."""


def find_files(data: str | Path | None) -> list[Path]:
    """The data files that `data` names, in the order in which they are read; None is the embedded text.

    A folder is searched with its subfolders, in order of path; hidden files are skipped, and so, with a
    warning, are files of other kinds. Raises Refused when there is no such path, or nothing readable there.
    """
    if data is None:
        return [BUILTIN_TEXT]
    ways_out = f"Give a {', '.join(SUFFIXES)} file or a folder of them, or leave it out to use the embedded text"
    root = named_path(data, "data", ways_out)
    if root.is_file():
        if root.suffix.lower() not in SUFFIXES:
            raise Refused(f"data file {str(root)!r}: {_about_suffix(root)}")
        return [root]
    if not root.is_dir():
        near = difflib.get_close_matches(root.name, _names_in(root.parent), n=1)
        hint = f" (its folder has {near[0]!r})" if near else ""
        raise Refused(f"data {str(data)!r}: no such file or folder{hint}. {ways_out}")
    files: list[Path] = []
    skipped: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            (files if path.suffix.lower() in SUFFIXES else skipped).append(path)
    if not files:
        found = "it is empty"
        if skipped:
            first = min(skipped)
            found = f"its {len(skipped)} files are of other kinds, such as {first.name!r}: {_about_suffix(first)}"
        raise Refused(f"data folder {str(data)!r} holds no {', '.join(SUFFIXES)} file: {found}")
    if skipped:
        _logger.warning("%s: skipping %d files that are not data, such as %s", root, len(skipped), min(skipped).name)
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _about_suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in _PACKED_SUFFIXES:
        return f"{suffix} files are not unpacked. Unpack it first"
    near = [_CLOSE_SUFFIXES[suffix]] if suffix in _CLOSE_SUFFIXES else difflib.get_close_matches(suffix, SUFFIXES, n=1)
    nearest = f"; the nearest is {near[0]}" if near else ""
    kind = f"the suffix {suffix!r} is not known" if suffix else "it has no suffix, so its kind is not known"
    return f"{kind}. Supported are {', '.join(SUFFIXES)}{nearest}: convert or rename it"


def read_documents(files: Sequence[Path], text_key: str = "text") -> Iterator[Piece]:
    """Yield the documents of `files` in order, as pieces of 1/4 to 8 MiB where a .txt or .md file is longer.

    Each .txt or .md file is one document, each line of a .jsonl and each row of a .parquet is one, whose text
    is at `text_key`. Empty documents are left out. Raises Refused at the first fault."""
    for path in files:
        suffix = path.suffix.lower()
        try:
            if suffix == ".jsonl":
                yield from _read_jsonl(path, text_key)
            elif suffix == ".parquet":
                yield from _read_parquet(path, text_key)
            else:
                yield from _read_text(path)
        except OSError as error:
            raise Refused(f"data file {path}: cannot be read: {error}. Check the file and its permissions") from error


def _read_text(path: Path) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = ""  # text after the last good place to cut
    pending = 0  # bytes of `held` and of an unfinished character
    position = 0
    with open(path, "rb") as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            unfinished = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise Refused(
                    f"data file {path}: byte {position - unfinished + error.start} is not UTF-8 "
                    f"({error.reason}). Convert the file: iconv -f ITS_ENCODING -t UTF-8"
                ) from error
            if position == 0:
                text = text.removeprefix("\ufeff")
            position += len(block)
            pending += len(block)
            held += text
            if not block:
                break
            cut = _place_to_cut(held)
            if cut:
                yield Piece(held[:cut], False, pending)
                held, pending = held[cut:], 0
    if held:
        yield Piece(held, True, pending)


def _place_to_cut(text: str) -> int:
    """Where to cut a long text so that common tokenizers give the same ids as for the whole: after the last
    single line break between two other characters that are no white space. At least one character stays
    behind the cut. 0 if there is no such place yet. A text that has grown too long without one is cut after
    any line break, or anywhere."""
    end = len(text) - 1
    while (end := text.rfind("\n", 1, end)) > 0:
        if not text[end - 1].isspace() and not text[end + 1].isspace():
            return end + 1
    if len(text) < _LONGEST_PIECE:
        return 0
    return text.rfind("\n", 0, len(text) - 1) + 1 or len(text) - 1


def _read_jsonl(path: Path, text_key: str) -> Iterator[Piece]:
    with open(path, "rb") as file:
        skipped = 0
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                skipped += len(line)
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise Refused(
                    f"{where}: byte {error.start} of the line is not UTF-8 ({error.reason}). Convert the file to UTF-8"
                ) from error
            except (ValueError, RecursionError) as error:
                raise Refused(
                    f"{where}: not valid JSON: {error}. Each line of a .jsonl file must be one JSON object"
                ) from error
            if not isinstance(row, dict):
                raise Refused(f"{where}: a JSON {_kind(row)}, not an object. Each line must be one JSON object")
            if text_key not in row:
                raise Refused(
                    f'{where}: no key "{text_key}"; its keys are {_quoted(list(row))}. '
                    f'Rename the key that holds the text to "{text_key}", or name that key as the text key'
                )
            text = _checked_text(row[text_key], f'{where}, key "{text_key}"')
            if text:
                yield Piece(text, True, len(line) + skipped)
                skipped = 0
            else:
                skipped += len(line)


def _read_parquet(path: Path, text_key: str) -> Iterator[Piece]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise Refused(
            f"data file {path}: reading Parquet needs the package `pyarrow`, which is not installed: "
            "pip install 'meshtrain[data]', or convert the file to .jsonl"
        ) from error
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_key not in names:
                raise Refused(
                    f'{path}: no column "{text_key}"; its columns are {_quoted(names)}. '
                    f'Rename the column that holds the text to "{text_key}", or name that column as the '
                    "text key"
                )
            kind = file.schema_arrow.field(text_key).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
                raise Refused(
                    f'{path}: column "{text_key}" is of type {kind}, not string. Convert the column, or name another'
                )
            rows = file.metadata.num_rows
            bytes_per_row = path.stat().st_size // max(rows, 1)
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    text = _checked_text(value, f'{path}, row {number}, column "{text_key}"')
                    if text:
                        yield Piece(text, True, bytes_per_row)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"data file {path}: cannot be read as Parquet: {error}. Write the file again, or convert it to .jsonl"
        ) from error


def _checked_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{where}: the text is of kind {_kind(value)}, not a string. Convert it or leave the row out")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refused(
            f"{where}: character {error.start} is half of a surrogate pair, which no UTF-8 text can hold. "
            "Replace it by U+FFFD"
        ) from error
    return value


def _kind(value: object) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null" if value is None else type(value).__name__)


def _quoted(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:12]) or "none"
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")
