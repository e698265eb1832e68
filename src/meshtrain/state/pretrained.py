"""save_pretrained and load_pretrained: a model, parallelized or plain, to and from a Hugging Face model
directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshtrain.parallel.materialise import allocate
from meshtrain.state.dtypes import parse_dtype
from meshtrain.state.filemap import parse_size
from meshtrain.state.folder import inspect_pretrained
from meshtrain.state.held import Held, describe, held_by, model_part
from meshtrain.state.hf_files import write_tokenizer
from meshtrain.state.placing import relay_to_first, write_own
from meshtrain.state.publish import write_file
from meshtrain.state.reader import check_copies, digest_of, read_own
from meshtrain.state.specs import TensorSpec, check_against, specs_of
from meshtrain.state.sums import Sums
from meshtrain.state.team import JOIN_SECONDS
from meshtrain.state.transfer import Staging
from meshtrain.state.writer import Part, attempt, check_shards, write_directory


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    generation_config: Any = None,
    join_seconds: float = JOIN_SECONDS,
) -> Path:
    """Write a model as a Hugging Face directory: safetensors, index when sharded, config, generation config,
    tokenizer.

    Collective on a parallelized model: every rank calls it with the same arguments, and writes its own bytes
    through a buffer of 4 MiB. A plain model is written by the one process that calls it. The directory
    appears complete or not at all, and replaces only an empty or a model directory. Returns its path.

    dtype: of the floating parameters in the files ("bfloat16", torch.float32 ...); None keeps each one's own.
        Buffers keep theirs.
    max_shard_size: largest file, in bytes or as "5GB", "512MiB".
    tokenizer: a directory with tokenizer files, or an object of meshtrain, transformers or tokenizers.
    generation_config: a dict or an object with to_dict(); None takes `model.generation_config` if there is
    one.
    join_seconds: how long to wait for the other ranks to make the same call.

    Raises Refused for bad arguments or a target that must not be replaced, ContractError when not every rank
    calls it or when ranks disagree, MeshtrainError on every rank when one fails to write.
    """
    wanted = parse_dtype(dtype)
    parse_size(max_shard_size)
    held = held_by(model)
    held.team.join("save_pretrained", join_seconds)
    found: tuple[Part, dict[str, bytes]] | None = None

    def prepare() -> None:
        nonlocal found
        found = model_part(held, describe(held, model, generation_config), wanted, max_shard_size)

    held.team.agree(attempt(prepare))
    assert found is not None
    part, texts = found
    return write_parts([part], held, path, texts, tokenizer)


def write_parts(
    parts: Sequence[Part],
    held: Held,
    path: str | os.PathLike[str],
    texts: Mapping[str, bytes],
    tokenizer: Any = None,
    *,
    staging: Staging | None = None,
    sums: Sums | None = None,
    **how: Any,
) -> Path:
    """What follows all decisions: write the planned files, `texts` and the tokenizer. Collective.

    sums: gathers what this rank contributes to the checksums. how: see `write_directory`.
    """
    staging = staging or Staging()

    def fill(folder: Path, shared: bool) -> None:
        if shared:
            write_own(parts, held.coordinate, folder, staging, sums)
            return
        for part in parts:
            relay_to_first(part, held.sizes, folder, held.team, staging, sums)

    def beside(folder: Path) -> None:
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder)
        for name, content in texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_file(folder / name, content)

    return write_directory([part.plan for part in parts], path, fill, beside, held.team, sums=sums, **how)


def load_pretrained(model: nn.Module, path: str | os.PathLike[str], *, join_seconds: float = JOIN_SECONDS) -> None:
    """Fill a model's parameters and persistent buffers from a Hugging Face directory or one .safetensors
    file.

    Collective on a parallelized model. Parameters on the meta device are allocated first. Each rank reads its
    own bytes only and converts them to the dtypes that the model has. Every key must fit: nothing is skipped
    or left as it was.

    Raises Refused, before any weight is touched, for files that break a rule of their format and for weights
    that do not fit the model; ContractError when not every rank calls it or ranks see different files.
    """
    allocate(model)
    held = held_by(model)
    held.team.join("load_pretrained", join_seconds)
    load_shards(held, path)


def load_shards(held: Held, path: str | os.PathLike[str], *, staging: Staging | None = None) -> Staging:
    """The part of load_pretrained that works on plain data. Collective. Returns the buffer, which counts
    the bytes read.
    """
    staging = staging or Staging()
    sources: dict[str, Any] = {}
    seen = b"\0" * 32
    specs: list[TensorSpec] = []

    def check() -> None:
        nonlocal sources, seen, specs
        entries = inspect_pretrained(path)
        sources, seen = check_against(held.layouts, entries, held.buffers), digest_of(entries)
        specs = specs_of(held.layouts, held.buffers)
        check_shards(specs, held.shards, held.coordinate)
        check_copies(specs, sources, held.coordinate, staging)

    held.team.agree(attempt(check))
    held.team.same(seen, f"the checkpoint {path}")
    held.team.agree(attempt(read_own, specs, sources, held.shards, held.coordinate, staging))
    return staging
