"""What there is to verify at a path: one file, one directory, or all the checkpoints of a run; and the looking at it.

Nothing is changed, and a run may go on meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from meshtrain.errors import Refused
from meshtrain.state.folder import INDEX, PICKLES
from meshtrain.state.header import open_regular
from meshtrain.state.names import CHECKPOINT, CHECKPOINTS, LATEST, LEFT, TRAINING
from meshtrain.state.strict_json import shown
from meshtrain.state.verify_findings import Report
from meshtrain.state.verify_folder import Shapes, names_in, verify_file, verify_folder

EXPORT = "export"


def verify(path: str | os.PathLike[str], *, full: bool, shapes: Shapes) -> Iterator[Report]:
    """A report for each checkpoint, directory or file at `path`, one after the other.

    path: a .safetensors file, a model directory, a checkpoint, a folder of checkpoints, or the folder of a run.
    full: read every byte too. Without it only headers, sizes and JSON are read, and torch is not imported.
    Raises Refused where there is nothing to verify.
    """
    path = Path(path) if os.fspath(path) not in ("", ".") else Path.cwd()
    if not path.is_dir():
        if not os.path.lexists(path):
            raise Refused(
                f"{path}: there is no such file or directory. Give a checkpoint, a model directory or OUT of a run"
            )
        if path.suffix != ".safetensors":
            raise Refused(f"{path}: expected a directory or a .safetensors file; give one of these")
        yield verify_file(path, full=full)
        return
    if _is_model(path):
        yield verify_folder(path, full=full, shapes=shapes)
        return
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = _steps(folder)
    others = [path / EXPORT] if (path / EXPORT).is_dir() else []
    if not steps and not others:
        raise Refused(_nothing(path))
    if steps:
        yield _verify_list(folder, steps)
    for each in [*(folder / name for name in steps), *others]:
        yield verify_folder(each, full=full, shapes=shapes)


def _is_model(path: Path) -> bool:
    names = names_in(path)
    return bool(CHECKPOINT.fullmatch(path.name)) or any(
        name.endswith(".safetensors") or name == INDEX or name.startswith(f"{TRAINING}/") for name in names
    )


def _steps(folder: Path) -> list[str]:
    """The names of the checkpoints, oldest first."""
    names = [name for name in os.listdir(folder) if CHECKPOINT.fullmatch(name) and (folder / name).is_dir()]
    return sorted(names, key=lambda name: int(name.removeprefix("step-")))


def _verify_list(folder: Path, steps: list[str]) -> Report:
    """What stands beside the checkpoints."""
    report = Report(folder)
    with report.noting("warning", LATEST), open_regular(folder / LATEST) as (descriptor, _):
        named = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
        # A run that goes on may have saved, or pruned, since the list was made.
        if named not in steps and named not in _steps(folder):
            report.add("warning", LATEST, f"names {shown(named)}, which is no checkpoint here")
    for name in sorted(os.listdir(folder)):
        if LEFT.fullmatch(name):
            report.add(
                "note", name, "is being written or removed, or was left when that was killed; it counts for nothing"
            )
    return report


def _nothing(path: Path) -> str:
    names = sorted(os.listdir(path))
    pickles = [name for name in names if name.endswith(PICKLES) or name == ".metadata"]
    if pickles:
        return f"{path}: holds {shown(pickles[0])} but no safetensors file. Pickles are not read; convert them with meshtrain import"
    held = f"it holds {', '.join(map(shown, names[:5]))}" if names else "it is empty"
    return f"{path}: there is nothing to verify ({held}). Give a checkpoint, a model directory or OUT of a run"
