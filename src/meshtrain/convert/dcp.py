"""A torch.distributed.checkpoint directory, tensor by tensor. Runs in the subprocess that unpickles, nowhere else.

`.metadata` is a pickle. It is read by an unpickler that knows the names of a dozen classes of torch's and gives each a
stand-in without behaviour; anything else that it names is refused. No class of torch is called.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshtrain.convert.choose import NESTED_PATH
from meshtrain.errors import Refused
from meshtrain.state.folder import is_plain, regular_inside
from meshtrain.state.header import open_regular, read_exactly
from meshtrain.state.strict_json import shown

METADATA = ".metadata"
_LIMIT = 1 << 30
_CELLS = 1 << 20


class Chunk(NamedTuple):
    """One stored rectangle of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class Described(NamedTuple):
    """What the metadata says of a tensor."""

    path: NESTED_PATH
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


class _Inert:
    """Stands for an instance of a class of torch's: it keeps what the pickle gives it."""

    def __init__(self, *values: Any) -> None:
        self.values: Any = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.values = state


class _Tensors(_Inert):
    """TensorStorageMetadata."""

    size: Any
    properties: Any
    chunks: Any


def _joined(*parts: str) -> str:
    return "/".join(map(str, parts))


_HOME = "torch.distributed.checkpoint"
_ADMITTED: dict[tuple[str, str], Any] = {
    **{
        (f"{_HOME}.metadata", name): _Inert
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (f"{_HOME}.metadata", "TensorStorageMetadata"): _Tensors,
    (f"{_HOME}.filesystem", "_StorageInfo"): _Inert,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    **{(module, "PosixPath"): _joined for module in ("pathlib", "pathlib._local")},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise Refused(
                f"it names {shown(f'{module}.{name}')}, which is no part of a checkpoint's metadata: it may be hostile"
            )
        return _ADMITTED[module, name]


def read_metadata(folder: Path) -> dict[str, Described]:
    """The tensors of a DCP directory, by flat name. Raises Refused."""
    path = regular_inside(folder, METADATA)
    with open_regular(path) as (descriptor, size):
        if size > _LIMIT:
            raise Refused(f"{path}: {size} bytes is above the limit of {_LIMIT} bytes")
        raw = read_exactly(descriptor, size, 0, path)
    try:
        found = _Unpickler(io.BytesIO(raw)).load()
        return dict(_described(found))
    except Refused as error:
        raise Refused(f"{path}: {error}") from None
    except Exception as error:  # whatever a hostile pickle provokes
        raise Refused(f"{path}: is no metadata of a checkpoint ({type(error).__name__}: {error})") from None


def _described(metadata: Any) -> Iterator[tuple[str, Described]]:
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in metadata.storage_data.items():
        if getattr(index, "offset", None) is not None:
            places[index.fqn, tuple(index.offset)] = info
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, _Tensors):
            continue
        chunks = []
        for chunk in tensor.chunks:
            info = places[name, tuple(chunk.offsets)]
            if getattr(info, "transform_descriptors", None):
                raise Refused(
                    f"{shown(name)} is stored through {info.transform_descriptors}; save it without extensions"
                )
            place = (str(info.relative_path), int(info.offset), int(info.length))
            if not is_plain(place[0], (".distcp",)) or min(place[1:]) < 0:
                raise Refused(f"{shown(name)} is stored in {shown(place[0])}, which is no file of this directory")
            chunks.append(Chunk(_sizes(chunk.offsets), _sizes(chunk.sizes), *place))
        dtype = tensor.properties.values[0]
        if not isinstance(dtype, torch.dtype):
            raise Refused(f"{shown(name)} has no dtype")
        shape = _sizes(tensor.size)
        _check_cover(name, shape, chunks)
        yield name, Described(tuple(map(str, paths.get(name, (name,)))), dtype, shape, chunks)


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise Refused(f"{sizes} are no sizes")
    return sizes


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Raise Refused unless the chunks cover the tensor, each element once."""
    cuts: list[list[int]] = [sorted({0, size}) for size in shape]
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise Refused(f"{shown(name)}: a chunk of {list(chunk.sizes)} does not belong to a tensor of {list(shape)}")
    for dim in range(len(shape)):
        edges = {edge for chunk in chunks for edge in (chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim])}
        cuts[dim] = sorted({*cuts[dim], *edges})
        if cuts[dim][-1] > shape[dim]:
            raise Refused(f"{shown(name)}: a chunk reaches beyond its size {list(shape)}")
    places = [{edge: number for number, edge in enumerate(edges)} for edges in cuts]
    total = math.prod(len(edges) - 1 for edges in cuts)
    if total > _CELLS:
        raise Refused(f"{shown(name)}: is cut into more than {_CELLS} pieces")
    covered: set[tuple[int, ...]] = set()
    count = 0
    for chunk in chunks:
        ranges = [
            range(place[begin], place[begin + size]) for place, begin, size in zip(places, chunk.offsets, chunk.sizes)
        ]
        cells = list(itertools.product(*ranges))
        covered.update(cells)
        count += len(cells)
        if count > total:
            break
    if len(covered) != total or count != total:
        raise Refused(
            f"{shown(name)}: its {len(chunks)} chunks do not cover its size {list(shape)} once: the checkpoint is damaged"
        )


def load_tensor(folder: Path, described: Described) -> Tensor:
    """One tensor, put together from its chunks. Holds it and one chunk twice."""
    whole = torch.empty(described.shape, dtype=described.dtype)
    for chunk in described.chunks:
        path = regular_inside(folder, chunk.file)
        with open_regular(path) as (descriptor, size):
            if chunk.start + chunk.length > size:
                raise Refused(f"{path}: ends before byte {chunk.start + chunk.length}, where a chunk should end")
            raw = read_exactly(descriptor, chunk.length, chunk.start, path)
        part = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        if not isinstance(part, Tensor) or tuple(part.shape) != chunk.sizes or part.dtype != described.dtype:
            raise Refused(f"{path}: at byte {chunk.start} there is not the tensor that {METADATA} tells of")
        where = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes))
        whole[where].copy_(part)
    return whole
