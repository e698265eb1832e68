"""One checkpoint: a Hugging Face model directory that also holds what a resumed run needs. docs/checkpoints.md specifies it.

Every rank writes its own bytes. A checkpoint appears by one rename, when it would survive a power cut. Loading is
`meshtrain.state.restore`.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshtrain.errors import Damaged, Refused
from meshtrain.state.content import Content, plan_parts, take
from meshtrain.state.folder import inspect_pretrained, read_json
from meshtrain.state.generators import generators_file
from meshtrain.state.manifest import MANIFEST, FileSums, Manifest, read_manifest
from meshtrain.state.names import GENERATORS, OTHER, STATE, STATE_FORMAT, STATE_VERSION
from meshtrain.state.pretrained import write_parts
from meshtrain.state.publish import check_target, files_below, write_file
from meshtrain.state.record import check_record
from meshtrain.state.strict_json import shown
from meshtrain.state.sums import Sums
from meshtrain.state.team import JOIN_SECONDS, Team
from meshtrain.state.transfer import Staging
from meshtrain.state.verify_sums import check_file
from meshtrain.state.writer import Part, attempt


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there and whose headers and JSON are what was written. Tensors are checked when read."""

    path: Path
    manifest: Manifest
    state: Mapping[str, Any]
    """The content of training/state.json."""

    @property
    def step(self) -> int:
        """Steps made when it was written."""
        return int(self.state["step"])

    @property
    def run(self) -> Mapping[str, Any]:
        """What the caller of the save gave it."""
        return dict(self.state["run"])


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: str | os.PathLike[str],
    *,
    step: int,
    run: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    generation_config: Any = None,
    max_shard_size: int | str = "5GB",
    join_seconds: float = JOIN_SECONDS,
) -> Path:
    """Write a checkpoint after `step` steps, and return its path when it would survive a power cut. Collective.

    run: what `load_checkpoint` shall give back, as JSON (tokens seen, settings ...). Other arguments: `save_pretrained`.
    `path` appears complete or not at all, and replaces a checkpoint that is there.

    Raises ContractError for an optimizer of another model, for states that a checkpoint cannot hold, or when not every
    rank calls it; MeshtrainError on every rank, naming rank and cause, when one fails to write.
    """
    content = take(model, optimizer, step, run, generation_config)
    return write_checkpoint(
        content,
        path,
        content.held.team,
        tokenizer=tokenizer,
        max_shard_size=max_shard_size,
        join_seconds=join_seconds,
    )


def write_checkpoint(
    content: Content,
    path: str | os.PathLike[str],
    team: Team,
    *,
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
    join_seconds: float = JOIN_SECONDS,
    staging: Staging | None = None,
    published: Callable[[Path], None] = lambda target: None,
) -> Path:
    """The part of save_checkpoint that writes, from taken content; other arguments as there. Collective over `team`.

    published(target): called on rank 0 when the checkpoint is in its place for good.
    """
    team.join("save_checkpoint", join_seconds)
    planned: tuple[list[Part], dict[str, bytes]] | None = None

    def prepare() -> None:
        nonlocal planned
        os.fspath(path)
        planned = plan_parts(content, max_shard_size)

    team.agree(attempt(prepare))
    assert planned is not None
    parts, texts = planned
    team.same(hashlib.sha256(texts[STATE]).digest(), "the training state to be saved")
    texts[GENERATORS] = generators_file(content.generators, team)

    def seal(folder: Path, found: dict[str, FileSums]) -> None:
        files = {**{name: _sums_of(folder / name) for name in _names_in(folder) if name not in found}, **found}
        write_file(folder / MANIFEST, Manifest(files).to_bytes())

    return write_parts(
        parts, replace(content.held, team=team), path, texts, tokenizer,
        staging=staging, sums=Sums(), seal=seal, check=_check_replaceable, published=published,
    )  # fmt: skip


def inspect_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Look at a checkpoint without reading its tensors: every file is there with its size, headers and JSON are intact.

    Needs no process group. Raises Damaged, naming the file, when one is not what was written, and Refused for a
    directory that is no checkpoint.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise Refused(f"{folder}: no such checkpoint. Give a directory such as OUT/checkpoints/step-00000100")
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            if os.path.lexists(folder / STATE):
                raise Damaged(f"{folder}: {MANIFEST} is missing; {OTHER}")
            raise Refused(
                f"{folder}: has no {MANIFEST}, so it is no checkpoint to resume from. To start from the weights of "
                "a model directory, use load_pretrained or --init-from"
            )
        state = _checked_state(folder, manifest)
    except OSError as error:
        raise Damaged(f"{folder}: cannot be read ({error}); {OTHER}") from error
    if state.get("format") != STATE_FORMAT or state.get("version") != STATE_VERSION:
        raise Refused(
            f"{folder / STATE}: is of format {shown(str(state.get('format')))} version {shown(str(state.get('version')))}, not "
            f"{STATE_FORMAT!r} version {STATE_VERSION}. Resume with the version of meshtrain that wrote it"
        )
    check_record(state, folder / STATE)
    return Checkpoint(folder, manifest, state)


def _checked_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The content of state.json, when all files are there and what they should be. Raises Damaged."""
    try:
        for name, sums in manifest.files.items():
            check_file(folder, name, sums)
        for name in (STATE, GENERATORS):
            if name not in manifest.files:
                raise Damaged(f"{folder}: {MANIFEST} does not list {name}, which every checkpoint has; {OTHER}")
        inspect_pretrained(folder)
        return read_json(folder / STATE)
    except Damaged:
        raise
    except Refused as error:
        raise Damaged(str(error)) from error


def _names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in files_below(folder))


def _sums_of(path: Path) -> FileSums:
    content = path.read_bytes()
    return FileSums(len(content), zlib.crc32(content))


def _check_replaceable(target: Path) -> None:
    """Raise Refused for a target that is there and neither a checkpoint, whatever state it is in, nor a model directory."""
    if not any(os.path.lexists(target / name) for name in (STATE, MANIFEST)):
        check_target(target)
