"""Paths that users name: expanded, and refused where no file can have that name. Not whether there is one."""

import errno
import os
from pathlib import Path

from meshtrain.errors import Refused

_LONGEST_SHOWN = 80


def named_path(given: str | Path, what: str, way_out: str) -> Path:
    """The path `given`, with ~ expanded. `what` it is for and the `way_out` are for the message.

    Raises Refused for an empty path (which would mean the current folder), one with a NUL, one that is too long, and a ~
    of no user."""
    text = os.fspath(given)
    try:
        path = Path(text).expanduser()
        path.lstat()
        problem = "" if text else "it is empty"
    except RuntimeError:
        problem = "there is no such user, or no home folder"
    except ValueError as error:  # a NUL, or characters that cannot be encoded
        problem = f"no file can have that name ({error})"
    except OSError as error:
        problem = str(error.strerror) if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else ""
    if problem:
        shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"
        raise Refused(f"{what} {shown!r}: {problem}. {way_out}")
    return path
