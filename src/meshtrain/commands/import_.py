"""`meshtrain import SOURCE OUT`: a checkpoint of torch (DCP, .pt, .bin) made into a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from meshtrain.commands.export import Dtype
from meshtrain.flags import parse

_FLAGS = ("from", "config", "key-map", "dtype", "max-shard-size", "overwrite", "allow-pickle")


@dataclass(frozen=True)
class Settings:
    """Make a Hugging Face directory of a checkpoint that torch has pickled: a directory of torch.distributed.checkpoint (as
    torchtitan and torchtune write it), or files of torch.save (a state dict, pytorch_model.bin). Only the model's weights
    are taken. docs/import.md tells more."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Directory with .metadata, file of torch.save, or directory with pytorch_model.bin."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Directory to make; it appears complete or not at all."""
    kind: Annotated[Literal["dcp", "pt"], tyro.conf.arg(name="from")]
    """What SOURCE is: dcp, or pt for anything that torch.save wrote."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the one in SOURCE)")] = (
        None
    )
    """The model's config.json. Its numbers of heads and shapes are held against the weights."""
    key_map: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="{llama-torchtitan,llama-torchtune,FILE}", help_behavior_hint="(default: keys stay as they are)"
        ),
    ] = None
    """How keys are renamed: for a Llama of torchtitan (or Meta's files) or torchtune, or by a JSON file."""
    dtype: Dtype = None
    """Dtype of the floating-point weights."""
    max_shard_size: str = "5GB"
    """Largest size of one file, as 5GB or 512MiB."""
    overwrite: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Replace OUT if it is a model directory."""
    allow_pickle: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Say that you trust SOURCE: it is unpickled, and a pickle may run code."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    given = parse(Settings, arguments, "meshtrain import", _FLAGS)
    from meshtrain.convert.importing import import_model

    done = import_model(
        given.source,
        given.out,
        kind=given.kind,
        key_map=given.key_map,
        config=given.config,
        dtype=given.dtype,
        max_shard_size=given.max_shard_size,
        overwrite=given.overwrite,
        allow_pickle=given.allow_pickle,
    )
    for part, count in sorted(done.left_out.items()):
        print(f"left out {part} ({count} tensors)")
    if not done.has_config:
        print("there is no config.json, so that transformers cannot open it; give one with --config")
    print(f"wrote {done.path} ({done.tensors} tensors)")
    return 0
