"""A model directory as input: which files hold its weights, and what they hold. Needs no ranks and loads no
tensor.

Everything is checked before anything is believed: an index may only name plain files of its own folder, and
those files must hold exactly the keys that it lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshtrain.errors import Refused
from meshtrain.state.header import HEADER_LIMIT, TensorEntry, open_regular, read_exactly, read_header
from meshtrain.state.strict_json import parse_object, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp")
"""How the names of files end that only a pickle reader can read."""


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
    entries: dict[str, TensorEntry] = {}
    for problem in problems_of(path, "model", entries):
        raise problem
    return entries


def problems_of(folder: Path, base: str, entries: dict[str, TensorEntry]) -> Iterator[Refused]:
    """All that is wrong with the tensors in BASE.safetensors, or in the files of BASE.safetensors.index.json.

    What they hold is added to `entries` meanwhile.
    """
    weights, index = f"{base}.safetensors", f"{base}.safetensors.index.json"
    has_weights, has_index = os.path.lexists(folder / weights), os.path.lexists(folder / index)
    if has_index:
        before = set(entries)
        yield from _problems_of_index(folder, index, entries)
        files = {entry.file.name for key, entry in entries.items() if key not in before}
        if has_weights and files and files != {weights}:
            yield Refused(
                f"{folder}: holds both {weights} and {index}, which names other files, so it is unclear which "
                f"weights count; "
                "remove the stale one"
            )
    elif has_weights:
        try:
            entries.update(read_header(regular_inside(folder, weights)))
        except Refused as problem:
            yield problem
    else:
        yield Refused(_no_weights(folder, base))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory. Raises Refused."""
    with open_regular(path) as (descriptor, size):
        if size > HEADER_LIMIT:
            raise Refused(f"{path}: {size} bytes is above the limit of {HEADER_LIMIT} bytes for a JSON file of a model")
        raw = read_exactly(descriptor, size, 0, path)
    return parse_object(raw.lstrip(b" \t\n\r"), str(path))


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


def read_index(folder: Path, name: str, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Key -> the file that holds it, from an index. Raises Refused unless each is a plain name that ends in one of `suffixes`."""
    index = regular_inside(folder, name)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Refused(
            f"{index}: field weight_map must map every key to the file that holds it; fetch or export it again"
        )
    for key, file in weight_map.items():
        if not isinstance(file, str) or not is_plain(file, suffixes):
            raise Refused(
                f"{index}: weight_map sends {shown(key)} to {shown(str(file))}; only plain names of "
                f"{' or '.join(suffixes)} files in the "
                "folder of the index are followed. Put the files beside the index and correct it"
            )
    return weight_map


def is_plain(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether it is the name of a file with such an ending in a folder, and of nothing elsewhere."""
    return (
        name.endswith(suffixes)
        and not name.startswith(".")
        and name.isprintable()
        and not any(character in name for character in "/\\")
    )


def _problems_of_index(folder: Path, name: str, entries: dict[str, TensorEntry]) -> Iterator[Refused]:
    try:
        weight_map = read_index(folder, name, (".safetensors",))
    except Refused as problem:
        yield problem
        return
    index = folder / name
    placed: dict[str, set[str]] = {}
    for key, file in weight_map.items():
        placed.setdefault(file, set()).add(key)
    for file, listed in sorted(placed.items()):
        if not os.path.lexists(folder / file):
            yield Refused(f"{index}: names {shown(file)}, which is missing from {folder}; fetch that file as well")
            continue
        try:
            held = read_header(regular_inside(folder, file))
        except Refused as problem:
            yield problem
            continue
        absent = sorted(listed - held.keys())
        for key in absent:
            yield Refused(
                f"{index}: says that {file} holds {shown(key)}, but it does not (one of {len(absent)} such keys); the "
                "index and the files are of different models: fetch both again"
            )
        extra = sorted(held.keys() - listed)
        for key in extra:
            other = weight_map.get(key)
            where = "does not place anywhere" if other is None else f"does not place there but in {other}"
            yield Refused(
                f"{folder / file}: holds {shown(key)}, which {name} {where} (one of {len(extra)} such keys); the index and "
                "the files are of different models: fetch both again"
            )
        entries.update({key: held[key] for key in listed & held.keys()})


def _no_weights(folder: Path, base: str) -> str:
    names = sorted(os.listdir(folder))
    pickles = [name for name in names if name.endswith(PICKLES) or name == ".metadata"]
    tensors = [name for name in names if name.endswith(".safetensors")]
    inside = [name for name in names if name.startswith("step-") or name in ("checkpoints", "export")]
    message = f"{folder}: has neither {base}.safetensors nor {base}.safetensors.index.json"
    if tensors:
        return f"{message}; it has {', '.join(map(shown, tensors[:3]))}. Give the path of the .safetensors file itself"
    if pickles:
        return (
            f"{message}, but {shown(pickles[0])}: pickles are never loaded. Convert the model to safetensors first: meshtrain "
            "import --help"
        )
    if inside:
        return (
            f"{message}; it has {shown(inside[-1])}. Give a directory inside it, such as OUT/checkpoints/step-00000100"
        )
    return f"{message} ({'it holds ' + ', '.join(map(shown, names[:5])) if names else 'it is empty'}). Give a model directory"
