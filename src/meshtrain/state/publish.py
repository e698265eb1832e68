"""A directory that appears complete or not at all: made under a temporary name beside its place, made
durable, renamed.

What survives a power cut in this order: write, fsync each file, fsync the directory, rename, fsync the
parent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtrain.errors import MeshtrainError, Refused
from meshtrain.state.folder import INDEX, WEIGHTS

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.bpe",
    "sentencepiece.bpe.model",
    "tekken.json",
)
CONFIG_FILES = ("config.json", "generation_config.json")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def check_target(target: Path) -> None:
    """Raise Refused unless `target` is free, an empty directory, or a model directory with nothing else in
    it.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise Refused(f"{target}: exists and is not a directory. Nothing is overwritten; choose another path")
    names = sorted(os.listdir(target))
    ours = {WEIGHTS, INDEX, *CONFIG_FILES, *TOKENIZER_FILES}
    foreign = [name for name in names if name not in ours and not _SHARD.fullmatch(name)]
    weights = any(name in (WEIGHTS, INDEX) or _SHARD.fullmatch(name) for name in names)
    if foreign or (names and not weights):
        what = f"holds {foreign[0]!r}, which is no part of a model" if foreign else "holds no weights"
        raise Refused(
            f"{target}: {what}, so it is not replaced ({len(names)} entries). Choose another path, or move "
            f"its content away"
        )


def check_space(folder: Path, nbytes: int) -> None:
    """Raise OSError when the file system of `folder` says that it has less than `nbytes` free."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < nbytes:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes are needed and {free} are free", str(folder))


@contextmanager
def temporary_directory(target: Path) -> Iterator[Path]:
    """A new directory `.NAME.tmp-XXXX` beside `target`; whatever is left of it at the end is removed.

    Missing parents are made, and removed again if `target` is not there in the end.
    """
    made = []
    for folder in (target.parent, *target.parent.parents):
        if folder.exists():
            break
        made.append(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.tmp-{secrets.token_hex(8)}"
    try:
        temporary.mkdir()
        for folder in made:
            fsync_directory(folder.parent)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not os.path.lexists(target):
            for folder in made:
                try:
                    folder.rmdir()
                except OSError:
                    break


def publish(temporary: Path, target: Path) -> None:
    """Put a finished directory in its place, durably. A directory that is there already is replaced, then
    removed.
    """
    fsync_directory(temporary)
    if not _is_there(target):
        os.rename(temporary, target)
        _settle(target)
        return
    aside = target.parent / f".{target.name}.old-{secrets.token_hex(8)}"
    if _exchange(temporary, target):
        os.rename(temporary, aside)
    else:
        os.rename(target, aside)
        try:
            os.rename(temporary, target)
        except OSError:
            os.rename(aside, target)
            raise
    _settle(target)
    shutil.rmtree(aside, ignore_errors=True)


def _settle(target: Path) -> None:
    try:
        fsync_directory(target.parent)
    except OSError as error:
        raise MeshtrainError(
            f"{target}: is whole and in its place, but might not survive a power cut ({error})"
        ) from error


def fsync_directory(folder: Path) -> None:
    """Make the names in a directory durable."""
    with named_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Have errors of the system say which file they are about: those of write and fsync do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a small file durably."""
    with named_errors(path), open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_files(folder: Path) -> None:
    """Make every file under a directory durable, and the names of those below it."""
    found = files_below(folder)
    for path in found:
        with named_errors(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    for path in {folder, *(path.parent for path in found)}:
        fsync_directory(path)


def files_below(folder: Path) -> list[Path]:
    """Every file under a directory. Unlike a glob, it raises for a directory that cannot be read."""

    def fail(error: OSError) -> None:
        raise error

    return [Path(path, name) for path, _, names in os.walk(folder, onerror=fail) for name in sorted(names)]


def _is_there(path: Path) -> bool:
    """Whether there is something of this name. Unlike os.path.lexists, it does not take an error of the system for a no."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one atomic step; False where the system cannot (then nothing has happened)."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(first), here, os.fsencode(second), swap) == 0
