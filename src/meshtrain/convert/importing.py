"""A torch checkpoint made into a Hugging Face directory: keys renamed, rows reordered, checked, then written tensor by tensor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from einops import EinopsError
from torch import Tensor

from meshtrain.convert.key_map import KeyMap, Place, read_key_map, same_keys
from meshtrain.convert.llama import KEY_MAPS, llama_key_map, llama_shapes
from meshtrain.convert.reader import Listed, Reader
from meshtrain.errors import Refused
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.state.dtypes import parse_dtype
from meshtrain.state.filemap import parse_size
from meshtrain.state.folder import PICKLES, read_index, read_json, regular_inside
from meshtrain.state.header import open_regular
from meshtrain.state.hf_files import copy_tokenizer, with_tie_flag
from meshtrain.state.publish import TOKENIZER_FILES
from meshtrain.state.rewrite import Arriving, check_out, pieces_of, spec_of, write_model
from meshtrain.state.specs import TensorSpec, canonical
from meshtrain.state.strict_json import shown
from meshtrain.state.transfer import Piece, Staging

Kind = Literal["dcp", "pt"]
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PT_INDEX, _PT = "pytorch_model.bin.index.json", "pytorch_model.bin"


@dataclass(frozen=True)
class Imported:
    """What an import has made."""

    path: Path
    tensors: int
    left_out: Mapping[str, int]
    """Parts of the checkpoint that are no weights of the model -> how many tensors they hold."""
    has_config: bool


def import_model(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    kind: Kind,
    key_map: str | None = None,
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> Imported:
    """Make a model directory of a checkpoint that torch has pickled.

    kind: "dcp" for a directory of torch.distributed.checkpoint, "pt" for files of torch.save (one, or pytorch_model.bin and its
        index). key_map: a ready-made one ("llama-torchtitan", "llama-torchtune"), or a JSON file; None keeps the keys.
    config: the model's config.json; None takes that of `source`. Other arguments: `export`.
    allow_pickle: must be given: a pickle may run code. It is opened in a subprocess, with what torch has against that.

    The directory appears complete or not at all. Holds one tensor at a time here, and one in the subprocess; files that
    torch cannot map (older than version 1.6) are held there whole.

    Raises Refused for a source that cannot be trusted or does not fit the config, and for bad arguments.
    """
    source, target = Path(source), Path(out)
    if not allow_pickle:
        raise Refused(
            f"{source}: is read by unpickling, and a pickle may run code of whoever made it. Import only what you trust, and say so "
            "with --allow-pickle"
        )
    wanted = parse_dtype(dtype)
    parse_size(max_shard_size)
    check_out(Path(os.path.realpath(target)), overwrite=overwrite)
    folder = source if source.is_dir() else source.parent
    settings = _config(config, folder)
    table = _table(key_map, settings)
    paths, listed = (_dcp_paths(source), set()) if kind == "dcp" else _pt_paths(source)
    with Reader(kind, paths) as reader:
        names = _names(reader, listed, source)
        places = {key: Place(names[place.source], place.change) for key, place in table.places(names).items()}
        shapes = {key: _shape_of(key, place, reader.tensors) for key, place in places.items()}
        tied = bool(settings and settings.get("tie_word_embeddings"))
        if tied and _HEAD in places and _EMBEDDING in places:
            if _sum(reader, places[_HEAD]) == _sum(reader, places[_EMBEDDING]):
                del places[_HEAD], shapes[_HEAD]
            else:
                settings = with_tie_flag(settings or {}, False)
        if settings is not None:
            _check_shapes(shapes, settings, source)
        specs = [spec_of(key, reader.tensors[place.source].dtype, shapes[key]) for key, place in places.items()]
        path = write_model(
            specs, target, _arriving(reader, places), texts=_texts(folder, settings), beside=_tokenizer_of(folder),
            dtype=wanted, max_shard_size=max_shard_size, overwrite=overwrite,
        )  # fmt: skip
        return Imported(path, len(specs), reader.left_out, settings is not None)


def _config(config: str | os.PathLike[str] | None, folder: Path) -> dict[str, Any] | None:
    """The model's config.json: the one given, or the source's; None where there is none."""
    if config is None and not os.path.lexists(folder / "config.json"):
        return None
    path = regular_inside(folder, "config.json") if config is None else Path(config)
    return read_json(path / "config.json" if path.is_dir() else path)


def _table(key_map: str | None, settings: dict[str, Any] | None) -> KeyMap:
    if key_map is None:
        return same_keys()
    if key_map in KEY_MAPS:
        if settings is None:
            raise Refused(
                f"--key-map {key_map}: needs the numbers of heads, which a config.json tells; give one with --config"
            )
        return llama_key_map(key_map, LlamaConfig.from_hf(settings, "config.json"))
    if not os.path.lexists(key_map):
        raise Refused(
            f"--key-map {key_map!r}: is no file and none of the ready-made {', '.join(KEY_MAPS)}. Use one of these"
        )
    return read_key_map(Path(key_map))


def _dcp_paths(source: Path) -> list[Path]:
    if not os.path.lexists(source / ".metadata"):
        found = sorted(path.parent.name for path in source.glob("*/.metadata")) if source.is_dir() else []
        hint = f"; give one inside it, such as {source / found[-1]}" if found else ""
        raise Refused(f"{source}: holds no .metadata, so it is no directory of torch.distributed.checkpoint{hint}")
    return [source]


def _pt_paths(source: Path) -> tuple[list[Path], set[str]]:
    """The files of torch.save at a path, and the keys that an index says they hold."""
    paths, listed = [source], set()
    if source.is_dir():
        if os.path.lexists(source / _PT_INDEX):
            index = read_index(source, _PT_INDEX, PICKLES)
            names, listed = sorted(set(index.values())), set(index)
        else:
            pickles = sorted(
                name for name in os.listdir(source) if name.endswith(PICKLES) and not name.endswith(".distcp")
            )
            names = [_PT] if _PT in pickles else pickles
            if len(names) != 1:
                shown_names = ", ".join(map(shown, names[:5]))
                what = f"holds {shown_names}: give the one that is meant" if names else "holds no file of torch.save"
                raise Refused(f"{source}: {what}")
        paths = [regular_inside(source, name) for name in names]
    for path in paths:
        with open_regular(path):
            pass
    return paths, listed


def _names(reader: Reader, listed: set[str], source: Path) -> dict[str, str]:
    """Key without what compilation and checkpointing put into it -> key in the checkpoint."""
    if absent := sorted(listed - reader.tensors.keys()):
        raise Refused(
            f"{source}: {_PT_INDEX} lists {shown(absent[0])}, which no file holds ({len(absent)} such keys); the index and the "
            "files are of different models: fetch both again"
        )
    names = {canonical(key): key for key in reader.tensors}
    for key in reader.tensors:
        if names[canonical(key)] != key:
            raise Refused(f"{source}: holds both {shown(key)} and {shown(names[canonical(key)])}, which are one key")
    return names


def _shape_of(key: str, place: Place, tensors: Mapping[str, Listed]) -> tuple[int, ...]:
    shape = tensors[place.source].shape
    if place.change is None:
        return shape
    try:
        return tuple(place.change(torch.empty(shape, device="meta")).shape)
    except (EinopsError, RuntimeError):
        raise Refused(
            f"{shown(place.source)} has shape {list(shape)}, which does not fit the heads that config.json tells; give the config of "
            "this model with --config"
        ) from None


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], settings: dict[str, Any], source: Path) -> None:
    """Raise Refused, naming every key, unless the tensors are those of the config, where its architecture is known."""
    expected = llama_shapes(settings, "config.json")
    if expected is None:
        return
    wrong = [f"{key} is missing" for key, (_, needed) in expected.items() if needed and key not in shapes]
    wrong += [f"{shown(key)} is none of the model" for key in shapes if key not in expected]
    wrong += [
        f"{key} has shape {list(shapes[key])} and not {list(shape)}"
        for key, (shape, _) in expected.items()
        if key in shapes and shapes[key] != shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise Refused(
            f"{source}: is not the model of its config.json: {'; '.join(wrong[:8])}{more}. Give the right --config, and a --key-map "
            "where the keys are of another program"
        )


def _sum(reader: Reader, place: Place) -> bytes:
    """What tells a tensor's bytes from others'."""
    total = hashlib.sha256(repr(reader.tensors[place.source]).encode())
    buffer = memoryview(bytearray(Staging().nbytes))
    left = reader.tensors[place.source].nbytes
    reader.begin(place.source)
    while left:
        part = buffer[: min(left, len(buffer))]
        reader.fill(part)
        total.update(part)
        left -= len(part)
    return total.digest()


def _arriving(reader: Reader, places: Mapping[str, Place]) -> Arriving:
    """The tensors in pieces as they come; one whose rows change places is held whole."""
    incoming = Staging()

    def arriving(spec: TensorSpec) -> Iterator[tuple[Piece, Tensor]]:
        place = places[spec.key]
        reader.begin(place.source)
        if place.change is None:
            for piece in pieces_of(spec, incoming.nbytes):
                values = incoming.tensor(spec.dtype, piece.shape)
                reader.fill(incoming.bytes[: values.nbytes])
                yield piece, values
            return
        whole = torch.empty(reader.tensors[place.source].shape, dtype=spec.dtype)
        flat = whole.view(-1)
        step = incoming.nbytes // spec.dtype.itemsize
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            reader.fill(incoming.bytes[: part.nbytes])
            part.copy_(incoming.tensor(spec.dtype, tuple(part.shape)))
        changed = place.change(whole)
        for piece in pieces_of(spec, incoming.nbytes):
            yield piece, changed[tuple(slice(start, stop) for start, stop in piece.where)]

    return arriving


def _texts(folder: Path, settings: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    texts = {} if settings is None else {"config.json": settings}
    name = "generation_config.json"
    return {**texts, name: read_json(regular_inside(folder, name))} if os.path.lexists(folder / name) else texts


def _tokenizer_of(folder: Path) -> Callable[[Path], None]:
    def copy(out: Path) -> None:
        for name in TOKENIZER_FILES:
            if os.path.lexists(folder / name):
                copy_tokenizer(regular_inside(folder, name), out)

    return copy
