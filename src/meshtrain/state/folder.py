"""A model directory as input: which files hold its weights, and what they hold. Needs no ranks and loads no
tensor.

Everything is checked before anything is believed: an index may only name plain files of its own folder, and
those files must hold exactly the keys that it lists.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from meshtrain.errors import Refused
from meshtrain.state.header import HEADER_LIMIT, TensorEntry, open_regular, read_header
from meshtrain.state.strict_json import parse_object, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def inspect_pretrained(path: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """The tensors of a Hugging Face model directory or of one .safetensors file, by key.

    Reads headers and the index only; needs no process group. Raises Refused for a path without weights, for a
    file that breaks a rule of the format, and for an index that disagrees with its files or points outside
    its folder.
    """
    path = Path(path)
    if not path.is_dir():
        if path.exists() and path.suffix != ".safetensors":
            raise Refused(f"{path}: expected a model directory or a .safetensors file; give one of these")
        return read_header(path)
    has_weights, has_index = os.path.lexists(path / WEIGHTS), os.path.lexists(path / INDEX)
    if has_index:
        entries = _from_index(path)
        files = {entry.file.name for entry in entries.values()}
        if has_weights and files != {WEIGHTS}:
            raise Refused(
                f"{path}: holds both {WEIGHTS} and {INDEX}, which names other files, so it is unclear which "
                f"weights count; "
                "remove the stale one"
            )
        return entries
    if has_weights:
        return read_header(regular_inside(path, WEIGHTS))
    raise Refused(_no_weights(path))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory. Raises Refused."""
    with open_regular(path) as (descriptor, size):
        if size > HEADER_LIMIT:
            raise Refused(f"{path}: {size} bytes is above the limit of {HEADER_LIMIT} bytes for a JSON file of a model")
        raw = b""
        while len(raw) < size and (more := os.pread(descriptor, size - len(raw), len(raw))):
            raw += more
    return parse_object(raw.lstrip(), str(path))


def regular_inside(folder: Path, name: str) -> Path:
    """The path of file `name` of `folder`. Raises Refused when a symbolic link leads out of the folder.

    One way out is allowed: the download cache of huggingface_hub keeps `snapshots/<revision>/<name>` as links
    into `blobs/` of the same repository.
    """
    path = folder / name
    if path.is_symlink():
        home, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
        cached = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
        if not cached and not real.is_relative_to(home):
            raise Refused(f"{path}: is a symbolic link to {real}, outside its folder; copy the file into the folder")
    return path


def _from_index(folder: Path) -> dict[str, TensorEntry]:
    index = regular_inside(folder, INDEX)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Refused(
            f"{index}: field weight_map must map every key to the file that holds it; fetch or export it again"
        )
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain(name):
            raise Refused(
                f"{index}: weight_map sends {shown(key)} to {shown(str(name))}; only plain names of "
                f".safetensors files in the "
                "folder of the index are followed. Put the files beside the index and correct it"
            )
    entries: dict[str, TensorEntry] = {}
    for name in sorted(set(weight_map.values())):
        if not os.path.lexists(folder / name):
            raise Refused(f"{index}: names {shown(name)}, which is missing from {folder}; fetch that file as well")
        held = read_header(regular_inside(folder, name))
        listed = {key for key, file in weight_map.items() if file == name}
        absent = sorted(listed - held.keys())
        if absent:
            raise Refused(
                f"{index}: says that {name} holds {shown(absent[0])}, but it does not ({len(absent)} such "
                f"keys); the index "
                "and the files are of different models: fetch both again"
            )
        extra = sorted(key for key in held if weight_map.get(key) != name)
        if extra:
            raise Refused(
                f"{folder / name}: holds {shown(extra[0])}, which {INDEX} does not place there "
                f"({len(extra)} such keys); the "
                "index and the files are of different models: fetch both again"
            )
        entries.update(held)
    return entries


def _is_plain(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and not name.startswith(".")
        and name.isprintable()
        and not any(character in name for character in "/\\")
    )


def _no_weights(folder: Path) -> str:
    names = sorted(os.listdir(folder))
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    tensors = [name for name in names if name.endswith(".safetensors")]
    message = f"{folder}: has neither {WEIGHTS} nor {INDEX}"
    if tensors:
        return f"{message}; it has {', '.join(map(shown, tensors[:3]))}. Give the path of the .safetensors file itself"
    if pickles:
        return f"{message}, but {shown(pickles[0])}: pickles are never loaded. Convert the model to safetensors first"
    return f"{message} ({'it holds ' + ', '.join(map(shown, names[:5])) if names else 'it is empty'}). Give a model directory"
