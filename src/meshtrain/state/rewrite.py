"""From one model directory to another, in one process and bounded memory: other dtype, other file sizes,
same weights.

Where the source has a manifest, what is copied is held against its checksums on the way. `write_model` is the part that
knows no source: an import gives it tensors from elsewhere.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshtrain.errors import Damaged, Refused
from meshtrain.parallel.layout import ParamLayout
from meshtrain.state.dtypes import parse_dtype
from meshtrain.state.filemap import parse_size
from meshtrain.state.folder import inspect_pretrained, read_json, regular_inside
from meshtrain.state.header import TensorEntry, open_regular
from meshtrain.state.hf_files import copy_tokenizer, with_dtype, with_tie_flag
from meshtrain.state.manifest import FileSums, read_manifest
from meshtrain.state.publish import CONFIG_FILES, TOKENIZER_FILES, check_target, write_file
from meshtrain.state.specs import TensorSpec
from meshtrain.state.strict_json import shown
from meshtrain.state.team import Team
from meshtrain.state.transfer import Piece, Staging, pieces, read_piece, same_shard, stage, torch_dtype, write_piece
from meshtrain.state.verify_sums import check_file, wrong_sum
from meshtrain.state.writer import json_bytes, plan_save, write_directory

Arriving = Callable[[TensorSpec], Iterator[tuple[Piece, Tensor]]]
"""The values of a tensor in `spec.dtype`, piece by piece in row-major order."""

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")


def export(
    source_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> Path:
    """Write the model in `source_dir` (a Hugging Face directory or a checkpoint) to the directory `out`.

    dtype: of floating tensors in the new files; None keeps theirs. max_shard_size: bytes, or "5GB", "512MiB".
    overwrite: whether `out` may be a model directory already, which is then replaced.
    config.json (with its dtype brought up to date), generation_config.json and tokenizer files come along;
    training state does not. Holds two buffers of 4 MiB. Returns the path of `out`, which appears complete or
    not at all.

    Raises Refused for a source that cannot be trusted, bad arguments, and an `out` that must not be replaced; Damaged
    when the source has a manifest and something is not what was written, naming the tensor or the file.
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
    check_out(real, overwrite=overwrite)
    manifest = read_manifest(folder)
    sums = manifest.files if manifest is not None else {}
    for name in {entry.file.name for entry in entries.values()} & sums.keys():
        check_file(folder, name, sums[name])
    texts = {name: _content(folder, name, sums) for name in CONFIG_FILES if os.path.lexists(folder / name)}
    if "config.json" in texts:
        texts["config.json"] = _with_true_flag(texts["config.json"], entries)
    specs = [spec_of(key, torch_dtype(entry), entry.shape) for key, entry in entries.items()]

    def beside(out: Path) -> None:
        for name in TOKENIZER_FILES:
            if os.path.lexists(folder / name):
                copy_tokenizer(regular_inside(folder, name), out)
                if name in sums:
                    check_file(out, name, sums[name])

    return write_model(
        specs, target, _stored(entries, sums), texts=texts, beside=beside,
        dtype=wanted, max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip


def write_model(
    specs: Sequence[TensorSpec],
    target: Path,
    arriving: Arriving,
    *,
    texts: Mapping[str, dict[str, Any]],
    beside: Callable[[Path], None] = lambda out: None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> Path:
    """Make a model directory of tensors that arrive piece by piece. Returns its path.

    texts: JSON files; the dtype that config.json tells is brought up to date. beside(out): writes whatever else belongs
    there. Raises Refused for a target that must not be replaced, and what `arriving` raises; then nothing is left behind.
    """
    plan = plan_save(specs, dtype, max_shard_size)

    def fill(out: Path, shared: bool) -> None:
        outgoing = Staging()
        for file in plan.files:
            descriptor = os.open(out / file.name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for key, start in file.starts.items():
                    for piece, values in arriving(plan.specs[key]):
                        stage(key, values, plan.dtypes[key], outgoing)
                        write_piece(descriptor, start, plan.specs[key], piece, plan.dtypes[key], outgoing)
            finally:
                os.close(descriptor)

    def texts_and_more(out: Path) -> None:
        beside(out)
        for name, content in texts.items():
            content = with_dtype(content, plan.main_dtype()) if name == "config.json" else content
            write_file(out / name, json_bytes(content))

    return write_directory([plan], target, fill, texts_and_more, Team(), check=partial(check_out, overwrite=overwrite))


def spec_of(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSpec:
    """A tensor that nothing cuts."""
    layout = ParamLayout.whole(key, shape, dtype)
    return TensorSpec(key, key, (key,), shape, dtype, layout)


def pieces_of(spec: TensorSpec, nbytes: int) -> Iterator[Piece]:
    """A whole tensor in row-major pieces that take at most `nbytes` in every dtype (the widest have 8 bytes)."""
    for block in spec.blocks(0, 0):
        yield from pieces(block, nbytes // 8)


def check_out(target: Path, *, overwrite: bool) -> None:
    """Raise Refused unless `target` is free or empty, or with `overwrite` a model directory."""
    if overwrite:
        check_target(target)
    elif os.path.lexists(target) and (not target.is_dir() or os.listdir(target)):
        raise Refused(
            f"{target}: exists and is not empty, so it is not replaced. Choose another path, or replace a model directory "
            "with --overwrite"
        )


def _content(folder: Path, name: str, sums: Mapping[str, FileSums]) -> dict[str, Any]:
    path = regular_inside(folder, name)
    if name in sums:
        check_file(folder, name, sums[name])
    return read_json(path)


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
            spec = spec_of(heads[0], torch_dtype(head), head.shape)
            if same_shard((left, head), (right, embedding), spec, (0, 0), Staging()):
                return config
    return with_tie_flag(config, False)


def _stored(entries: Mapping[str, TensorEntry], sums: Mapping[str, FileSums]) -> Arriving:
    """Tensors from safetensors files, each held against its checksum where there is one when its last piece has come."""
    incoming = Staging()

    def arriving(spec: TensorSpec) -> Iterator[tuple[Piece, Tensor]]:
        entry, total = entries[spec.key], 0
        with open_regular(entry.file) as (source, _):
            for piece in pieces_of(spec, incoming.nbytes):
                read_piece(source, entry, spec, piece, incoming.bytes, incoming.traffic)
                values = incoming.tensor(spec.dtype, piece.shape)
                total = zlib.crc32(incoming.bytes[: values.nbytes], total)
                yield piece, values
        listed = sums.get(entry.file.name)
        if listed is not None and listed.tensors.get(spec.key) != total:
            what = wrong_sum(total, listed.tensors.get(spec.key))
            raise Damaged(f"{entry.file}: tensor {shown(spec.key)} {what}")

    return arriving
