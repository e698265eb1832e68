"""One model directory or checkpoint, looked at from all sides; every fault is noted, none ends the search.

The bytes of tensors are read only when that is asked for; without it, torch is not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshtrain.errors import Refused
from meshtrain.state.folder import INDEX, PICKLES, WEIGHTS, problems_of, read_json, regular_inside
from meshtrain.state.header import HEADER_LIMIT, TensorEntry, open_regular, read_exactly, read_header
from meshtrain.state.manifest import MANIFEST, FileSums, read_manifest
from meshtrain.state.names import CHECKPOINT, GENERATORS, MOMENT, STATE, STATE_FORMAT, STATE_VERSION, TRAINING
from meshtrain.state.publish import TOKENIZER_FILES
from meshtrain.state.strict_json import shown
from meshtrain.state.verify_findings import Report
from meshtrain.state.verify_sums import BUFFER_BYTES, check_file
from meshtrain.state.verify_tensors import check_tensors, read_bytes

Shapes = Callable[[dict[str, Any], str], Mapping[str, tuple[tuple[int, ...], bool]] | None]
"""Config and its name in messages -> key -> (shape, whether it must be there); None for an architecture that is not known."""

_SMALL = 16 * BUFFER_BYTES
_STALE = "rotary_emb.inv_freq"
"""Old Llama checkpoints hold this table, which no model keeps as a parameter."""


def verify_folder(folder: Path, *, full: bool, shapes: Shapes) -> Report:
    """All that is wrong with a directory. full: read every byte, for the checksums and for numbers that are none."""
    report = Report(folder)
    before, names = _identity(folder), names_in(folder)
    sums = _check_manifest(folder, names, report, full=full)
    for name in names:
        _check_kind(folder, name, report)
    model = _check_model(folder, names, sums, report, shapes)
    moments = _check_moments(folder, names, model, report)
    if sums is not None or STATE in names:
        _check_state(folder, names, moments, report)
    check_tensors(folder, names, [model, *moments.values()], sums, report, full=full)
    if full and sums is None:
        _check_tokenizer(folder, names, report)
    # What is pruned while it is read loses its name first; whatever else it then lacks is no damage.
    if before is None or _identity(folder) != before or set(names) - set(names_in(folder)):
        return Report(folder, gone=True)
    return report


def verify_file(path: Path, *, full: bool) -> Report:
    """All that is wrong with one safetensors file, of which nothing else is known."""
    report = Report(path)
    with report.noting("damaged", ""):
        entries = read_header(path)
        report.files, report.tensors = 1, len(entries)
        report.add("note", "", "a single file: there is nothing to compare its keys, shapes and bytes with")
        if full:
            read_bytes(path, "", entries, None, report)
    return report


def names_in(folder: Path) -> list[str]:
    """The files of a directory and of its training/, as paths below it. Links are listed, not followed."""
    found = []
    for base in ("", TRAINING):
        if base and os.path.islink(folder / base):
            continue
        with suppress(OSError), os.scandir(folder / base) as entries:
            found += [f"{base}/{entry.name}" if base else entry.name for entry in entries]
    return sorted(name for name in found if name != TRAINING or os.path.islink(folder / name))


def _identity(folder: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.stat(folder)
        return found.st_dev, found.st_ino
    return None


def _check_manifest(folder: Path, names: list[str], report: Report, *, full: bool) -> Mapping[str, FileSums] | None:
    """Everything but the tensors held against the manifest."""
    manifest = None
    with report.noting("damaged", MANIFEST):
        manifest = read_manifest(folder)
        if manifest is None:
            if any(name.startswith(f"{TRAINING}/") for name in names) or CHECKPOINT.fullmatch(folder.name):
                report.add("damaged", MANIFEST, "is missing, so this is no complete checkpoint; take another one")
            else:
                report.add("note", "", "has no manifest, so that bytes cannot be compared with what was written")
    if manifest is None:
        return None
    for name, sums in manifest.files.items():
        # A large file without tensors is summed only when every byte is to be read.
        if full or sums.header is not None or sums.bytes <= _SMALL:
            with report.noting("damaged", name):
                check_file(folder, name, sums)
    for name in (STATE, GENERATORS):
        if name not in manifest.files:
            report.add("damaged", MANIFEST, f"does not list {name}, which every checkpoint has")
    for name in names:
        if name != MANIFEST and name not in manifest.files:
            report.add("warning", name, f"is not listed in {MANIFEST}: it was put there later")
    return manifest.files


def _check_kind(folder: Path, name: str, report: Report) -> None:
    """Links that lead out, and pickles."""
    path = folder / name
    if path.is_symlink():
        with report.noting("wrong", name):
            regular_inside(folder, name)
            if name == TRAINING:
                report.add("wrong", name, "is a symbolic link; put the directory itself there")
            elif not path.exists():
                report.add("wrong", name, f"is a symbolic link to {shown(os.readlink(path))}, where there is nothing")
    if (name.endswith(PICKLES) or name == ".metadata") and not path.is_dir():
        report.add(
            "warning", name, "is a pickle, which is never read here; other programs may run code from it. Remove it"
        )


def _check_model(
    folder: Path, names: list[str], sums: Mapping[str, FileSums] | None, report: Report, shapes: Shapes
) -> dict[str, TensorEntry]:
    """Index against files, and shapes against the config."""
    model: dict[str, TensorEntry] = {}
    loose = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if sums is None and loose and WEIGHTS not in names and INDEX not in names:
        report.add("warning", "", f"has neither {WEIGHTS} nor {INDEX}: each file is checked by itself")
        return model
    with report.noting("damaged", ""):
        for problem in problems_of(folder, "model", model):
            report.add_error("damaged", problem)
    config: dict[str, Any] | None = None
    for name in ("generation_config.json", "config.json"):
        if name in names:
            config = None
            with report.noting("damaged", name):
                config = read_json(regular_inside(folder, name))
    if "config.json" not in names:
        report.add("warning", "config.json", "is missing, so that keys and shapes are not checked")
    elif model and config is not None:
        _check_shapes(model, config, sums is not None, report, shapes)
    return model


def _check_shapes(
    model: Mapping[str, TensorEntry], config: dict[str, Any], ours: bool, report: Report, shapes: Shapes
) -> None:
    try:
        expected = shapes(config, "config.json")
    except Refused as error:
        what = str(error).removeprefix("config.json: ")
        report.add("wrong" if ours else "warning", "config.json", f"{what} Keys and shapes are not checked")
        return
    if expected is None:
        name = shown(str(config.get("architectures") or config.get("model_type")))
        report.add(
            "note", "config.json", f"is of {name}, whose keys and shapes are not known here: they are not checked"
        )
        return
    for key, (shape, needed) in expected.items():
        if key in model and model[key].shape != shape:
            what = f"has shape {list(model[key].shape)}, by config.json it is {list(shape)}"
            report.add("wrong", model[key].file.name, what, key)
        elif key not in model and needed:
            report.add("wrong", "", "is missing, though config.json tells of it", key)
    for key in model:
        if key not in expected and not key.endswith(_STALE):
            report.add("wrong", model[key].file.name, "is none of the model that config.json describes", key)


def _check_moments(
    folder: Path, names: list[str], model: Mapping[str, TensorEntry], report: Report
) -> dict[str, dict[str, TensorEntry]]:
    """Kind of moment -> its tensors, held against their parameters."""
    moments: dict[str, dict[str, TensorEntry]] = {}
    for kind in sorted({match[1] for name in names if (match := MOMENT.fullmatch(name.removesuffix(".index.json")))}):
        moments[kind] = {}
        with report.noting("damaged", TRAINING):
            for problem in problems_of(folder / TRAINING, kind, moments[kind]):
                report.add_error("damaged", problem)
        for key, entry in moments[kind].items():
            file = f"{TRAINING}/{entry.file.name}"
            if key not in model:
                # The model's files name a tied parameter once, perhaps by its other name.
                report.add("warning", file, "belongs to a parameter that the model's files do not name", key)
            elif model[key].shape != entry.shape:
                what = f"has shape {list(entry.shape)}, its parameter {list(model[key].shape)}"
                report.add("wrong", file, what, key)
    return moments


def _check_state(
    folder: Path, names: list[str], moments: Mapping[str, Mapping[str, TensorEntry]], report: Report
) -> None:
    if STATE not in names:
        report.add("damaged", STATE, "is missing, so nothing can be resumed from this checkpoint")
        return
    state: dict[str, Any] | None = None
    with report.noting("damaged", STATE):
        state = read_json(regular_inside(folder, STATE))
    if state is None:
        return
    if (state.get("format"), state.get("version")) != (STATE_FORMAT, STATE_VERSION):
        found = f"{shown(str(state.get('format')))} version {shown(str(state.get('version')))}"
        report.add("wrong", STATE, f"is of format {found} and not {STATE_FORMAT!r} version {STATE_VERSION}")
    match, step = CHECKPOINT.fullmatch(folder.name), state.get("step")
    if type(step) is not int or step < 0:
        report.add("wrong", STATE, f"step is {shown(str(step))} and not a number of steps")
    elif match and int(match[1]) != step:
        report.add("wrong", STATE, f"is of step {step}, the directory's name of {int(match[1])}: somebody renamed it")
    optimizer = state.get("optimizer")
    told = optimizer.get("moments") if isinstance(optimizer, dict) else None
    if not isinstance(told, dict):
        report.add("wrong", STATE, "does not tell the moments of the optimizer")
        return
    for kind, by_dtype in told.items():
        lists = by_dtype.values() if isinstance(by_dtype, dict) else []
        for key in (key for held in lists if isinstance(held, list) for key in held):
            if not isinstance(key, str) or key not in moments.get(kind, {}):
                report.add("damaged", "", f"its {kind} is missing, though {STATE} lists it", str(key))
    for kind in sorted(moments.keys() - told.keys()):
        report.add("wrong", f"{TRAINING}/{kind}.safetensors", f"is not told of in {STATE}")


def _check_tokenizer(folder: Path, names: list[str], report: Report) -> None:
    """That files nobody else has looked at are JSON at all. Their fields are the tokenizer's own business."""
    for name in names:
        if name in TOKENIZER_FILES and name.endswith(".json"):
            with report.noting("damaged", name), open_regular(regular_inside(folder, name)) as (descriptor, size):
                try:
                    json.loads(read_exactly(descriptor, min(size, HEADER_LIMIT), 0, folder / name))
                except (ValueError, RecursionError) as error:
                    report.add("damaged", name, f"is not JSON ({error})")
