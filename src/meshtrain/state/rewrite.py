"""From one model directory to another, in one process and bounded memory: other dtype, other file sizes,
same weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshtrain.errors import Refused
from meshtrain.parallel.layout import MeshSizes, ParamLayout
from meshtrain.state.dtypes import parse_dtype
from meshtrain.state.filemap import parse_size
from meshtrain.state.folder import inspect_pretrained, read_json, regular_inside
from meshtrain.state.header import TensorEntry, open_regular
from meshtrain.state.hf_files import copy_tokenizer, main_dtype, with_dtype, with_tie_flag
from meshtrain.state.publish import CONFIG_FILES, TOKENIZER_FILES, check_target, write_file
from meshtrain.state.specs import TensorSpec
from meshtrain.state.team import Team
from meshtrain.state.transfer import Staging, pieces, read_piece, same_shard, stage, torch_dtype, write_piece
from meshtrain.state.writer import SavePlan, json_bytes, plan_save, write_directory

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")


def export(
    source_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write the model in `source_dir` (a Hugging Face directory or a checkpoint) to the new directory `out`.

    dtype: of floating tensors in the new files; None keeps theirs. max_shard_size: bytes, or "5GB", "512MiB".
    config.json (with its dtype brought up to date), generation_config.json and tokenizer files come along;
    training state does not. Holds two buffers of 4 MiB. Returns the path of `out`, which appears complete or
    not at all.

    Raises Refused for a source that cannot be trusted, bad arguments, and an `out` that must not be replaced.
    """
    source, target = Path(source_dir), Path(out)
    wanted = parse_dtype(dtype)
    parse_size(max_shard_size)
    entries = inspect_pretrained(source)
    folder = source if source.is_dir() else source.parent
    real, origin = Path(os.path.realpath(target)), Path(os.path.realpath(folder))
    if real == origin or real in origin.parents:
        raise Refused(
            f"{target}: is or holds the source {source}, which would be replaced; choose another directory "
            f"for the export"
        )
    check_target(real)
    plan = plan_save([_spec(key, entry) for key, entry in entries.items()], wanted, max_shard_size)
    sizes: dict[torch.dtype, int] = {}
    for key, spec in plan.specs.items():
        if spec.layout is not None:
            sizes[plan.dtypes[key]] = sizes.get(plan.dtypes[key], 0) + spec.layout.numel
    texts: dict[str, bytes] = {}
    for name in CONFIG_FILES:
        if os.path.lexists(folder / name):
            content = read_json(regular_inside(folder, name))
            if name == "config.json":
                content = with_dtype(_with_true_flag(content, entries), main_dtype(sizes))
            texts[name] = json_bytes(content)

    def fill(out: Path, shared: bool) -> None:
        _copy(plan, entries, out)

    def beside(out: Path) -> None:
        names = [name for name in TOKENIZER_FILES if os.path.lexists(folder / name)]
        for name in names:
            copy_tokenizer(regular_inside(folder, name), out)
        for name, content in texts.items():
            write_file(out / name, content)

    return write_directory([plan], target, fill, beside, Team())


def _spec(key: str, entry: TensorEntry) -> TensorSpec:
    dtype = torch_dtype(entry)
    layout = ParamLayout(key, (), entry.shape, dtype, True, MeshSizes(1, 1), None, (), "whole", "", "")
    return TensorSpec(key, key, (key,), entry.shape, dtype, layout)


def _with_true_flag(config: dict[str, Any], entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """The config, its tie flag cleared if it says tied where embedding and head are stored with different
    values.
    """
    heads = [key for key in entries if key.split(".")[-2:] == ["lm_head", "weight"]]
    embeddings = [key for key in entries if key.split(".")[-2:-1] and key.split(".")[-2] in _EMBEDDINGS]
    if not config.get("tie_word_embeddings") or len(heads) != 1 or len(embeddings) != 1:
        return config
    head, embedding = entries[heads[0]], entries[embeddings[0]]
    if head.shape == embedding.shape:
        with open_regular(head.file) as (left, _), open_regular(embedding.file) as (right, _):
            spec = _spec(heads[0], head)
            if same_shard((left, head), (right, embedding), spec, (0, 0), Staging()):
                return config
    return with_tie_flag(config, False)


def _copy(plan: SavePlan, entries: dict[str, TensorEntry], out: Path) -> None:
    incoming, outgoing = Staging(), Staging()
    for file in plan.files:
        descriptor = os.open(out / file.name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for key, start in file.starts.items():
                spec, entry, dtype = plan.specs[key], entries[key], plan.dtypes[key]
                limit = incoming.nbytes // max(dtype.itemsize, spec.dtype.itemsize)
                with open_regular(entry.file) as (source, _):
                    for block in spec.blocks(0, 0):
                        for piece in pieces(block, limit):
                            read_piece(source, entry, spec, piece, incoming.bytes, incoming.traffic)
                            stage(key, incoming.tensor(spec.dtype, piece.shape), dtype, outgoing)
                            write_piece(descriptor, start, spec, piece, dtype, outgoing)
        finally:
            os.close(descriptor)
