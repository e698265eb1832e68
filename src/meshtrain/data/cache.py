"""Where derived files are kept, and writing them so that they appear complete or not at all."""

import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from meshtrain.data.paths import named_path
from meshtrain.errors import Refused

_logger = logging.getLogger(__name__)


def cache_directory(chosen: str | Path | None = None) -> Path:
    """The folder for derived files, made if needed: `chosen`, else $MESHTRAIN_CACHE, else ~/.cache/meshtrain.

    Where only the last cannot be written (a read-only or missing home) a warning is logged and a private
    folder under the system's temporary folder is used. Raises Refused if a folder that was named cannot be
    written."""
    named = (os.environ.get("MESHTRAIN_CACHE") or None) if chosen is None else chosen
    if named is not None:
        by, way_out = "$MESHTRAIN_CACHE" if chosen is None else "cache_dir", "Name a writable folder there"
        folder = named_path(named, by, way_out)
        if problem := _problem_with(folder):
            raise Refused(f"{by} is {str(folder)!r}, which cannot be written: {problem}. {way_out}")
        return folder
    try:
        folder = Path.home() / ".cache" / "meshtrain"
        problem = _problem_with(folder)
    except RuntimeError as error:  # no home at all
        problem = str(error)
    if not problem:
        return folder
    fallback = Path(tempfile.gettempdir()) / f"meshtrain-cache-{os.getuid()}"
    fallback_problem = _problem_with(fallback, mode=0o700)
    if not fallback_problem and fallback.stat().st_uid != os.getuid():
        fallback_problem = "it belongs to another user"
    if fallback_problem:
        fallback = Path(tempfile.mkdtemp(prefix="meshtrain-cache-"))
    _logger.warning(
        "the cache folder under the home folder cannot be written (%s), so %s is used; set MESHTRAIN_CACHE to choose",
        problem,
        fallback,
    )
    return fallback


def _problem_with(folder: Path, mode: int = 0o777) -> str:
    """Why `folder` cannot be used, or "" if it can; makes it if it is absent."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        # Permission bits do not tell of a read-only file system, nor of what root may do: try.
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` when the block ends without an error, synced to disk before
    that.

    Each writer has a temporary name of its own, so concurrent writers never mix; the last to finish stays.
    Raises Refused when the disk is full or the folder cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not mkstemp: its files can be read by their owner alone, and a cache may be shared.
        temporary = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise Refused(
            f"cannot write {path}: {error.strerror or error}. Free some space, or choose another folder with "
            "the environment variable MESHTRAIN_CACHE"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
