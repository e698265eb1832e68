"""The token file: a corpus as one flat array of ids on disk, memory-mapped, made once and kept in a cache.

Format: raw native-endian (little-endian on every common machine) uint16, or uint32 where the vocabulary has
more than 65536 ids; beside it a small JSON file that says what is in it. An end-of-document token follows
every document. Not here: cutting the array into batches (`batches.py`)."""

import hashlib
import json
import mmap
import os
import sys
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from meshtrain.data.cache import atomic_file, cache_directory
from meshtrain.data.paths import named_path
from meshtrain.data.progress import Progress, track
from meshtrain.data.sources import Piece, find_files, read_documents
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import Refused

FORMAT_VERSION = 1
_HASH_BLOCK = 1 << 20
_BATCH_CHARACTERS = 2 << 20
_UINT16_VOCAB = 1 << 16


@dataclass(frozen=True)
class TokenFileHeader:
    """What the JSON file beside the tokens says."""

    format_version: int
    byteorder: str
    itemsize: int
    """Bytes of one token: 2 or 4."""
    tokens: int
    documents: int
    vocab_size: int
    """Of the tokenizer: every token is below it."""
    eos_id: int | None
    tokenizer_fingerprint: str
    content_sha256: str
    """Of the source files' bytes, their kinds and their order."""


@dataclass(frozen=True)
class TokenFile:
    """An open token file. `tokens` is the memory-mapped array (1-D, uint16 or uint32): reading an element
    reads its page from disk, opening reads nothing. It is read-only: writing to it ends the process."""

    path: Path
    header: TokenFileHeader
    tokens: Tensor

    def __len__(self) -> int:
        return self.header.tokens


def prepare_tokens(
    data: str | Path | None,
    tokenizer: Tokenizer,
    *,
    cache_dir: str | Path | None = None,
    text_key: str = "text",
    progress: bool = False,
) -> TokenFile:
    """Tokenise `data` (a file, a folder, or None for the embedded text) unless the cache has it, and open the
    result.

    The cache entry is keyed by the bytes of the data files, the tokenizer's fingerprint, `text_key` and the
    format. It appears complete or not at all, and a damaged one is made anew; any number of processes may do
    this at once, though on one machine it is enough that one does and the others call `open_tokens` on the
    `path` of the result. `progress` shows a bar on a terminal, or a line now and then elsewhere, on standard
    error. Raises Refused for data that is missing, empty or broken, and for a cache that cannot be written.
    """
    files = find_files(data)
    sizes = [_size_of(path) for path in files]
    named = "the embedded text" if data is None else f"data {str(data)!r}"
    if not any(sizes):
        raise Refused(f"{named}: {'the file is' if len(files) == 1 else 'all files are'} empty. Give files with text")
    with track("Checking the data", sum(sizes), enabled=progress) as bar:
        content = _content_hash(files, bar)
    key = f"{FORMAT_VERSION} {sys.byteorder} {tokenizer.fingerprint} {content} {text_key!r}"
    path = cache_directory(cache_dir) / "tokens" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.bin"
    try:
        found = open_tokens(path)
        if (found.header.tokenizer_fingerprint, found.header.content_sha256) == (
            tokenizer.fingerprint,
            content,
        ):
            return found
    except Refused:
        pass  # absent or damaged: it is made below
    with track("Tokenising", sum(sizes), enabled=progress) as bar:
        return _write_tokens(path, read_documents(files, text_key), tokenizer, content, bar, named)


def open_tokens(path: str | Path) -> TokenFile:
    """Map the token file `path` into memory. Raises Refused if it is absent, incomplete or of another
    format."""
    remake = "Make it anew with prepare_tokens"
    path = named_path(path, "token file", remake)
    try:
        raw = json.loads(_header_path(path).read_bytes())
        if set(raw) != {field.name for field in fields(TokenFileHeader)}:
            raise ValueError("its keys are not those of a token file")
        header = TokenFileHeader(**raw)
        if (header.format_version, header.byteorder) != (FORMAT_VERSION, sys.byteorder):
            raise ValueError(
                f"it is of format {header.format_version} {header.byteorder}-endian, "
                f"not {FORMAT_VERSION} {sys.byteorder}-endian"
            )
        if header.itemsize not in (2, 4) or not isinstance(header.tokens, int) or header.tokens < 1:
            raise ValueError(f"itemsize {header.itemsize!r} or tokens {header.tokens!r} is out of range")
    except (OSError, ValueError, TypeError) as error:
        raise Refused(
            f"token file {path}: its description {_header_path(path).name} is unusable: {error}. {remake}"
        ) from error
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != header.tokens * header.itemsize:
                raise Refused(
                    f"token file {path}: it has {size} bytes, but {header.tokens} tokens of "
                    f"{header.itemsize} bytes are {header.tokens * header.itemsize}. {remake}"
                )
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise Refused(f"token file {path}: cannot be opened: {error}. {remake}") from error
    with warnings.catch_warnings():
        # torch has no read-only tensors, and says so.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        tokens = torch.frombuffer(mapped, dtype=torch.uint16 if header.itemsize == 2 else torch.uint32)
    return TokenFile(path, header, tokens)


def _header_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise Refused(f"data file {path}: cannot be read: {error}. Check the file and its permissions") from error


def _content_hash(files: Sequence[Path], bar: Progress) -> str:
    """SHA-256 over the kind and the SHA-256 of each file, in order; names and places do not count."""
    total = hashlib.sha256()
    for path in files:
        one = hashlib.sha256()
        try:
            with open(path, "rb") as file:
                while block := file.read(_HASH_BLOCK):
                    one.update(block)
                    bar.advance(len(block))
        except OSError as error:
            raise Refused(f"data file {path}: cannot be read: {error}. Check the file and its permissions") from error
        total.update(f"{path.suffix.lower()} {one.hexdigest()}\n".encode())
    return total.hexdigest()


def _batches_of(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group pieces to about 2 M characters, so that a tokenizer can work on several at once."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_tokens(
    path: Path, pieces: Iterator[Piece], tokenizer: Tokenizer, content: str, bar: Progress, named: str
) -> TokenFile:
    typecode = "H" if tokenizer.vocab_size <= _UINT16_VOCAB else "I"
    itemsize = array(typecode).itemsize
    end = b"" if tokenizer.eos_id is None else array(typecode, [tokenizer.eos_id]).tobytes()
    size = documents = text_bytes = 0
    with atomic_file(path) as file:
        for batch in _batches_of(pieces):
            for piece, packed in zip(batch, tokenizer.encode_packed([p.text for p in batch], typecode), strict=True):
                text_bytes += len(packed)
                chunk = packed + end if piece.ends_document else packed
                size += file.write(chunk)
                documents += piece.ends_document
            bar.advance(sum(piece.bytes_read for piece in batch))
        if not text_bytes:
            raise Refused(f"{named}: there is no text in it, every document is empty. Give files with text")
    header = TokenFileHeader(
        format_version=FORMAT_VERSION,
        byteorder=sys.byteorder,
        itemsize=itemsize,
        tokens=size // itemsize,
        documents=documents,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_fingerprint=tokenizer.fingerprint,
        content_sha256=content,
    )
    # Last, since a token file without its description does not count.
    with atomic_file(_header_path(path)) as file:
        file.write((json.dumps(asdict(header), indent=1) + "\n").encode())
    return open_tokens(path)
